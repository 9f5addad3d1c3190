"""Times on a real TPU: `python -m gdn2_kernels bench --suite quick`.

Every row is checked before it is timed: the stage has to agree with the float64 oracle
on the chip at hand. Without a TPU nothing is written; `--rehearse` walks through the
same steps at small shapes, so that a mistake shows before an hour of TPU is spent.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn2_kernels import bench, oracle
from gdn2_kernels.api import STAGES, gdn2
from gdn2_kernels.audit.measure import relative_error
from gdn2_kernels.environment import on_tpu

# Relative L2 error against the oracle that a stage may have before it is timed.
BOUND = {"default": 2e-2, "high": 2e-5, "highest": 1e-5}


class Row(NamedTuple):
    """One time to take. D = K = V; direction "forward" or "both" (with gradients)."""

    stage: str
    direction: str = "both"
    B: int = 4
    L: int = 2048
    H: int = 6
    D: int = 128
    dtype: str = "float32"
    precision: str = "high"


def _published():
    """The shapes of the published tables, and ours beside them."""
    shapes = [(4, L, H) for H in (2, 4, 6) for L in (2048, 4096)]
    shapes += [(8, 4096, 4), (1, 1024, 6), (8, 4096, 6)]
    rows = [Row(s, "both", *shape) for shape in shapes for s in STAGES[1:]]
    rows += [Row(s, "forward", 8, 4096, 6) for s in STAGES[1:]]
    narrow = dict(dtype="bfloat16", precision="default")
    rows += [Row("mxu", x, **narrow) for x in ("forward", "both")]
    rows += [Row("mxu", "both", D=D) for D in (64, 256)]
    rows += [Row("mxu", "both", L=8192), Row("mxu", "forward", 1, 8192, 24, **narrow)]
    return rows


SUITES = {
    "quick": [
        *(
            Row(stage, x)
            for stage in ("atomic_gdn2", "mxu")
            for x in ("forward", "both")
        ),
        Row("mxu", "both", dtype="bfloat16", precision="default"),
        Row("wy"),
    ],
    "published": _published(),
}


def inputs_of(row: Row):
    """Six inputs in the row's dtype, g in float32, and the cotangents of both results."""
    x = bench.example_inputs(row.B, row.L, row.H, row.D, row.D)
    x = [y if i == 3 else y.astype(row.dtype) for i, y in enumerate(x)]
    return *x, x[2], jnp.ones((row.B, row.H, row.D, row.D), jnp.float32)


def function_of(row: Row):
    """What is timed: of the arguments that `inputs_of` gives."""

    def forward(*x):
        return gdn2(*x, stage=row.stage, precision=row.precision)

    def both(*arguments):
        results, pull = jax.vjp(forward, *arguments[:6])
        return *results, *pull(arguments[6:])

    return both if row.direction == "both" else lambda *x: forward(*x[:6])


def self_test(row: Row) -> float:
    """The stage on this device against the oracle, at a small shape.

    Returns: the largest relative L2 error of outputs and, where they are timed,
      gradients.

    Raises:
      RuntimeError: an error above what the precision promises.
    """
    small = row._replace(B=1, L=min(row.L, 200), H=min(row.H, 2))
    x = inputs_of(small)
    found = jax.jit(function_of(small))(*x)
    *six, do, d_state = (np.asarray(y, np.float64) for y in x)
    true = list(oracle.forward(*six))
    if row.direction == "both":
        gradients = oracle.backward(*six, do, d_state)
        true += [gradients[name] for name in oracle.GRADIENTS[:6]]
    errors = [float(relative_error(a, b)) for a, b in zip(found, true, strict=True)]
    bound = BOUND[row.precision] if row.dtype == "float32" else BOUND["default"]
    if not max(errors) <= bound:
        raise RuntimeError(
            f"{row.stage} at precision {row.precision!r} is wrong on this device: relative "
            f"L2 error {max(errors):.1e}, at most {bound:.0e} expected. No time was taken."
        )
    return max(errors)


def measure(row: Row, repeats: int) -> dict:
    """Times of one row, with its error; where it does not run, the reason."""
    try:
        error = self_test(row)
        times = bench.measure(function_of(row), *inputs_of(row), repeats=repeats)
    except (ValueError, jax.errors.JaxRuntimeError) as problem:
        return {**row._asdict(), "failed": str(problem).splitlines()[0][:200]}
    return {**row._asdict(), **times, "relative_error": error}


def commit() -> str | None:
    """Of the sources, where they are a clone; None elsewhere."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def rehearsal(row: Row) -> Row:
    return row._replace(B=1, L=64, H=1, D=16)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gdn2_kernels bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="default: measured_DEVICE.json"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="small shapes, any device, nothing written",
    )
    chosen = parser.parse_args(arguments)
    if not (on_tpu() or chosen.rehearse):
        print(
            f"bench: expected a TPU, found {jax.devices()[0].device_kind}. Times of this "
            "machine say nothing about a TPU and are not written; --rehearse tries the steps.",
            file=sys.stderr,
        )
        return 2
    rows = SUITES[chosen.suite]
    if chosen.rehearse:
        # One of each kind: the shapes are the same.
        rows = list(dict.fromkeys(map(rehearsal, rows)))
    results = []
    for n, row in enumerate(rows, 1):
        what = f"{row.stage}, {row.direction}, B={row.B} L={row.L} H={row.H} D={row.D}"
        print(
            f"[{n}/{len(rows)}] {what}, {row.dtype}, {row.precision}: ",
            end="",
            flush=True,
        )
        results.append(measure(row, 2 if chosen.rehearse else chosen.repeats))
        found = results[-1]
        print(found.get("failed") or f"{found['milliseconds']:.3f} ms", flush=True)
    if chosen.rehearse:
        print("A rehearsal: nothing was written.")
        return 0
    kind = jax.devices()[0].device_kind.replace(" ", "_")
    path = Path(chosen.output or f"measured_{kind}.json")
    how = f"python -m gdn2_kernels bench --suite {chosen.suite} --repeats {chosen.repeats}"
    about = {
        **bench.provenance(how),
        "libtpu": jax.devices()[0].client.platform_version,
    }
    path.write_text(
        json.dumps(
            {"provenance": {**about, "commit": commit()}, "results": results}, indent=1
        )
    )
    print(
        f"{path}: {len(results)} rows. How to share them: CONTRIBUTING, section Results."
    )
    return 0
