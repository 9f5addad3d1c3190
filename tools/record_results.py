"""Make the results that the book reads: `python tools/record_results.py cpu` and `... v5e`.

Each writes one file in book/data that says how, with which versions and when it was made. Not part of the tests: times
belong to the machine that ran them.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp

import gdn2_kernels as gk
from gdn2_kernels import bench, v5e

DATA = pathlib.Path(__file__).parent.parent / "book" / "data"


def gradients(stage, precision="high"):
    """Forward and backward of a stage: gradients of all six inputs, both results reaching the loss."""

    def loss(*inputs):
        o, state = gk.gdn2(*inputs, stage=stage, precision=precision)
        return jnp.square(o.astype(jnp.float32)).sum() + jnp.square(state).sum()

    return jax.grad(loss, argnums=range(6))


def cpu():
    """wy against associative_scan in one run, forward and backward."""
    shape = dict(B=1, L=2048, H=4, K=64, V=64)
    inputs = bench.example_inputs(**shape)
    results = {}
    # Both in float32: the baseline always is. On a CPU the three passes of "high" are three products.
    for name, stage, precision, repeats in [
        ("associative_scan", "associative_scan", "highest", 5),
        ("wy", "wy", "highest", 21),
        ("wy_high", "wy", "high", 21),
    ]:
        results[name] = bench.measure(gradients(stage, precision), *inputs, repeats=repeats)
        print(name, results[name], flush=True)
    baseline, wy = results["associative_scan"], results["wy"]
    results["speedup"] = baseline["milliseconds"] / wy["milliseconds"]
    results["memory_ratio"] = baseline["peak_bytes"] / wy["peak_bytes"]
    how = "python tools/record_results.py cpu: gradients of all six inputs, float32, precision highest, " + str(shape)
    return {"provenance": bench.provenance(how), "shape": shape, "results": results}


def v5e_memory():
    """Bytes of forward and backward by the v5e compiler."""
    lengths = {64: (512, 1024), 128: (512, 1024, 2048, 4096)}
    shapes = [dict(B=1, L=L, H=1, K=D, V=D) for D in lengths for L in lengths[D]]
    shapes.append(dict(B=4, L=2048, H=6, K=128, V=128))
    rows = []
    for shape in shapes:
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda s=shape: bench.example_inputs(**s))]
        for stage in ("associative_scan", "wy"):
            report = v5e.compile(gradients(stage), *specs, count=False)
            rows.append({**shape, "stage": stage, "total_bytes": report.total_bytes,
                         "temporary_bytes": report.temporary_bytes, "flops": report.flops})  # fmt: skip
            print(rows[-1], flush=True)
    how = "python tools/record_results.py v5e: gradients of all six inputs, float32, precision high, ahead of time, no TPU"
    return {"provenance": {**bench.provenance(how), "libtpu": report.libtpu}, "results": rows}


if __name__ == "__main__":
    name, make = {"cpu": ("cpu_benchmark", cpu), "v5e": ("v5e_memory", v5e_memory)}[sys.argv[1]]
    path = DATA / f"{name}.json"
    DATA.mkdir(exist_ok=True)
    path.write_text(json.dumps(make(), indent=1) + "\n")
    print("wrote", path)
