"""Record the compiled cycles that the chapter `atomic_gdn2` quotes:

    python tools/record_cycles.py            compile all of `CALLS`, write book/data/v5e_atomic_gdn2.json
    python tools/record_cycles.py --check 1  compile the first, lay it beside what is recorded, write nothing

No TPU is needed: `gdn2_kernels.v5e` compiles for one that is not there and counts. About thirty programs, half an hour.
Reports are kept (see v5e.compile), so that a run that broke off goes on where it stopped.
"""

import argparse
import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the programs are not run

import jax  # noqa: E402

from gdn2_kernels import v5e  # noqa: E402
from gdn2_kernels.stages.atomic_gdn2 import chunk  # noqa: E402
from gdn2_kernels.stages.atomic_gdn2 import stage as atomic_gdn2_stage  # noqa: E402
from gdn2_kernels.v5e import lab, machine  # noqa: E402
from gdn2_kernels.v5e.programs import program  # noqa: E402

DATA = ROOT / "book" / "data" / "v5e_atomic_gdn2.json"
# The words of the results files, and those of a report.
UNITS = {"XLU": "cross-lane", "VALU": "vector", "EUP": "transcendental", "VLOAD": "load", "VSTORE": "store"}
STALLS = {
    "matrix unit busy": "mxu_busy",
    "product not back": "mxu_result",
    "weights not loaded": "mxu_weights",
    "cross-lane unit busy": "xlu_busy",
    "cross-lane result not back": "xlu_result",
    "transcendental not back": "eup_result",
}
DEFAULTS = dict(stage="atomic_gdn2", B=4, L=2048, H=6, D=128, dtype="float32", precision="high",
                residuals="save", heads=None, axes=3, sub=None, chunk_size=None)  # fmt: skip

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


def gradients(**options):
    """Results and all gradients of a stage. options: see `DEFAULTS`. heads: at most so many side by side, (forward,
    backward). sub: rows of a sub-block. Returns: fn, args (shapes only).
    """
    o = {**DEFAULTS, **options}
    extra = {"residuals": o["residuals"]} if o["stage"] == "atomic_gdn2" else {}
    if o["sub"]:
        chunk.SUB = atomic_gdn2_stage.SUB = o["sub"]
    if o["heads"]:
        atomic_gdn2_stage.HEADS.update(zip(("forward", "backward"), o["heads"]))
    plain = {name: value for name, value in o.items() if name not in ("residuals", "heads", "sub")}
    return program(**plain, **extra)


def row(options, report):
    """What a chapter keeps of one report."""
    launches = []
    for kernel in report.launches:
        if kernel.kind != "pallas":
            continue
        ran = kernel.walk
        # Cycles a unit is busy, had it nothing to wait for; spills and fills are among the stores and loads.
        units = {name: round(ran.slots[unit] / machine.SLOTS[unit]) for name, unit in UNITS.items()}
        launches.append({
            "name": kernel.name,
            "cycles": kernel.cycles,
            "hbm_bytes": ran.hbm_bytes,
            "hbm_cycles": round(ran.hbm_bytes / machine.HBM_BYTES_PER_CYCLE),
            "vmem_bytes": kernel.vmem_bytes,
            "units": {"MATMUL": ran.matmul_cycles // machine.MATRIX_UNITS, **units},
            "spill_stores": ran.slots["spill"],
            "spill_loads": ran.slots["fill"],
            "stalls": {STALLS[x]: cycles for x, cycles in ran.stalls.items() if x in STALLS},
            "bundles": ran.bundles,
        })  # fmt: skip
    others = [x for x in report.launches if x.kind != "pallas"]
    return {
        **options,
        "milliseconds": report.milliseconds,
        "cycles": report.cycles,
        "temporary_bytes": report.temporary_bytes,
        "pallas_launches": report.kernels,
        "launches": launches,
        "other_instructions": len(others),
        "other_milliseconds": sum(x.cycles * x.calls for x in others) / machine.CLOCK * 1e3,
    }


def record(calls, compiled, path, command, check):
    """Compile every call and write the table, or only the first `check` and print both. compiled: call -> row."""
    rows = []
    for call in calls[:check]:
        jax.clear_caches()  # traces know nothing of the options that were put into effect
        one = compiled(call)
        rows.append(one)
        print(f"{one['milliseconds']:8.3f} ms  {call}", flush=True)
        if check:
            old = next(
                (x for x in json.loads(path.read_text())["results"]
                 if all(x.get(name) == json.loads(json.dumps(one[name])) for name in one if name in DEFAULTS or name in call)), None)
            print(f"{old['milliseconds']:8.3f} ms  as recorded" if old else "not recorded")
    if not check:
        rows.sort(key=lambda x: [f"{x[name]:05}" if isinstance(x[name], int) else str(x[name]) for name in DEFAULTS])
        made = {**lab.provenance(command), "shapes": SHAPES}
        table = {"provenance": made, "clock": machine.CLOCK, "bandwidth": machine.HBM_BANDWIDTH, "published": PUBLISHED, "results": rows}
        path.write_text(json.dumps(table, indent=1) + "\n")
        print("wrote", path)


SHAPES = "B, L, H and D = K = V stand with each result; float32 and precision high, unless it says otherwise"


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=int, metavar="N", help="compile N programs and compare, write nothing")
    return parser.parse_args()


def compiled(call):
    kept = chunk.SUB, atomic_gdn2_stage.SUB, dict(atomic_gdn2_stage.HEADS)
    try:
        fn, args = gradients(**call)
        return row({**DEFAULTS, **call}, v5e.compile(fn, *args, timeout=1800))
    finally:
        chunk.SUB, atomic_gdn2_stage.SUB, heads = kept
        atomic_gdn2_stage.HEADS.update(heads)


if __name__ == "__main__":
    record(CALLS, compiled, DATA, "python tools/record_cycles.py", options().check)
