"""Record what the chapter `sharding` quotes, in book/data/sharding.json. Two parts, in any order:

    python tools/record_sharding.py collectives [--go-on]   what programs for eight chips, v5e:2x4, say to each other
    python tools/record_sharding.py cycles                  of the shares that one chip gets

No TPU is needed: both compile ahead of time with libtpu, 48 and up to 33 programs of up to a minute each, and write what
they have after each of them. --go-on keeps the programs that the file has; reports of the second are kept (see
v5e.compile).
"""

import collections
import functools
import importlib.metadata
import itertools
import json
import os
import sys
import time

import record_mxu
from record_cycles import ROOT

from gdn2_kernels.v5e.compile import ENVIRONMENT

os.environ.update(ENVIRONMENT, TPU_ACCELERATOR_TYPE="v5litepod-8")  # before libtpu is loaded

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gdn2_kernels as gk
from gdn2_kernels import bench, sharding
from gdn2_kernels.v5e.collectives import collectives, summary

DATA = ROOT / "book" / "data" / "sharding.json"

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


def known():
    """Shares that the record of chapter `mxu` has already: B = 4 at the same sizes."""
    wanted = {**record_mxu.DEFAULTS, "B": 4}
    rows = json.loads(record_mxu.DATA.read_text())["results"]
    return {x["H"]: x for x in rows if all(x[name] == wanted[name] for name in wanted if name != "H")}


def held_bytes(row):
    """Arguments, results and temporaries: six inputs, o, do and six gradients; four states."""
    pairs, L, D = row["B"] * row["H"], 2048, 128
    return row["temporary_bytes"] + 4 * pairs * (14 * L * D + 4 * D * D)


def cycles():
    rows, there = [], known()
    for B, H in sorted(shares(), key=lambda x: not (x[0] == 4 and x[1] in there)):  # what is there first
        row = there[H] if B == 4 and H in there else record_mxu.compiled(dict(B=B, H=H))
        moved = sum(x["hbm_bytes"] for x in row["launches"])
        row = {name: row[name] for name in ("B", "H", "milliseconds", "cycles", "temporary_bytes")}
        rows.append({**row, "moved_bytes": moved, "held_bytes": held_bytes(row)})
        print(rows[-1], flush=True)
        done = f"{len(rows)} of {len(shares())} shares"
        how = (f"python tools/record_sharding.py cycles, {done}, those of B = 4 and H up to 12 from v5e_mxu.json: compiled "
               "cycles of stage mxu, forward and backward of one chip's share; no TPU")  # fmt: skip
        provenance = {**bench.provenance(how), "libtpu": importlib.metadata.version("libtpu")}
        write(cycles={"provenance": provenance, "L": 2048, "D": 128, "results": rows})


# ------------------------------------------------------ what eight chips say to each other

SHAPE = dict(B=8, L=64, H=8, D=16)  # small, to be compiled in minutes: what is sent does not hang on it, only how much
SPREAD = {  # mesh axes and their sizes
    "H": dict(head=8),
    "L": dict(sequence=8),
    "H x B": dict(batch=2, head=4),
    "B": dict(batch=8),
}


def compiled(stage, spread, how, gradient):
    """The text of one program for v5e:2x4."""
    chips = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    axes = SPREAD[spread]
    mesh = Mesh(chips.reshape(*axes.values()), tuple(axes))
    batch, sequence, head = (x if x in axes else None for x in ("batch", "sequence", "head"))
    tokens, state = NamedSharding(mesh, P(batch, sequence, head)), NamedSharding(mesh, P(batch, head))
    run = {"jit": gk.gdn2, "shard_map": functools.partial(sharding.gdn2_sharded, mesh)}[how]
    if how == "shard_map" and sequence:
        run = functools.partial(sharding.sequence_parallel, mesh)

    def forward(*inputs):
        return run(*inputs, stage=stage, interpret=False)

    def both(do, d_state, *inputs):
        results, pull = jax.vjp(forward, *inputs)
        return results, pull((do, d_state))

    B, L, H, D = SHAPE.values()
    x = jax.ShapeDtypeStruct((B, L, H, D), jnp.float32, sharding=tokens)
    s = jax.ShapeDtypeStruct((B, H, D, D), jnp.float32, sharding=state)
    results = (tokens, state)
    if gradient:
        program = jax.jit(both, out_shardings=(results, (tokens,) * 6)).lower(x, s, *[x] * 6)
    else:
        program = jax.jit(forward, out_shardings=results).lower(*[x] * 6)
    return program.compile()


def talk(go_on):
    rows = json.loads(DATA.read_text())["collectives"]["results"] if go_on else []
    there = [[row[x] for x in ("spread", "stage", "how", "gradient")] for row in rows]
    programs = itertools.product(SPREAD, ("associative_scan", "mxu", "wy"), ("shard_map", "jit"), (True, False))
    for spread, stage, how, gradient in sorted(programs, key=lambda x: not x[3]):  # a gradient has its forward in it
        if [spread, stage, how, gradient] in there:
            continue
        row = dict(stage=stage, how=how, spread=spread, gradient=gradient)
        start = time.perf_counter()
        try:
            program = compiled(stage, spread, how, gradient)
        except Exception as error:
            row["refused"] = str(error).splitlines()[0][:300]
        else:
            found = collectives(program.as_text(), 8)
            row["summary"] = summary(found)
            # Equal ones are listed once.
            row["collectives"] = [
                {"number": n, **x._asdict(), "microseconds": x.microseconds} for x, n in collections.Counter(found).items()
            ]
            row["temporary_bytes"] = program.memory_analysis().temp_size_in_bytes
        rows.append(row)
        print(f"{time.perf_counter() - start:5.0f} s", {k: v for k, v in row.items() if k != "collectives"}, flush=True)
        made = "python tools/record_sharding.py collectives: compiled ahead of time for v5e:2x4, read off the compiled program; no TPU"
        provenance = {**bench.provenance(made), "libtpu": importlib.metadata.version("libtpu")}
        write(collectives={"provenance": provenance, "shape": SHAPE, "results": rows})


def write(**parts):
    record = json.loads(DATA.read_text()) if DATA.exists() else {}
    DATA.write_text(json.dumps({**record, **parts}, indent=1) + "\n")
    print("wrote", DATA)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["cycles"]:
            cycles()
        case ["collectives", *go_on] if go_on in ([], ["--go-on"]):
            talk(bool(go_on))
        case _:
            raise SystemExit(__doc__)
