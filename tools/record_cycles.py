"""Programs whose cycles the chapter `atomic_gdn2` quotes, and the table made of them.

No TPU is needed: libtpu compiles for a v5e that is not there, and a model of its in-order core counts the cycles of what
came out. Which tool does that is not decided here. It calls a function of this file, compiles `fn(*args)` for one v5e,
and writes a report as JSON: {"record_cycles.py:gradients(H=4)": {..}, ..} with the keys that `row` reads. Then

    python tools/record_cycles.py REPORT.json ..

writes book/data/v5e_atomic_gdn2.json. `python tools/record_cycles.py` prints the calls that the chapter needs.
"""

import datetime
import importlib.metadata
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from gdn2_kernels.stages import STAGES  # noqa: E402
from gdn2_kernels.stages.atomic_gdn2 import chunk  # noqa: E402
from gdn2_kernels.stages.atomic_gdn2 import stage as atomic_gdn2_stage  # noqa: E402
from gdn2_kernels.stages.mxu import stage as mxu_stage  # noqa: E402

DATA = ROOT / "book" / "data" / "v5e_atomic_gdn2.json"
CLOCK = 1.5e9  # Hz
BANDWIDTH = 819e9  # bytes per second of HBM
# Slots of a bundle; the matrix units are counted in cycles of four.
SLOTS = {"MATMUL": 4, "XLU": 3, "VALU": 4, "EUP": 1, "VLOAD": 3, "VSTORE": 1}
DEFAULTS = dict(stage="atomic_gdn2", B=4, L=2048, H=6, D=128, dtype="float32", precision="high",
                residuals="save", heads=None, axes=3, sub=None, chunk_size=None)  # fmt: skip
HEADS = {"atomic_gdn2": atomic_gdn2_stage.HEADS, "mxu": mxu_stage.MOST_HEADS}  # limits that an option changes

CALLS = [
    *(dict(H=H) for H in range(1, 17)),
    *(dict(heads=(n, n)) for n in (1, 2, 3, 6)),
    dict(axes=4),
    dict(H=8, axes=4),
    dict(residuals="recompute"),
    *(dict(sub=n) for n in (8, 32)),
    dict(stage="atomic_ops"),
    *(dict(L=L) for L in (1024, 4096)),
    *(dict(H=H, L=4096) for H in (2, 4)),
    dict(dtype="bfloat16", precision="default"),
]

# Times on real v5e chips, published by others. Quoted as theirs.
PUBLISHED = {
    "fused": {
        "what": "atomic-gdn2 0.2.0, forward and backward, B=4, D=128, float32, one v5e chip",
        "source": "github.com/Akseleu-J/atomic-ops, attestation/scaling.json: jax 0.11.2, libtpu 0.0.48",
        "milliseconds": [
            {"H": 2, "L": 2048, "ms": 1.498},
            {"H": 2, "L": 4096, "ms": 2.781},
            {"H": 4, "L": 2048, "ms": 2.485},
            {"H": 4, "L": 4096, "ms": 4.668},
            {"H": 6, "L": 2048, "ms": 2.563},
            {"H": 6, "L": 4096, "ms": 5.352},
        ],
    },
    "launch per step": {
        "what": "atomic-ops 0.1.0, forward and backward, B=4, H=6, D=128, float32, one v5e chip",
        "source": "github.com/Akseleu-J/atomic-ops, README of 0.2.0: jax 0.11.1, libtpu 0.0.46.1",
        "milliseconds": [{"H": 6, "L": 2048, "ms": 30.86}, {"H": 6, "L": 4096, "ms": 88.07}],
    },
}


def stage_and_shapes(**options):
    """A stage as a function of the six inputs and the initial state. options: see `DEFAULTS`. heads: at most so many side by
    side, (forward, backward). axes: 3 for inputs (B, L, H*D), as a projection makes them, 4 for (B, L, H, D). sub: rows of a
    sub-block.

    Returns: stage, shapes of the tokens and of the state.
    """
    o = {**DEFAULTS, **options}
    B, L, H, D = (o[x] for x in "BLHD")
    extra = {}
    if o["stage"] == "atomic_gdn2":
        extra["residuals"] = o["residuals"]
        if o["sub"]:
            chunk.SUB = atomic_gdn2_stage.SUB = o["sub"]
    if o["heads"]:
        HEADS[o["stage"]].update(zip(("forward", "backward"), o["heads"]))

    def stage(q, k, v, g, b, w, state):
        inputs = [x.reshape(B, L, H, D) for x in (q, k, v, g, b, w)]
        out, final_state = STAGES[o["stage"]](
            *inputs, jnp.float32(D**-0.5), state, precision=o["precision"], chunk_size=o["chunk_size"],
            interpret=False, **extra
        )  # fmt: skip
        return out.reshape(q.shape), final_state

    tokens = jax.ShapeDtypeStruct((B, L, H, D) if o["axes"] == 4 else (B, L, H * D), jnp.dtype(o["dtype"]))
    return stage, tokens, jax.ShapeDtypeStruct((B, H, D, D), jnp.float32)


def forward(**options):
    """Results of a stage. Returns: fn, args (shapes only)."""
    stage, tokens, state = stage_and_shapes(**options)
    return stage, (*[tokens] * 6, state)


def gradients(**options):
    """Results and all gradients of a stage, cotangents of both results given. Returns: fn, args (shapes only)."""
    stage, tokens, state = stage_and_shapes(**options)

    def fn(*args):
        *args, do, d_state = args
        results, pull = jax.vjp(stage, *args)
        return *results, *pull((do, d_state))

    return fn, (*[tokens] * 6, state, tokens, state)


def options_of(call):
    """The options in "file.py:gradients(H=4)", defaults included."""
    return {**DEFAULTS, **eval(call.split(":")[-1], {"gradients": dict})}


def row(options, report):
    """What a chapter keeps of one report."""
    launches = []
    for kernel in report["table"]:
        if kernel["kind"] != "pallas":
            continue
        # Cycles a unit is busy, had it nothing to wait for; spills and fills are among the stores and loads.
        units = {name: round(kernel["units"].get(name, 0) / slots) for name, slots in SLOTS.items()}
        units["MATMUL"] = round(kernel["mxu_busy"] * kernel["sim_cycles"])
        units["XLU"] = round(kernel["units"].get("XLU", 0) / SLOTS["XLU"])
        launches.append({
            "name": kernel["name"],
            "cycles": kernel["cycles_per_call"],
            "hbm_bytes": kernel["hbm_bytes"],
            "hbm_cycles": kernel["dma_cycles"],
            "vmem_bytes": kernel["vmem"],
            "units": units,
            "spill_stores": kernel["units"].get("SPILL", 0),
            "spill_loads": kernel["units"].get("FILL", 0),
            "stalls": {name: round(cycles) for name, cycles in kernel["stalls"].items()},
            "bundles": kernel["bundles_dyn"],
        })  # fmt: skip
    others = [x for x in report["table"] if x["kind"] != "pallas"]
    return {
        **options,
        "milliseconds": report["est_ms"],
        "cycles": report["est_cycles"],
        "temporary_bytes": report["hbm_temp_bytes"],
        "pallas_launches": sum(x["calls"] for x in report["table"] if x["kind"] == "pallas"),
        "launches": launches,
        "other_instructions": len(others),
        "other_milliseconds": sum(x["us"] * x["calls"] for x in others) / 1e3,
    }


def provenance(what, jax_version):
    """What a reader has to know of recorded cycles."""
    return {
        "how": f"{what} compiled ahead of time for one TPU v5e; cycles counted over the compiler's final bundles by a model of "
        "the in-order core at 1.5 GHz, HBM at 819 GB/s. No TPU was involved: these are not measured times",
        "date": datetime.date.today().isoformat(),
        "jax": jax_version,
        "libtpu": importlib.metadata.version("libtpu"),
        "shapes": "B, L, H and D = K = V stand with each result; float32 and precision high, unless it says otherwise",
    }


def main(paths):
    rows, versions = [], set()
    for path in paths:
        for call, report in json.loads(pathlib.Path(path).read_text()).items():
            if "error" in report:
                raise SystemExit(f"{call}: {report['error']}")
            rows.append(row(options_of(call), report))
            versions.add(report["jax"])
    rows.sort(key=lambda x: [f"{x[name]:05}" if isinstance(x[name], int) else str(x[name]) for name in DEFAULTS])
    (version,) = versions
    what = "python tools/record_cycles.py on reports of its function `gradients`: forward and backward"
    record = {"provenance": provenance(what, version), "clock": CLOCK, "bandwidth": BANDWIDTH, "published": PUBLISHED, "results": rows}
    DATA.write_text(json.dumps(record, indent=1) + "\n")
    print("wrote", DATA)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        for call in CALLS:
            print(f"tools/record_cycles.py:gradients({', '.join(f'{k}={v!r}' for k, v in call.items())})")
