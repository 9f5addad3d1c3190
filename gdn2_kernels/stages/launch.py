"""How Pallas stages cut arrays into blocks: one place for shapes, one call of
`pl.pallas_call`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.environment import on_tpu
from gdn2_kernels.stages.views import (
    mesh_axes,
    padded,
    state_in,
    state_out,
    tokens_in,
    tokens_out,
)  # fmt: skip
from gdn2_kernels.tile import int32


class Dims(NamedTuple):
    """Sizes of the arrays that kernels see; K and V are multiples of 128 there."""

    B: int
    H: int
    N: int  # chunks
    C: int  # tokens of a chunk
    K: int
    V: int
    members: int = 1  # heads that share the channels of what counts as one head

    @property
    def rows(self) -> int:
        """Tokens, the last chunk filled up."""
        return self.N * self.C

    @property
    def pairs(self) -> int:
        """Pairs i >= j of a chunk times key channels."""
        return self.C * (self.C + 1) // 2 * self.K


class Options(NamedTuple):
    """What a launch has to know besides its arrays."""

    dims: Dims
    precision: str
    interpret: object  # bool, or pltpu.InterpretParams in tests

    @classmethod
    def of(cls, q, v, precision, chunk_size, interpret, *, smallest, usual, members=1):
        """For q (B, L, H, K) and v (B, L, H, V). What was not asked for: chunks of the
        `usual` size, shorter ones where L is short; interpreted where no TPU is.
        """
        B, L, H, K = q.shape
        C = chunk_size or max(smallest, min(usual, 1 << (L - 1).bit_length()))
        dims = Dims(B, H, -(-L // C), C, padded(K), padded(v.shape[-1]), members)
        interpret = not on_tpu() if interpret is None else interpret
        return cls(dims, precision, interpret)

    def heads_per_step(self, limit: int) -> int:
        """`heads_per_step`, but one where kernels are interpreted as XLA programs: what
        XLA rounds in one head would hang on the head beside it, and take longer to compile.
        """
        return heads_per_step(self.dims.H, 1 if self.interpret is True else limit)


def on_blocks(run, inputs, initial_state, options: Options):
    """run(*inputs, initial_state), its arrays as kernels see them: for inputs q, k, v,
    g, b, w (B, L, H, D), of any L. Returns: o (B, L, H, V), final state (B, H, K, V),
    of members (B, H, K, V/members) as the initial one.
    """
    (_, L, H, _), V = inputs[0].shape, inputs[2].shape[-1]
    inputs = [tokens_in(x, options.dims.rows) for x in inputs]
    whole, _ = shape_and_block("head", options.dims)
    o, final_state = run(*inputs, state_in(initial_state, whole))
    return tokens_out(o, L, H, V), state_out(final_state, initial_state.shape)


def heads_per_step(H: int, limit: int) -> int:
    """How many heads go side by side, where at most `limit` can.

    A step costs about half a head whatever is in it, so few large groups pay, and empty
    places do not: 7 heads, at most 3 at once, go in four groups of 2. The last group
    may reach over the end of the arrays. What it reads there is undefined, what it
    writes there is dropped, and no head looks at another.
    """

    def cost(heads):
        return -(-H // heads) * (heads + 0.5), -heads

    return min(range(1, min(H, limit) + 1), key=cost)


KINDS = ("keys", "keys", "values", "keys", "keys", "values")  # of q, k, v, g, b, w


def shape_and_block(kind: str, dims: Dims, heads=None, backwards=False, batch=None):
    """Whole shape of an array, and the block of it that grid step (b, h, n) works on.

    heads: so many heads side by side, an axis of the block, or for tokens a part of the
      lanes. None: one head, and no axis for it.
    batch: so many entries of the batch, the first axis of the block. None: one, no axis.
    backwards: last chunk first.

    "keys" and "values" are (B, L, H*D): the block index picks the heads, nothing is
    transposed in HBM. Kernels hold a "state" transposed, rows are value channels: so a
    decay, one number per key channel, multiplies lanes and needs no column. The states
    that come in and go out, "head", are (K, V) as everywhere else: kernels turn them.

    Members lie side by side in the channels of tokens. Of every other array each of them
    has a block of its own, in its own share of the lanes; but in "head" they stand one
    below the other, as in memory.
    """
    B, H, N, C, K, V, members = dims
    zero = int32(0)  # a Python zero would be int64 under x64

    def chunk(n):
        return N - 1 - n if backwards else n

    def tokens(D):
        block = (batch, C, (heads or 1) * D)
        return (B, dims.rows, H * D), block, lambda b, h, n: (b, chunk(n), h)

    def per_chunk(*shape):
        block = (batch, heads, None, *shape)
        return (B, H, N, *shape), block, lambda b, h, n: (b, h, chunk(n), zero, zero)

    def per_head(*shape):
        block = (batch, heads, *shape)
        return (B, H, *shape), block, lambda b, h, n: (b, h, zero, zero)

    shape, block, index = {
        "keys": lambda: tokens(K),
        "values": lambda: tokens(V),
        "square": lambda: per_chunk(C, members * C),
        "turned values": lambda: per_chunk(V // members, members * C),
        "row": lambda: per_chunk(1, K),
        "state": lambda: per_chunk(V // members, K),
        "head": lambda: per_head(K, V // members),
        "head row": lambda: per_head(1, K),
        "head rows": lambda: per_head(8, K),
        "number": lambda: ((1, 1), (1, 1), lambda b, h, n: (zero, zero)),
    }[kind]()
    space = {"memory_space": pltpu.SMEM} if kind == "number" else {}
    return shape, pl.BlockSpec(block, index, **space)


def launch(
    kernel,
    options: Options,
    inputs,  # (kind, array), ..
    outputs,  # (kind, dtype), ..
    *,
    name: str,
    flops: int,  # of one chunk of one head
    exps: int = 0,
    scratch=(),  # float32 shapes in VMEM, for one head
    heads: int | None = None,
    batch: int | None = None,
    in_order: bool = False,
    backwards: bool = False,
    vmem_limit: int | None = None,
) -> list[jax.Array]:
    """Run `kernel` once per (batch or group of it, group of heads, chunk), refs in the order of
    `inputs`, `outputs`, `scratch`.

    heads, batch: see `shape_and_block`; scratch has one axis for all heads of a step.
    in_order: the chunks of a head one after another, so that scratch carries from one
      to the next. Otherwise every grid step stands alone.
    """
    dims = options.dims

    def shape(kind):
        return shape_and_block(kind, dims)[0]

    def specs(kinds):
        return [
            shape_and_block(kind, dims, heads, backwards, batch)[1] for kind in kinds
        ]

    for kind, array in inputs:
        assert array.shape == shape(kind), (name, kind, array.shape, shape(kind))
    axes = mesh_axes(inputs[0][1])
    chunks = pltpu.ARBITRARY if in_order else pltpu.PARALLEL
    out_shape = [
        jax.ShapeDtypeStruct(shape(kind), dtype, **axes) for kind, dtype in outputs
    ]
    moved = [array for _, array in inputs] + out_shape
    steps = dims.B * dims.H * dims.N
    together = () if heads is None else (heads * (batch or 1),)
    suffix = "" if heads is None else f"_heads{together[0]}"
    full_name = f"{name}_C{dims.C}_K{dims.K}_V{dims.V}{suffix}"
    call = pl.pallas_call(
        kernel,
        grid=(-(-dims.B // (batch or 1)), -(-dims.H // (heads or 1)), dims.N),
        in_specs=specs(kind for kind, _ in inputs),
        out_specs=specs(kind for kind, _ in outputs),
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((*together, *x), jnp.float32) for x in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, chunks),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=steps * flops,
            transcendentals=steps * exps,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
        ),
        interpret=options.interpret,
        name=full_name,
    )
    # Before JAX 0.8 the compiled program does not know a kernel by its own name.
    with jax.named_scope(full_name):
        return call(*(array for _, array in inputs))
