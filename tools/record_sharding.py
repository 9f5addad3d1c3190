"""Record what the chapter `sharding` quotes, in book/data/sharding.json. Two parts, in any order:

    python tools/record_sharding.py collectives     programs for eight chips, v5e:2x4, and what they say to each other
    python tools/record_sharding.py cycles COMMAND ..   COMMAND is the counting program of `record_cycles.py`

No TPU is needed: both compile ahead of time with libtpu. The first takes about five minutes, the second about half an
hour; its reports are kept in _build/record_sharding for one state of the kernels, so that a run that broke off goes on.
"""

import hashlib
import itertools
import json
import sys

import record_cycles
import record_mxu
from record_cycles import ROOT

DATA = ROOT / "book" / "data" / "sharding.json"
REPORTS = ROOT / "_build" / "record_sharding"

# ------------------------------------------------------ cycles of one chip's share

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]  # chips over batch, over heads
BATCHES, HEADS = (4, 8, 16), (6, 8, 16, 32)
MANY_HEADS = (6, 8, 16, 24, 32, 48, 64)  # of B = 4, on one chip and on eight


def shares():
    """(B, H) of one chip, every one that a table needs, the small ones first."""
    found = {(4, H) for H in MANY_HEADS}
    found |= {(4, H // 8) for H in MANY_HEADS if H % 8 == 0} | {(1, H // 2) for H in MANY_HEADS}
    for B, H, (batch, head) in itertools.product(BATCHES, HEADS, MESHES):
        if B % batch == 0 and H % head == 0:
            found.add((B // batch, H // head))
    # Of one number of pairs all splits, then the next: a run that is broken off has whole rows of the tables. The first
    # shares of 8 and 16 pairs say most.
    return sorted(found, key=lambda x: (x[0] * x[1] not in (8, 16), x[0] * x[1], x[0]))


def state_of_kernels():
    state = hashlib.sha256()
    for path in [ROOT / "gdn2_kernels" / "tile.py", *sorted((ROOT / "gdn2_kernels" / "stages").rglob("*.py"))]:
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def cycles(command):
    folder = REPORTS / state_of_kernels()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for B, H in shares():
        report = record_mxu.report_on(dict(B=B, H=H), command, folder)
        row = record_cycles.row(dict(B=B, H=H), report)
        hbm = sum(x["hbm_bytes"] for x in row["launches"])
        row = {name: row[name] for name in ("B", "H", "milliseconds", "cycles", "temporary_bytes")}
        rows.append({**row, "moved_bytes": hbm, "held_bytes": row["temporary_bytes"] + report["hbm_arg_bytes"] + report["hbm_out_bytes"]})
        print(rows[-1], flush=True)
        done = f"{len(rows)} of {len(shares())} shares"  # written as they come: half an hour can be too long
        how = f"python tools/record_sharding.py cycles with a counting program, {done}: stage mxu, forward and backward, one chip's share"
        write(cycles={"provenance": record_cycles.provenance(how, report["jax"]), "L": 2048, "D": 128, "results": rows})


def write(**parts):
    record = json.loads(DATA.read_text()) if DATA.exists() else {}
    DATA.write_text(json.dumps({**record, **parts}, indent=1) + "\n")
    print("wrote", DATA)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["cycles", *command] if command:
            cycles(command)
        case _:
            raise SystemExit(__doc__)
