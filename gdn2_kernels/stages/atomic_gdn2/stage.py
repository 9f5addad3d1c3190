"""Two launches as one differentiable function."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.environment import on_tpu
from gdn2_kernels.stages.atomic_gdn2.chunk import SUB
from gdn2_kernels.stages.atomic_gdn2.kernels import backward_kernel, forward_kernel
from gdn2_kernels.stages.views import (
    check,
    mesh_axes,
    padded,
    state_in,
    state_out,
    tokens_in,
    tokens_out,
)  # fmt: skip

CHUNK_SIZE = 64
LARGEST_CHUNK = 128
HEADS = {"forward": 4, "backward": 2}  # at most so many side by side in a grid step
VMEM_LIMIT = 100 * 2**20


class Options(NamedTuple):
    """What a launch has to know besides its arrays; K and V are multiples of 128."""

    B: int
    H: int
    N: int  # chunks
    C: int  # tokens of a chunk
    K: int
    V: int
    precision: str
    residuals: str  # "save" or "recompute"
    interpret: object  # bool, or pltpu.InterpretParams in tests


def heads_per_step(H: int, largest: int) -> int:
    """Largest divisor of H that is at most `largest`."""
    return max(n for n in range(1, largest + 1) if H % n == 0)


def shape_and_block(kind, options, heads, backwards):
    """Whole shape of an array, and the block of it that a grid step works on."""
    B, H, N, C, K, V, *_ = options
    zero = np.int32(0)  # a Python zero would be int64 under x64

    def chunk(n):
        return N - 1 - n if backwards else n

    def tokens(D):
        block = pl.BlockSpec((None, C, heads * D), lambda b, h, n: (b, chunk(n), h))
        return (B, N * C, H * D), block

    def per_chunk(*shape):
        block = (None, None, heads, *shape)
        index = lambda b, h, n: (b, chunk(n), h, zero, zero)  # noqa: E731
        return (B, N, H, *shape), pl.BlockSpec(block, index)

    def per_head(*shape):
        block = (None, heads, *shape)
        index = lambda b, h, n: (b, h, zero, zero)  # noqa: E731
        return (B, H, *shape), pl.BlockSpec(block, index)

    return {
        "scale": lambda: (
            (1, 1),
            pl.BlockSpec(
                (1, 1), lambda b, h, n: (zero, zero), memory_space=pltpu.SMEM
            ),
        ),
        "keys": lambda: tokens(K),
        "values": lambda: tokens(V),
        "square": lambda: per_chunk(C, C),
        "state of a chunk": lambda: per_chunk(V, K),
        "state of a head": lambda: per_head(V, K),
        "row of a head": lambda: per_head(1, K),
    }[kind]()


def launch(kernel, name, options, inputs, outputs, scratch, backwards=False):
    """One pallas_call over (batch, groups of heads, chunks in order).

    inputs: (kind, array), ..; outputs: (kind, dtype), ..; scratch: shapes of one head.
    """
    B, H, N, C, K, V, *_ = options
    heads = heads_per_step(H, HEADS[name])
    spec = functools.partial(
        shape_and_block, options=options, heads=heads, backwards=backwards
    )
    axes = mesh_axes(inputs[0][1])
    return pl.pallas_call(
        functools.partial(
            kernel, K=K, V=V, precision=options.precision,
            unroll=options.interpret is False,
        ),  # fmt: skip
        grid=(B, H // heads, N),
        in_specs=[spec(kind)[1] for kind, _ in inputs],
        out_specs=[spec(kind)[1] for kind, _ in outputs],
        out_shape=[
            jax.ShapeDtypeStruct(spec(kind)[0], dtype, **axes) for kind, dtype in outputs
        ],
        scratch_shapes=[pltpu.VMEM((heads, *x), jnp.float32) for x in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=options.interpret,
        name=f"gdn2_{name}_C{C}_K{K}_V{V}_heads{heads}",
    )(*(x for _, x in inputs))


class Residuals(NamedTuple):
    """What the backward launch is given besides the inputs."""

    entering: jax.Array  # (B, N, H, V, K) state entering each chunk
    kept: list  # [X, Aqk (B, N, H, C, C), vn (B, L, H*V)], or [] to compute them again


def residual_bytes(B, L, H, K, V, chunk_size=CHUNK_SIZE, residuals="save"):
    """Bytes of `Residuals`: K*V numbers per chunk and head; saved, 2C + V per token more.

    K and V count as the multiples of 128 that they are padded to, L as whole chunks.
    """
    C, N, K, V = chunk_size, -(-L // chunk_size), padded(K), padded(V)
    numbers = K * V + (C * (2 * C + V) if residuals == "save" else 0)
    return 4 * B * N * H * numbers


KINDS = ("keys", "keys", "values", "keys", "keys", "values")  # of q, k, v, g, b, w


def forward(q, k, v, g, b, w, scale, initial_state, options):
    """One launch. Returns: (o (B, L, H*V), final state (B, H, V, K)), `Residuals`."""
    float32 = jnp.float32
    inputs = [("scale", scale), *zip(KINDS, (q, k, v, g, b, w))]
    inputs.append(("state of a head", initial_state))
    outputs = [("values", v.dtype), ("state of a head", float32)]
    outputs.append(("state of a chunk", float32))
    if options.residuals == "save":
        outputs += [("square", float32), ("square", float32), ("values", float32)]
    scratch = [(options.V, options.K)]
    o, final, entering, *kept = launch(
        forward_kernel, "forward", options, inputs, outputs, scratch
    )
    return (o, final), Residuals(entering, kept)


def backward(inputs, residuals, do, d_final_state, options):
    """One launch. Returns: gradients of the six inputs, scale and the initial state."""
    *six, scale = inputs
    arrays = [("scale", scale), *zip(KINDS, six)]
    arrays += [("state of a chunk", residuals.entering), ("values", do)]
    arrays.append(("state of a head", d_final_state))
    arrays += zip(("square", "square", "values"), residuals.kept)
    outputs = [(kind, x.dtype) for kind, x in zip(KINDS, six)]
    outputs += [("state of a head", jnp.float32), ("row of a head", jnp.float32)]
    kernel = functools.partial(backward_kernel, recompute=not residuals.kept)
    scratch = [(options.V, options.K), (SUB, options.C, options.K)]
    *gradients, d_initial, d_scale = launch(
        kernel, "backward", options, arrays, outputs, scratch, backwards=True
    )
    return *gradients, jnp.sum(d_scale).reshape(1, 1), d_initial


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def with_backward(q, k, v, g, b, w, scale, initial_state, options):
    """q, k, g, b (B, L, H*K), v, w (B, L, H*V), scale (1, 1), initial_state
    (B, H, V, K), L whole chunks. Returns: o (B, L, H*V), final state (B, H, V, K).
    """
    return forward(q, k, v, g, b, w, scale, initial_state, options)[0]


def _with_backward_fwd(q, k, v, g, b, w, scale, initial_state, options):
    results, residuals = forward(q, k, v, g, b, w, scale, initial_state, options)
    return results, ((q, k, v, g, b, w, scale), residuals)


def _with_backward_bwd(options, kept, cotangents):
    return backward(*kept, *cotangents, options)


with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)


def atomic_gdn2(
    q, k, v, g, b, w, scale, initial_state, *,
    precision, chunk_size, interpret, residuals="save",
):  # fmt: skip
    """One Pallas launch forward, one backward. Shapes and contract as `gdn2`.

    residuals: "save" keeps X, Aqk and vn of every chunk for the backward launch,
      "recompute" only the state entering it.

    Raises:
      ValueError: K or V not a multiple of 8 up to 256, float64 inputs, a chunk size
        below 16 or above 128.
    """
    check("atomic_gdn2", q, v, chunk_size, SUB, LARGEST_CHUNK)
    B, L, H, K = q.shape
    V = v.shape[-1]
    C = chunk_size or max(SUB, min(CHUNK_SIZE, 1 << (L - 1).bit_length()))
    N = -(-L // C)
    if interpret is None:
        interpret = not on_tpu()
    options = Options(
        B, H, N, C, padded(K), padded(V), precision, residuals, interpret
    )

    inputs = [tokens_in(x, N * C) for x in (q, k, v, g, b, w)]
    scale = scale.astype(jnp.float32).reshape(1, 1)
    o, final_state = with_backward(*inputs, scale, state_in(initial_state), options)
    return tokens_out(o, L, H, V), state_out(final_state, K, V)
