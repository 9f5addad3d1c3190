"""Two launches as one differentiable function."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdn2_kernels.stages.launch import (
    KINDS,
    Options,
    launch,
    on_blocks,
    shape_and_block,
)
from gdn2_kernels.stages.mxu import backward as fast_backward
from gdn2_kernels.stages.mxu import forward as fast_forward
from gdn2_kernels.stages.mxu import pairing, plain_kernels
from gdn2_kernels.stages.mxu.tiles import LANES
from gdn2_kernels.stages.views import check, refusal

CHUNK_SIZE = LANES  # of the fast kernels: tokens of a chunk fill a register
SMALLEST_CHUNK = 16
VMEM_BUDGET = 36 * 2**20  # for blocks and scratch; the compiler's own comes on top
VMEM_LIMIT = 100 * 2**20  # what a kernel may use in all
# Heads side by side in a grid step. More would hide no more latency, and the first step's
# blocks have no earlier step to arrive behind. Interpreted, each is compiled by itself.
MOST_HEADS = 12
MOST_HEADS_INTERPRETED = 1


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


def bytes_of_a_head(dims, arrays, scratch):
    """VMEM of one head in a grid step: blocks twice, one on its way while the other is
    worked on, scratch once.

    arrays: (kind, dtype), ..; scratch: float32 shapes.
    """
    total = 4 * sum(math.prod(shape) for shape in scratch)
    for kind, dtype in arrays:
        _, spec = shape_and_block(kind, dims, heads=1, batch=1)
        numbers = math.prod(n or 1 for n in spec.block_shape)
        total += 2 * numbers * jnp.dtype(dtype).itemsize
    return total


def most_heads(options, *arrays_and_scratch):
    """As many as are of use and fit."""
    most = MOST_HEADS_INTERPRETED if options.interpret else MOST_HEADS
    fit = VMEM_BUDGET // bytes_of_a_head(options.dims, *arrays_and_scratch)
    return max(1, min(most, fit))


class Kernel(NamedTuple):
    body: object  # of (scale, inputs, outputs, scratch refs), precision
    scratch: object  # of (C, K, V, members): float32 shapes of one head
    shares: bool = False  # two heads may take part in one product


FAST = {
    "forward": Kernel(
        fast_forward.forward_kernel, fast_forward.forward_scratch, shares=True
    ),
    "forward_only": Kernel(
        functools.partial(fast_forward.forward_kernel, keep=False),
        functools.partial(fast_forward.forward_scratch, keep=False),
        shares=True,
    ),
    "backward": Kernel(fast_backward.backward_kernel, fast_backward.backward_scratch),
}
PLAIN = {
    "forward": Kernel(plain_kernels.forward_kernel, plain_kernels.scratch),
    "forward_only": Kernel(plain_kernels.forward_kernel, plain_kernels.scratch),
    "backward": Kernel(plain_kernels.backward_kernel, plain_kernels.scratch),
}


def launch_one(name, options, inputs, outputs):
    """The launch "forward", "forward_only" or "backward". inputs: (kind, array), ..; outputs: (kind,
    dtype), ..
    """
    dims = options.dims
    kernel = (FAST if dims.members * dims.C == CHUNK_SIZE else PLAIN)[name]
    scratch = kernel.scratch(dims.C, dims.K, dims.V, dims.members)
    arrays = [(kind, x.dtype) for kind, x in inputs] + outputs
    batch, heads = heads_at_once(dims.B, dims.H, most_heads(options, arrays, scratch))
    body = functools.partial(kernel.body, precision=options.precision)
    if kernel.shares and dims.H % heads:
        # What a head that does not exist reads is undefined: it must not share.
        body = functools.partial(body, alone=True)
    return launch(
        body,
        options,
        inputs,
        outputs,
        scratch=scratch,
        heads=heads,
        batch=batch,
        in_order=True,
        backwards=name == "backward",
        vmem_limit=VMEM_LIMIT,
        name=f"gdn2_mxu_{name}" + ("_pairs" if dims.members > 1 else ""),
        flops=flops(dims) * (2 if name == "backward" else 1),
        exps=dims.C * dims.K,
    )


def flops(dims):
    """Of the forward launch, one chunk of one head; the backward one has about twice as
    many.
    """
    C, K, V, members = dims[3:]
    levels = C.bit_length() - 1
    of_inverse = levels * 2 * C**3 * members
    return 6 * C * K * V // members + 4 * C**2 * V + levels * C**2 * K + of_inverse


# ------------------------------------------------------ forward and backward


class Residuals(NamedTuple):
    """What the backward launch is given besides the inputs; float32, or bfloat16 at
    precision "default", whose products round them anyway.
    """

    # Of members, each has half of the columns, and half of the rows of vn and entering.
    X: jax.Array  # (B, H, N, C, C), transposed
    Aqk: jax.Array  # (B, H, N, C, C), transposed
    vn: jax.Array  # (B, H, N, V, C), transposed
    entering: jax.Array  # (B, H, N, V, K) state entering each chunk


RESIDUALS = ("square", "square", "turned values", "state")


def kept_dtype(options):
    return jnp.bfloat16 if options.precision == "default" else jnp.float32


def forward(q, k, v, g, b, w, scale, initial_state, options, keep=True):
    """One launch. Returns: (o (B, L, H*V), final state (B, H, K, V)), `Residuals`, None
    where they are not to be kept.
    """
    inputs = [("number", scale), *zip(KINDS, (q, k, v, g, b, w))]
    inputs.append(("head", initial_state))
    outputs = [("values", v.dtype), ("head", jnp.float32)]
    if not keep:
        return launch_one("forward_only", options, inputs, outputs), None
    outputs += [(kind, kept_dtype(options)) for kind in RESIDUALS]
    o, final, *residuals = launch_one("forward", options, inputs, outputs)
    return (o, final), Residuals(*residuals)


def backward(inputs, residuals, do, d_final_state, options):
    """One launch. Returns: gradients of the six inputs, scale and the initial state."""
    *six, scale = inputs
    arrays = [("number", scale), *zip(KINDS, six)]
    arrays += zip(RESIDUALS, residuals)
    arrays += [("values", do), ("head", d_final_state)]
    outputs = [(kind, x.dtype) for kind, x in zip(KINDS, six)]
    outputs += [("head", jnp.float32), ("head rows", jnp.float32)]
    *gradients, d_initial, d_scale = launch_one("backward", options, arrays, outputs)
    return *gradients, jnp.sum(d_scale).reshape(1, 1), d_initial


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def with_backward(q, k, v, g, b, w, scale, initial_state, options):
    """q, k, g, b (B, L, H*K), v, w (B, L, H*V), scale (1, 1), initial_state
    (B, H, K, V), L whole chunks. Returns: o (B, L, H*V), final state (B, H, K, V).
    """
    inputs = q, k, v, g, b, w, scale, initial_state
    return forward(*inputs, options, keep=False)[0]  # nobody asked for gradients


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

    chunk_size: None for the fast kernels, whose chunks have 128 tokens, or 64 where heads
    with K = V = 64 are computed two at a time (`pairing`); these may be asked for, too.
    Others, 16 .. 64, are for their plain twins. Two heads of a pair, and two neighbours of
    one sequence, which share an inverse (`inverse`), do not mix; but their numbers have
    to be finite, or what is not reaches the neighbour.

    Raises:
      ValueError: K or V not a multiple of 8 up to 256, float64 inputs, a chunk size
        below 16 or above 128.
    """
    check("mxu", q, v, chunk_size, SMALLEST_CHUNK, CHUNK_SIZE)
    tokens, members = (q, k, v, g, b, w), 1
    if pairing.fit(q, v, chunk_size):
        tokens, members = [pairing.tokens_in(x) for x in tokens], pairing.MEMBERS
        initial_state = pairing.state_in(initial_state)
    usual = CHUNK_SIZE // members
    options = Options.of(
        tokens[0], tokens[2], precision, chunk_size, interpret,
        smallest=usual, usual=usual, members=members,
    )  # fmt: skip
    scale = scale.astype(jnp.float32).reshape(1, 1)

    def run(*inputs_and_state):
        *inputs, state = inputs_and_state
        return with_backward(*inputs, scale, state, options)

    o, final_state = on_blocks(run, tokens, initial_state, options)
    if members > 1:
        H = q.shape[2]
        return pairing.tokens_out(o, H), pairing.state_out(final_state, H)
    return o, final_state
