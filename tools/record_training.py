"""Record what the chapter `language_model` quotes, in book/data/training.json, part by part:

    python tools/record_training.py tiny      300 steps of `tiny` on the standard library, on this machine
    python tools/record_training.py recall    associative recall, GDN-2 and attention, on this machine
    python tools/record_training.py v5e       training steps compiled ahead of time for TPU v5e: memory, collectives
    python tools/record_training.py cycles    their compiled cycles

Times of the first two are those of a machine that does other things too; its load is recorded beside them. With --go-on
the last two keep the steps that the file has.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import sys
import tempfile
import time

from record_cycles import ROOT

from gdn2_kernels.v5e.compile import ENVIRONMENT

if sys.argv[1:2] not in (["tiny"], ["recall"]):  # before libtpu is loaded
    os.environ.update(ENVIRONMENT, TPU_ACCELERATOR_TYPE="v5litepod-8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gdn2_kernels import bench, corpus, model, train
from gdn2_kernels import v5e as v5e_lab
from gdn2_kernels.v5e import machine
from gdn2_kernels.v5e.collectives import collectives, summary

DATA = ROOT / "book" / "data" / "training.json"


def write(**parts):
    record = json.loads(DATA.read_text()) if DATA.exists() else {}
    DATA.write_text(json.dumps({**record, **parts}, indent=1) + "\n")
    print("wrote", DATA, *parts, flush=True)


def timed(run):
    """Result, and how long it took under which load."""
    before, start, cpu = os.getloadavg()[0], time.perf_counter(), time.process_time()
    result = run()
    return result, {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu,
                    "load_before": before, "load_after": os.getloadavg()[0]}  # fmt: skip


# ------------------------------------------------------ on this machine


def tiny(steps=300, B=8, L=256):
    config = model.PRESETS["tiny"]
    text = corpus.load("stdlib")
    cut = len(text) * 19 // 20
    (state, losses), how_long = timed(lambda: train.train(config, corpus.batches(text[:cut], B, L), steps))
    prompt = b"def "
    found = model.generate(state["params"], jnp.asarray([[*prompt]]), config, 240, jax.random.key(0), 0.6)
    command = f"python -m gdn2_kernels train --preset tiny --data stdlib --steps {steps} --batch {B} --length {L}"
    write(tiny={
        "provenance": bench.provenance(f"python tools/record_training.py tiny; the same training as: {command}"),
        **how_long, "parameters": model.count(state["params"]), "steps": steps, "batch": B, "length": L, "bytes": len(text),
        "losses": [round(x, 4) for x in losses], "skipped": int(state["skipped"]),
        "held_out": train.held_out(config, state["params"], text[cut:]),
        "sample": (prompt + bytes(np.asarray(found[0], np.uint8))).decode(errors="replace"),
    })  # fmt: skip


RECALL = dict(B=32, pairs=8, L=32, vocabulary=64)
READER = model.Config(d_model=64, heads=2, head_dim=32, layers=2, mlp=128, vocabulary=64, gate_rank=16)


def recall(steps=700, every=50):
    rows = {}
    batches = corpus.recall_batches(**RECALL)
    unseen = [batches(10**6 + n) for n in range(8)]
    unseen = tuple(np.concatenate(x) for x in zip(*unseen))
    for name, config in {"gdn2": READER, "attention": dataclasses.replace(READER, attention_every=1)}.items():
        with tempfile.TemporaryDirectory() as folder:
            curve = []

            def run(config=config, folder=folder, curve=curve):
                for at in range(every, steps + 1, every):
                    state, losses = train.train(config, batches, steps, folder=folder, stop_at=at, save_every=steps, bar=False)
                    curve.append([at, train.accuracy(config, state["params"], unseen)])
                    print(name, curve[-1], f"{losses[-1]:.3f}", flush=True)
                return state

            state, how_long = timed(run)
        rows[name] = {"curve": curve, "parameters": model.count(state["params"]), **how_long}
    write(recall={"provenance": bench.provenance("python tools/record_training.py recall"), **RECALL, "steps": steps, "results": rows})


# ------------------------------------------------------ for v5e, ahead of time

STEPS = [  # preset, stage, chips, batch of all chips
    ("34.87M", "mxu", 1, 8),
    ("334M", "mxu", 8, 8),
    ("307M", "mxu", 8, 8),
    ("34.87M", "wy", 1, 8),
    ("34.87M", "atomic_gdn2", 1, 8),
    ("34.87M", "associative_scan", 1, 8),
]
LENGTH = 2048
PUBLISHED = {"what": "one training step of a 34.87M model, B=8, L=2048, one v5e chip, measured and published by others",
             "source": "jax-ml/jax discussion 42116", "fused_ms": 204.6, "associative_scan_ms": 24101.3}  # fmt: skip


def step_program(preset, stage, chips, B):
    """A training step and the shapes of its arguments, placed on the chips."""
    config = dataclasses.replace(model.PRESETS[preset], stage=stage)
    optimize = train.optimizer(1000)
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices[:chips])
    mesh = Mesh(devices, ("batch",))
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    if chips == 1:
        whole = spread = SingleDeviceSharding(devices[0])
    shapes = jax.eval_shape(functools.partial(train.begin, config, optimize))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
    batch = [jax.ShapeDtypeStruct((B, LENGTH), jnp.int32, sharding=spread)] * 2
    # Also on one chip: a mesh says that kernels are compiled, whatever device is here.
    return functools.partial(train.step, config=config, optimize=optimize, mesh=mesh), (state, *batch), whole


def still_to_do(part, go_on):
    """Rows that the file has, and those of `STEPS` that it has not."""
    rows = json.loads(DATA.read_text()).get(part, {}).get("results", []) if go_on else []
    there = [(x["preset"], x["stage"], x["chips"], x["B"]) for x in rows]
    return rows, [x for x in STEPS if x not in there]


def v5e(go_on):
    rows, steps = still_to_do("v5e", go_on)
    for preset, stage, chips, B in steps:
        row = dict(preset=preset, stage=stage, chips=chips, B=B, L=LENGTH, remat=model.PRESETS[preset].remat, dtype=model.PRESETS[preset].dtype)
        start = time.perf_counter()
        try:
            fn, shapes, whole = step_program(preset, stage, chips, B)
            compiled = jax.jit(fn, donate_argnums=0, out_shardings=whole).lower(*shapes).compile()
        except Exception as error:
            row["refused"] = str(error)[:400]
        else:
            memory = compiled.memory_analysis()
            found = collectives(compiled.as_text(), chips)
            row |= {
                "parameters": model.count(shapes[0]["params"]),
                "argument_bytes": memory.argument_size_in_bytes,
                # The new state takes the place of the old one.
                "total_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
                "summary": summary(found),
            }
        rows.append(row)
        print(f"{time.perf_counter() - start:.0f} s", row, flush=True)
        made = f"python tools/record_training.py v5e, {len(rows)} of {len(STEPS)} steps: compiled ahead of time for TPU v5e; no TPU was involved"
        write(v5e={"provenance": {**bench.provenance(made), "libtpu": importlib.metadata.version("libtpu")},
                   "published": PUBLISHED, "results": rows})  # fmt: skip


def cycles(go_on):
    """Of one chip, and what the collectives take by the stated figures of the links."""
    rows, steps = still_to_do("cycles", go_on)
    for preset, stage, chips, B in steps:
        row = dict(preset=preset, stage=stage, chips=chips, B=B, L=LENGTH)
        fn, arguments, _ = step_program(preset, stage, chips, B)
        start = time.perf_counter()
        try:
            report = v5e_lab.compile(fn, *arguments, topology="v5e:2x4" if chips > 1 else "v5e:1x1", timeout=3600)
        except v5e_lab.CompileError as error:
            row["refused"] = str(error)[:400]
        else:
            kernels = sum(x.calls * x.cycles for x in report.launches if x.kind == "pallas")
            row |= {"milliseconds": report.milliseconds, "kernel_milliseconds": kernels / machine.CLOCK * 1e3,
                    "collective_milliseconds": summary(report.collectives)["microseconds"] / 1e3, "unknown": report.unknown}  # fmt: skip
        rows.append(row)
        print(f"{time.perf_counter() - start:.0f} s", row, flush=True)
        what = f"python tools/record_training.py cycles, {len(rows)} steps: compiled cycles, no TPU"
        write(cycles={"provenance": {**bench.provenance(what), "libtpu": importlib.metadata.version("libtpu")}, "results": rows})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tiny"]:
            tiny()
        case ["recall"]:
            recall()
        case ["v5e" | "cycles" as part, *rest] if rest in ([], ["--go-on"]):
            {"v5e": v5e, "cycles": cycles}[part](go_on=bool(rest))
        case _:
            raise SystemExit(__doc__)
