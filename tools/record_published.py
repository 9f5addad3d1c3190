"""Compile the kernels whose times on real chips were published, count their cycles, and lay both side by side:

    python tools/record_published.py [PROGRAM ..]

(PROGRAM: only those whose names begin so; the others are kept) writes book/data/v5e_predicted.json from
book/data/v5e_published.json. The kernels are those of the public packages atomic-ops 0.2.0 and deltanet-tpu 0.3.0, which
have to be installed (pip install --no-deps; the latter wants Python 3.12). What is not installed is left as it was
recorded. They are no dependency, and nothing of them is here.
"""

import functools
import importlib.metadata
import json
import os
import sys
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from gdn2_kernels import v5e  # noqa: E402
from gdn2_kernels.v5e import lab  # noqa: E402

MEASURED = ROOT / "book" / "data" / "v5e_published.json"
OUTPUT = ROOT / "book" / "data" / "v5e_predicted.json"
NAMES = ("program", "direction", "B", "L", "H", "D")


def shapes(B, H, L, D, head_major):
    return jax.ShapeDtypeStruct((B, H, L, D) if head_major else (B, L, H, D), jnp.float32)


def with_gradients(fn, tokens, state):
    def both(q, k, v, w, b, g, state, do, d_state):
        results, pull = jax.vjp(fn, q, k, v, w, b, g, state)
        return *results, *pull((do, d_state))

    return both, (*[tokens] * 6, state, tokens, state)


def atomic_gdn2(direction, B, L, H, D):
    """atomic-ops 0.2.0, its package atomic_gdn2: bs2=64 as published, L in one call."""
    from atomic_gdn2 import make_blr_trainable, make_cfg

    fn = make_blr_trainable(make_cfg(bs2=64, interpret=False), D**-0.5)
    tokens, state = shapes(B, H, L, D, True), jax.ShapeDtypeStruct((B, H, D, D), jnp.float32)
    return with_gradients(fn, tokens, state) if direction == "both" else (fn, (*[tokens] * 6, state))


def atomic_ops(direction, B, L, H, D, setting):
    """atomic-ops 0.2.0, its package atomic_ops: the kernels of 0.1.0."""
    from atomic_ops import KAGGLE_MEDIUM, KAGGLE_SMALL, gdn2_pallas_forward_trainable

    config = KAGGLE_SMALL if setting.startswith("small") else KAGGLE_MEDIUM  # the latter is what it takes if not told

    def fn(q, k, v, w, b, g, state):
        return gdn2_pallas_forward_trainable(q, k, v, w, b, g, D**-0.5, h0=state, config=config)

    tokens, state = shapes(B, H, L, D, False), jax.ShapeDtypeStruct((B, H, D, D), jnp.float32)
    return with_gradients(fn, tokens, state) if direction == "both" else (fn, (*[tokens] * 6, state))


def deltanet_tpu(direction, B, L, H, D, scalar_decay, key_heads):
    """deltanet-tpu 0.3.0 (published were times of 0.1.0): prefill, bfloat16 products."""
    from deltanet_tpu import chunk_gdn, chunk_gdn2

    keys, values = (jax.ShapeDtypeStruct((B, L, n, D), jnp.float32) for n in (key_heads, H))
    gate = jax.ShapeDtypeStruct((B, L, H), jnp.float32)
    function = chunk_gdn if scalar_decay else chunk_gdn2
    options = dict(is_inference=True, output_final_state=True, qk_l2norm=True)

    def fn(*args):
        # It asks which machine it is on, and interprets its kernels elsewhere.
        with unittest.mock.patch("jax.default_backend", lambda: "tpu"):
            return function(*args, **options)

    return fn, (keys, keys, values, gate, gate) if scalar_decay else (keys, keys, values, keys, keys, values)


PROGRAMS = {
    "atomic_gdn2": ("atomic-ops", atomic_gdn2),
    "atomic_ops": ("atomic-ops", atomic_ops),
    "deltanet_tpu gdn2": ("deltanet-tpu", functools.partial(deltanet_tpu, scalar_decay=False)),
    "deltanet_tpu gdn": ("deltanet-tpu", functools.partial(deltanet_tpu, scalar_decay=True)),
}


def key(row):
    return tuple(row[name] for name in NAMES)


def main(only):
    rows = {}
    if OUTPUT.exists():
        rows = {key(row): row for row in json.loads(OUTPUT.read_text())["results"]}
    for measured in json.loads(MEASURED.read_text())["results"]:
        named = dict(zip(NAMES, key(measured)))
        package, function = PROGRAMS.get(named["program"], (None, None))
        if only and not named["program"].startswith(only):
            continue
        try:
            version = importlib.metadata.version(package or "")
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        options = {name: value for name, value in measured.items() if name in (*NAMES[1:], "key_heads", "setting")}
        fn, args = function(**options)
        try:
            report = v5e.compile(fn, *args, timeout=1800)
        except v5e.CompileError as error:
            print(named, str(error)[:500])
            continue
        rows[key(measured)] = {
            **lab.row({**named, "package": f"{package} {version}", "measured": measured["milliseconds"]}, report),
            "launches": len([x for x in report.launches if x.kind == "pallas"]),
        }
        print(f"{report.milliseconds:8.3f} ms, measured {measured['milliseconds']:8.3f}  {named}", flush=True)
        record = {"provenance": lab.provenance("python tools/record_published.py"), "results": list(rows.values())}
        OUTPUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
