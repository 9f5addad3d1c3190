"""`python -m gdn2_kernels lab`: every stage compiled for v5e at the published shapes, the
counts written to book/data/v5e.json.
"""

import argparse
import datetime
import json
import os
import pathlib

import jax

from gdn2_kernels.stages import STAGES
from gdn2_kernels.v5e import machine
from gdn2_kernels.v5e.compile import CompileError, Unavailable, compile, libtpu_version
from gdn2_kernels.v5e.programs import DEFAULTS, program

# The shape of the published comparison is the default of `program`: B=4 H=6 L=2048 D=128.
PROGRAMS = [
    *(dict(stage=stage) for stage in STAGES),
    *(dict(stage=stage, direction="forward") for stage in STAGES),
    *(dict(stage=stage, dtype="bfloat16", precision="default") for stage in ("atomic_gdn2", "mxu")),
    *(dict(stage="mxu", **x) for x in (dict(H=2), dict(H=4), dict(L=4096), dict(B=8, L=4096))),
]  # fmt: skip
OUTPUT = pathlib.Path("book/data/v5e.json")


def row(options: dict, report) -> dict:
    """What a results file keeps of a report: cycles of one chip, bytes."""
    launches = [
        {
            "name": x.name,
            "kind": x.kind,
            "calls": x.calls,
            "cycles": x.cycles,
            "bundles": x.walk.bundles,
            "hbm_bytes": x.walk.hbm_bytes,
            "matmul_cycles": x.walk.matmul_cycles // machine.MATRIX_UNITS,
            "vmem_bytes": x.vmem_bytes,
            "stalls": x.walk.stalls,
            "slots": x.walk.slots,
            "source": x.source,
        }
        for x in report.launches
        if x.kind == "pallas"
    ]
    return {
        **options,
        "milliseconds": report.milliseconds,
        "cycles": report.cycles,
        "floors": report.floors,
        "hbm_bytes": report.hbm_bytes,
        "temporary_bytes": report.temporary_bytes,
        "vmem_bytes": report.vmem_bytes,
        "occupancy": {unit: round(x, 4) for unit, x in report.occupancy.items()},
        "stalls": report.stalls,
        "spills": report.spills,
        "kernels": report.kernels,
        "operations": sum(x.calls for x in report.launches),
        "compile_seconds": report.compile_seconds,
        "unknown": report.unknown,
        "launches": launches,
    }


def provenance(command: str) -> dict:
    """How numbers came about that no TPU measured."""
    return {
        "how": f"{command}: programs compiled ahead of time for one TPU v5e; cycles "
        "counted over the compiler's final bundles by the model of an in-order core in "
        "gdn2_kernels/v5e, 1.5 GHz, HBM at 819 GB/s. No TPU was involved: these are not "
        "measured times",
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "libtpu": libtpu_version(),
        "shapes": "q, k, v, g, b, w of (B, L, H*D); an initial state and both cotangents "
        "are given; direction both: results and all seven gradients",
    }


def main(arguments):
    parser = argparse.ArgumentParser("python -m gdn2_kernels lab", description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument(
        "--stage", choices=STAGES, help="only this one; others are kept"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds, of a program"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the programs are not run
    try:
        found = {"provenance": provenance("python -m gdn2_kernels lab")}
    except Unavailable as error:
        print(error)
        return 1
    rows = {}
    if options.output.exists():  # rows of programs that are not compiled now
        kept = json.loads(options.output.read_text())["results"]
        rows = {_key(one): one for one in kept}
    for one in PROGRAMS:
        named = {**DEFAULTS, **one}
        label = " ".join(f"{name}={value}" for name, value in one.items())
        if options.stage not in (None, one["stage"]):
            continue
        fn, args = program(**one)
        try:
            report = compile(fn, *args, timeout=options.timeout)
        except CompileError as error:
            print(f"{label}: {error}", flush=True)
            continue
        rows[_key(named)] = row(named, report)
        print(f"{report.milliseconds:10.3f} ms  {label}", flush=True)
        found |= {"clock": machine.CLOCK, "bandwidth": machine.HBM_BANDWIDTH}
        found["results"] = sorted(rows.values(), key=_place)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print("wrote", options.output)
    return 0


def _key(one):
    return tuple(one[name] for name in DEFAULTS)


def _place(one):
    return list(STAGES).index(one["stage"]), str(_key(one))
