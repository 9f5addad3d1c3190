"""How the launches of this stage cut arrays into blocks: one place for shapes, one call
of `pl.pallas_call`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.stages.views import mesh_axes

TILE = 8  # rows of one float32 vector register


class Dims(NamedTuple):
    """Sizes of the arrays that kernels see; K and V are multiples of 128 there."""

    B: int
    H: int
    N: int  # chunks
    C: int  # tokens of a chunk
    K: int
    V: int

    @property
    def pairs(self) -> int:
        """Pairs i >= j of a chunk times key channels."""
        return self.C * (self.C + 1) // 2 * self.K


class Options(NamedTuple):
    """What a launch has to know besides its arrays."""

    dims: Dims
    precision: str
    interpret: object  # bool, or pltpu.InterpretParams in tests


def shape_and_block(kind: str, dims: Dims, backwards: bool = False):
    """Whole shape of an array, and the block of it that grid step (b, h, n) works on.

    "keys" and "values" are (B, L, H*D): the block index picks the head, nothing is
    transposed in HBM. States are kept transposed, rows are value channels: so a decay,
    one number per key channel, multiplies lanes and needs no column.
    """
    B, H, N, C, K, V = dims

    first = np.int32(0)  # a Python zero would be int64 under x64

    def chunk(n):
        return N - 1 - n if backwards else n

    def tokens(D):
        return (B, N * C, H * D), (None, C, D), lambda b, h, n: (b, chunk(n), h)

    def per_chunk(*block):
        shape = (B, H, N, *block)
        index = (first, first)
        return shape, (None,) * 3 + block, lambda b, h, n: (b, h, chunk(n), *index)

    shape, block, index = {
        "keys": lambda: tokens(K),
        "values": lambda: tokens(V),
        "square": lambda: per_chunk(C, C),
        "row": lambda: per_chunk(1, K),
        "state": lambda: per_chunk(V, K),
        "head": lambda: (
            (B, H, V, K), (None, None, V, K), lambda b, h, n: (b, h, first, first)
        ),
    }[kind]()
    return shape, pl.BlockSpec(block, index)


def launch(
    kernel,
    options: Options,
    inputs,  # (kind, array), ..
    outputs,  # (kind, dtype), ..
    *,
    name: str,
    flops: int,  # of one chunk of one head
    exps: int = 0,
    scratch=(),  # float32 shapes in VMEM
    in_order: bool = False,
    backwards: bool = False,
) -> list[jax.Array]:
    """Run `kernel` once per (batch, head, chunk), refs in the order of `inputs`,
    `outputs`, `scratch`.

    in_order: the chunks of a head one after another, so that scratch carries from one
      to the next. Otherwise every grid step stands alone. backwards: last chunk first.
    """
    dims = options.dims

    def spec(kind):
        return shape_and_block(kind, dims, backwards)[1]

    for kind, array in inputs:
        expected = shape_and_block(kind, dims)[0]
        assert array.shape == expected, (name, kind, array.shape, expected)
    axes = mesh_axes(inputs[0][1])
    chunks = pltpu.ARBITRARY if in_order else pltpu.PARALLEL
    out_shape = [
        jax.ShapeDtypeStruct(shape_and_block(kind, dims)[0], dtype, **axes)
        for kind, dtype in outputs
    ]
    moved = [array for _, array in inputs] + out_shape
    steps = dims.B * dims.H * dims.N
    return pl.pallas_call(
        kernel,
        grid=(dims.B, dims.H, dims.N),
        in_specs=[spec(kind) for kind, _ in inputs],
        out_specs=[spec(kind) for kind, _ in outputs],
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, chunks)
        ),
        cost_estimate=pl.CostEstimate(
            flops=steps * flops,
            transcendentals=steps * exps,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
        ),
        interpret=options.interpret,
        name=f"{name}_C{dims.C}_K{dims.K}_V{dims.V}",
    )(*(array for _, array in inputs))


# ------------------------------------------------------ inside a kernel


def f32(ref):
    """The block as float32: a v5e has no bfloat16 arithmetic."""
    return ref[...].astype(jnp.float32)


def rows_and_columns(shape):
    """Two int32 arrays of `shape`: the row and the column of each element."""
    return [jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1)]


def only(where, x):
    """x, and zero elsewhere."""
    # A Python zero would be a float64 under x64, which Mosaic does not have.
    return jnp.where(where, x, jnp.zeros_like(x))


def lower(x, diagonal=True):
    """x (C, C) with zeros above its diagonal, or on it too."""
    row, column = rows_and_columns(x.shape)
    return only(row >= column if diagonal else row > column, x)


def shift(x, down):
    """Rows moved `down` places (up if negative), rows without a source zero."""
    rows = x.shape[0]
    row, _ = rows_and_columns(x.shape)
    moved = pltpu.roll(x, jnp.int32(down % rows), 0)
    return only(row >= down if down > 0 else row < rows + down, moved)


# Running sums along the rows of (C, D). All are sums of what they name: an exclusive
# one is never an inclusive one minus a term, which would lose the digits that the two
# have in common.


def sum_up_to(x):
    """Row t: rows 0 .. t summed."""
    step = 1
    while step < x.shape[0]:
        x = x + shift(x, step)
        step *= 2
    return x


def sum_from(x):
    """Row t: rows t, t+1, .. summed."""
    step = 1
    while step < x.shape[0]:
        x = x + shift(x, -step)
        step *= 2
    return x


def sum_before(x):
    """Row t: rows 0 .. t-1 summed."""
    return shift(sum_up_to(x), 1)


def sum_after(x):
    """Row t: rows t+1, t+2, .. summed."""
    return shift(sum_from(x), -1)
