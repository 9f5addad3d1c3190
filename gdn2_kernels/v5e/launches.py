"""What a traced program says about its kernels before any compiler is asked."""

import math

import jax
import jax.numpy as jnp

SUBLANES, LANES = 8, 128  # of a register: VMEM and HBM hold arrays in tiles of that


def launches(fn, *args) -> list:
    """The `pallas_call` equations of fn(*args), in order, also those in the programs
    that it calls. args: arrays or jax.ShapeDtypeStruct.
    """
    return list(_launches(jax.make_jaxpr(fn)(*args).jaxpr))


def _launches(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _launches(inner)


def tiled_bytes(array) -> int:
    """Bytes of an array of 32 or 16 bits, its last two axes in whole tiles."""
    *front, rows, lanes = array.shape
    size = jnp.dtype(array.dtype).itemsize
    sublanes = SUBLANES * 4 // size  # 16 bits lie in pairs
    return size * math.prod(front) * -(-rows // sublanes) * sublanes * -(-lanes // LANES) * LANES


def vmem(launch) -> list[tuple[tuple, int, int]]:
    """What a launch holds in VMEM: (shape, copies, bytes of all copies) for each operand,
    result and scratch array in the order of the kernel's refs.

    Blocks are there twice, one in use and one on its way, scratch is there once; what
    lies in scalar memory counts nothing. Registers that the compiler spills come on top.
    """
    refs = [x.aval for x in launch.params["jaxpr"].invars]
    blocks = len(launch.params["grid_mapping"].block_mappings)
    table = []
    for n, ref in enumerate(refs):
        copies = 0 if "smem" in str(ref.memory_space).lower() else 2 if n < blocks else 1
        table.append((ref.shape, copies, copies * tiled_bytes(ref)))
    return table
