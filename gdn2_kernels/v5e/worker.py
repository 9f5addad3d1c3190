"""`python -m gdn2_kernels.v5e.worker PROGRAM ANSWER TOPOLOGY MESH DUMPS`: compile an
exported program for v5e, write what came of it. MESH: JSON, names, sizes and types of
the axes that the chips lie along. DUMPS: the folder that libtpu was told to write to, or
nothing, and then no cycles are counted.

Run by `compile`, which sets the environment.
"""

import dataclasses
import json
import math
import pathlib
import sys
import time

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from gdn2_kernels.v5e.collectives import collectives
from gdn2_kernels.v5e.program import analyse

# The smallest slice that libtpu describes; one of its chips stands for any one.
DESCRIBED = {"v5e:1x1": "v5e:2x2x1", "v5e:2x2": "v5e:2x2x1", "v5e:2x4": "v5e:2x4x1"}


def main(program, answer, topology, mesh, dumps):
    exported = jax.export.deserialize(bytearray(pathlib.Path(program).read_bytes()))
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=DESCRIBED[topology]
    )
    names, sizes, types = json.loads(mesh)
    devices = np.array(described.devices[: math.prod(sizes)]).reshape(sizes)
    axis_types = tuple(AxisType[x] for x in types)
    flat, shapes = placed(exported, Mesh(devices, names, axis_types=axis_types))
    start = time.perf_counter()
    try:
        compiled = flat.lower(*shapes).compile()
    except Exception as error:  # JAX's and that of Mosaic, which no public module names
        result = {"refused": str(error)}
    else:
        result = described_by_compiler(compiled)
        result["compile_seconds"] = time.perf_counter() - start
        text = compiled.as_text() if dumps or exported.nr_devices > 1 else ""
        if exported.nr_devices > 1:
            result["collectives"] = collectives(text, exported.nr_devices)
        if dumps:
            counted = analyse(text, pathlib.Path(dumps))
            result["program"] = dataclasses.asdict(counted)
    pathlib.Path(answer).write_text(json.dumps(result))


def placed(exported, mesh):
    """The program as a jitted function on these chips, and what to lower it with."""
    if exported.nr_devices == 1:
        chip = SingleDeviceSharding(mesh.devices.flat[0])
        flat = jax.jit(exported.call, out_shardings=chip)
        shardings = [chip] * len(exported.in_avals)
    else:
        shardings = exported.in_shardings_jax(mesh)
        results = list(exported.out_shardings_jax(mesh))
        flat = jax.jit(exported.call, out_shardings=results)
    return flat, [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(exported.in_avals, shardings)
    ]


def described_by_compiler(compiled):
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": (cost[0] if isinstance(cost, list) else cost).get("flops", 0.0),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
