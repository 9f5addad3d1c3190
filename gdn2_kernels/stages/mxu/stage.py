"""Two launches as one differentiable function."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.environment import on_tpu
from gdn2_kernels.stages.mxu import backward as fast_backward
from gdn2_kernels.stages.mxu import forward as fast_forward
from gdn2_kernels.stages.mxu import plain_kernels
from gdn2_kernels.stages.views import (
    check,
    mesh_axes,
    padded,
    refusal,
    state_in,
    state_out,
    tokens_in,
    tokens_out,
)  # fmt: skip

CHUNK_SIZE = 128  # of the fast kernels: a chunk fills a matrix unit
SMALLEST_CHUNK = 16
VMEM_BUDGET = 37 * 2**20  # for blocks and scratch; the compiler's own comes on top
VMEM_LIMIT = 100 * 2**20  # what a kernel may use in all
# Heads side by side in a grid step. More would hide no more latency, and the first step's
# blocks have no earlier step to arrive behind. Interpreted, each is compiled by itself.
MOST_HEADS = 12
MOST_HEADS_INTERPRETED = 2


class Options(NamedTuple):
    """What a launch has to know besides its arrays; K and V are multiples of 128."""

    B: int
    H: int
    N: int  # chunks
    C: int  # tokens of a chunk
    K: int
    V: int
    precision: str
    interpret: object  # bool, or pltpu.InterpretParams in tests

    @property
    def kept(self):
        """dtype of the residuals. At "default" products round them to bfloat16 anyway."""
        return jnp.bfloat16 if self.precision == "default" else jnp.float32


def block_and_shape(kind, options, at_once, backwards):
    """The block of an array that a grid step works on, and its whole shape."""
    B, H, N, C, K, V, *_ = options
    batch, heads = at_once
    zero = np.int32(0)  # a Python zero would be int64 under x64

    def chunk(n):
        return N - 1 - n if backwards else n

    def tokens(D):
        index = lambda b, h, n: (b, chunk(n), h)  # noqa: E731
        return (batch, C, heads * D), index, (B, N * C, H * D)

    def per_chunk(*shape):
        index = lambda b, h, n: (b, chunk(n), h, zero, zero)  # noqa: E731
        return (batch, None, heads, *shape), index, (B, N, H, *shape)

    def per_head(*shape):
        index = lambda b, h, n: (b, h, zero, zero)  # noqa: E731
        return (batch, heads, *shape), index, (B, H, *shape)

    return {
        "scale": lambda: ((1, 1), lambda b, h, n: (zero, zero), (1, 1)),
        "keys": lambda: tokens(K),
        "values": lambda: tokens(V),
        "square": lambda: per_chunk(C, C),
        "turned values": lambda: per_chunk(V, C),
        "state of a chunk": lambda: per_chunk(V, K),
        "state of a head": lambda: per_head(V, K),
        "row of a head": lambda: per_head(8, K),
    }[kind]()


def heads_at_once(B, H, most):
    """(batch, heads) of a grid step: as many heads as `most` allows, spread over the
    batch where H alone is too small, without filling blocks with heads that do not exist
    where that can be avoided.
    """

    def cost(pair):
        batch, heads = pair
        computed = -(-B // batch) * batch * -(-H // heads) * heads
        return computed * (1 + 1 / (2 * batch * heads)), batch

    pairs = ((b, h) for b in range(1, B + 1) for h in range(1, H + 1) if b * h <= most)
    return min(pairs, key=cost)


def launch(name, options, inputs, outputs):
    """One pallas_call over (batch, groups of heads, chunks in order).

    name: "forward" or "backward". inputs: (kind, array), ..; outputs: (kind, dtype), ..
    """
    B, H, N, C, K, V, *_ = options
    kernel = (FAST if C == CHUNK_SIZE else PLAIN)[name]
    scratch = kernel.scratch(C, K, V)
    at_once = heads_at_once(B, H, most_heads(options, inputs, outputs, scratch))
    describe = functools.partial(
        block_and_shape, options=options, at_once=at_once, backwards=name == "backward"
    )

    def spec(kind):
        block, index, _ = describe(kind)
        space = pltpu.SMEM if kind == "scale" else pltpu.VMEM
        return pl.BlockSpec(block, index, memory_space=space)

    axes = mesh_axes(inputs[0][1])
    heads = at_once[0] * at_once[1]
    return pl.pallas_call(
        functools.partial(kernel.body, precision=options.precision),
        grid=(-(-B // at_once[0]), -(-H // at_once[1]), N),
        in_specs=[spec(kind) for kind, _ in inputs],
        out_specs=[spec(kind) for kind, _ in outputs],
        out_shape=[
            jax.ShapeDtypeStruct(describe(kind)[2], dtype, **axes) for kind, dtype in outputs
        ],
        scratch_shapes=[pltpu.VMEM((heads, *x), jnp.float32) for x in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=options.interpret,
        name=f"gdn2_mxu_{name}_C{C}_K{K}_V{V}_heads{heads}",
    )(*(x for _, x in inputs))


def bytes_of_a_head(options, inputs, outputs, scratch):
    """VMEM of one head in a grid step: blocks twice, one on its way while the other is
    worked on, scratch once.
    """
    kinds = [(kind, x.dtype) for kind, x in inputs] + list(outputs)
    total = 4 * sum(int(np.prod(shape)) for shape in scratch)
    for kind, dtype in kinds:
        block, *_ = block_and_shape(kind, options, (1, 1), False)
        numbers = int(np.prod([n for n in block if n]))
        total += 2 * numbers * jnp.dtype(dtype).itemsize
    return total


def most_heads(options, *arrays):
    """As many as are of use and fit."""
    most = MOST_HEADS_INTERPRETED if options.interpret else MOST_HEADS
    return max(1, min(most, VMEM_BUDGET // bytes_of_a_head(options, *arrays)))


# ------------------------------------------------------ forward and backward


class Residuals(NamedTuple):
    """What the backward launch is given besides the inputs; float32, or bfloat16 at
    precision "default", whose products round them anyway.
    """

    X: jax.Array  # (B, N, H, C, C), transposed
    Aqk: jax.Array  # (B, N, H, C, C), transposed
    vn: jax.Array  # (B, N, H, V, C), transposed
    entering: jax.Array  # (B, N, H, V, K) state entering each chunk


RESIDUALS = ("square", "square", "turned values", "state of a chunk")
KINDS = ("keys", "keys", "values", "keys", "keys", "values")  # of q, k, v, g, b, w


class Kernel(NamedTuple):
    body: object  # of (scale, inputs, outputs, scratch refs), precision
    scratch: object  # of (C, K, V): float32 scratch shapes of one head


FAST = {
    "forward": Kernel(fast_forward.forward_kernel, fast_forward.forward_scratch),
    "backward": Kernel(fast_backward.backward_kernel, fast_backward.backward_scratch),
}
PLAIN = {
    "forward": Kernel(plain_kernels.forward_kernel, plain_kernels.scratch),
    "backward": Kernel(plain_kernels.backward_kernel, plain_kernels.scratch),
}


def forward(q, k, v, g, b, w, scale, initial_state, options):
    """One launch. Returns: (o (B, L, H*V), final state (B, H, V, K)), `Residuals`."""
    inputs = [("scale", scale), *zip(KINDS, (q, k, v, g, b, w))]
    inputs.append(("state of a head", initial_state))
    outputs = [("values", v.dtype), ("state of a head", jnp.float32)]
    outputs += [(kind, options.kept) for kind in RESIDUALS]
    o, final, *residuals = launch("forward", options, inputs, outputs)
    return (o, final), Residuals(*residuals)


def backward(inputs, residuals, do, d_final_state, options):
    """One launch. Returns: gradients of the six inputs, scale and the initial state."""
    *six, scale = inputs
    arrays = [("scale", scale), *zip(KINDS, six), *zip(RESIDUALS, residuals)]
    arrays += [("values", do), ("state of a head", d_final_state)]
    outputs = [(kind, x.dtype) for kind, x in zip(KINDS, six)]
    outputs += [("state of a head", jnp.float32), ("row of a head", jnp.float32)]
    *gradients, d_initial, d_scale = launch("backward", options, arrays, outputs)
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


def serves(q, v, chunk_size) -> bool:
    return refusal("mxu", q, v, chunk_size, SMALLEST_CHUNK, CHUNK_SIZE) is None


def mxu(q, k, v, g, b, w, scale, initial_state, *, precision, chunk_size, interpret):
    """Pairwise decay on the matrix unit. Shapes and contract as `gdn2`.

    chunk_size: None or 128 for the fast kernels; 16, 32 or 64 for their plain twins.

    Raises:
      ValueError: K or V not a multiple of 8 up to 256, float64 inputs, a chunk size
        below 16 or above 128.
    """
    check("mxu", q, v, chunk_size, SMALLEST_CHUNK, CHUNK_SIZE)
    B, L, H, K = q.shape
    V = v.shape[-1]
    C = chunk_size or CHUNK_SIZE
    N = -(-L // C)
    if interpret is None:
        interpret = not on_tpu()
    options = Options(B, H, N, C, padded(K), padded(V), precision, interpret)

    inputs = [tokens_in(x, N * C) for x in (q, k, v, g, b, w)]
    scale = scale.astype(jnp.float32).reshape(1, 1)
    o, final_state = with_backward(*inputs, scale, state_in(initial_state), options)
    return tokens_out(o, L, H, V), state_out(final_state, K, V)
