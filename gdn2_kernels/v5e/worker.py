"""`python -m gdn2_kernels.v5e.worker PROGRAM ANSWER`: compile an exported program for
v5e, write what came of it.

Run by `compile`, which sets the environment.
"""

import json
import pathlib
import sys
import time

import jax
import jax.export
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding


def main(program, answer):
    exported = jax.export.deserialize(bytearray(pathlib.Path(program).read_bytes()))
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2x1").devices[0]
    chip = SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip) for x in exported.in_avals]
    flat = jax.jit(exported.call, out_shardings=chip)
    start = time.perf_counter()
    try:
        compiled = flat.lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        result = {"refused": str(error)}
    else:
        memory = compiled.memory_analysis()
        cost = compiled.cost_analysis()
        result = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "flops": (cost[0] if isinstance(cost, list) else cost).get("flops", 0.0),
            "compile_seconds": time.perf_counter() - start,
        }
    pathlib.Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
