"""Record the compiled cycles that the chapter `mxu` quotes:

    python tools/record_mxu.py            compile all of `CALLS`, write book/data/v5e_mxu.json
    python tools/record_mxu.py --check 1  compile the first, lay it beside what is recorded, write nothing

About fifty programs, which took 40 minutes on two busy cores. Reports are kept (see v5e.compile), so that a run that
broke off goes on where it stopped.
"""

import record_cycles
from record_cycles import ROOT

from gdn2_kernels import v5e
from gdn2_kernels.stages.mxu import stage

DATA = ROOT / "book" / "data" / "v5e_mxu.json"
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


def compiled(call):
    """The row of one call, compiled with the options of this file put into effect."""
    o = {**DEFAULTS, **call}
    kept = dict(stage.FAST), stage.MOST_HEADS, stage.VMEM_BUDGET
    if o["form"] == "plain":
        stage.FAST.update(stage.PLAIN)
    if o["heads"]:
        stage.MOST_HEADS = o["heads"]
        stage.VMEM_BUDGET = stage.VMEM_LIMIT  # the number asked for, whatever it takes
    passed = {name: x for name, x in o.items() if name not in ("form", "directions", "heads")}
    try:
        fn, args = record_cycles.gradients(**passed, direction=o["directions"])
        report = v5e.compile(fn, *args, timeout=1800)
    finally:
        stage.FAST.update(kept[0])
        stage.MOST_HEADS, stage.VMEM_BUDGET = kept[1:]
    seconds = report.trace_seconds + report.compile_seconds
    return {**record_cycles.row(o, report), "compile_seconds": seconds}


if __name__ == "__main__":
    record_cycles.record(CALLS, compiled, DATA, "python tools/record_mxu.py", record_cycles.options().check)
