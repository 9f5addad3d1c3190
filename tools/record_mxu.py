"""Record the cycles that the chapter `mxu` quotes:

    python tools/record_mxu.py COMMAND ..

COMMAND is the counting program that `record_cycles.py` speaks of. It is run once for each of `CALLS`, as

    COMMAND .. tools/record_mxu.py:gradients(form='plain') --json REPORT

and the table made of all reports is book/data/v5e_mxu.json. About fifty programs are compiled, which took 40 minutes on two busy cores. Reports
are kept in _build/record_mxu for one state of the package, so that a run that broke off goes on where it stopped.
"""

import hashlib
import json
import subprocess
import sys

import record_cycles
from record_cycles import ROOT

from gdn2_kernels.stages.mxu import stage

DATA = ROOT / "book" / "data" / "v5e_mxu.json"
REPORTS = ROOT / "_build" / "record_mxu"
# form: "fast", or "plain" for the plain kernels at any chunk size. directions: "both", or "forward". heads: side by side, at most.
DEFAULTS = {**record_cycles.DEFAULTS, "stage": "mxu", "form": "fast", "directions": "both"}
BF16 = dict(dtype="bfloat16", precision="default")
BEFORE = dict(stage="atomic_gdn2")

CALLS = [
    *({**form, **x} for form in ({}, dict(form="plain"), BEFORE) for x in ({}, BF16)),
    *(dict(directions="forward", **x) for x in ({}, BF16)),
    *(dict(L=L) for L in (1024, 8192)),
    *(dict(D=D, **x) for D in (64, 256) for x in ({}, BF16)),
    dict(precision="highest"),
    # small problems, beside the stage before
    *({**x, "B": 1, "H": H, "L": L} for H in (1, 4) for L in (128, 512) for x in ({}, BEFORE)),
    # heads side by side, and chunk sizes
    *(dict(heads=n, **x) for x in ({}, BF16) for n in (1, 2, 4, 8, 12)),
    *(dict(D=256, heads=n) for n in (1, 2, 4)),
    *(dict(form="plain", chunk_size=C) for C in (32, 64)),
    *(dict(H=H) for H in range(1, 13) if H != 6),
]  # fmt: skip


def prepared(form="fast", directions="both", heads=None, **options):
    """The options of this file put into effect. Returns: the others."""
    if form == "plain":
        stage.FAST.update(stage.PLAIN)
    if heads:
        stage.MOST_HEADS = heads
        stage.VMEM_BUDGET = stage.VMEM_LIMIT  # the number asked for, whatever it takes
    return {**options, "stage": options.get("stage", "mxu")}


def gradients(**options):
    return record_cycles.gradients(**prepared(**options))


def forward(**options):
    return record_cycles.forward(**prepared(**options))


def named(call):
    function = {"both": "gradients", "forward": "forward"}[call.get("directions", "both")]
    return f"tools/record_mxu.py:{function}({', '.join(f'{k}={v!r}' for k, v in call.items())})"


def state_of_package():
    state = hashlib.sha256()
    for path in sorted((ROOT / "gdn2_kernels").rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def path_of(call, folder):
    return folder / f"{hashlib.sha256(named(call).encode()).hexdigest()[:16]}.json"


def report_on(call, command, folder):
    """The report on one call, by the counting program unless it is there."""
    path = path_of(call, folder)
    if not path.exists():
        unfinished = path.with_suffix(".part")
        subprocess.run(
            [*command, named(call), "--json", unfinished], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )  # fmt: skip
        unfinished.rename(path)
    (report,) = json.loads(path.read_text()).values()
    if "error" in report:
        path.unlink()
        raise SystemExit(f"{named(call)}: {report['error']}")
    return report


def main(command):
    folder = REPORTS / state_of_package()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for call in CALLS:
        report = report_on(call, command, folder)
        row = record_cycles.row({**DEFAULTS, **call}, report)
        rows.append({**row, "compile_seconds": report["trace_s"] + report["compile_s"]})
        print(f"{row['milliseconds']:8.3f} ms  {named(call)}", flush=True)
    what = "python tools/record_mxu.py with a counting program: its functions `gradients` and `forward`"
    record = {
        "provenance": record_cycles.provenance(what, report["jax"]),
        "clock": record_cycles.CLOCK,
        "bandwidth": record_cycles.BANDWIDTH,
        "published": record_cycles.PUBLISHED,
        "results": rows,
    }
    DATA.write_text(json.dumps(record, indent=1) + "\n")
    print("wrote", DATA)


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
