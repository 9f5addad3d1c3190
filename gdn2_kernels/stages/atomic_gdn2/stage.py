"""Two launches as one differentiable function."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdn2_kernels.stages.atomic_gdn2.chunk import SUB
from gdn2_kernels.stages.atomic_gdn2.kernels import backward_kernel, forward_kernel
from gdn2_kernels.stages.launch import KINDS, Options, launch, on_blocks
from gdn2_kernels.stages.views import check, padded

CHUNK_SIZE = 64
LARGEST_CHUNK = 128
HEADS = {"forward": 8, "backward": 3}  # at most so many side by side in a grid step
VMEM_LIMIT = 100 * 2**20


class Residuals(NamedTuple):
    """What the backward launch is given besides the inputs."""

    entering: jax.Array  # (B, H, N, V, K) state entering each chunk
    kept: list  # [X, Aqk (B, H, N, C, C), vn (B, L, H*V)], or [] to compute them again


def residual_bytes(B, L, H, K, V, chunk_size=CHUNK_SIZE, residuals="save"):
    """Bytes of `Residuals`: K*V numbers per chunk and head; saved, 2C + V a token more.

    K and V count as the multiples of 128 that they are padded to, L as whole chunks.
    """
    C, N, K, V = chunk_size, -(-L // chunk_size), padded(K), padded(V)
    numbers = K * V + (C * (2 * C + V) if residuals == "save" else 0)
    return 4 * B * N * H * numbers


FLOAT = jnp.float32


def flops(dims):
    """Of the forward launch, one chunk of one head. The backward one has twice as many.
    """
    C, K, V = dims.C, dims.K, dims.V
    return 6 * C * K * V + 4 * C**2 * (K + V) + 4 * C**3 * (C.bit_length() - 2)


def forward(q, k, v, g, b, w, scale, initial_state, residuals, options):
    """One launch. Returns: (o (B, L, H*V), final state (B, H, K, V)), `Residuals`."""
    dims = options.dims
    kept = [("square", FLOAT), ("square", FLOAT), ("values", FLOAT)]
    o, final, entering, *kept = launch(
        functools.partial(
            forward_kernel, K=dims.K, V=dims.V, precision=options.precision,
            unroll=options.interpret is False,
        ),
        options,
        [("number", scale), *zip(KINDS, (q, k, v, g, b, w)),
         ("head", initial_state)],
        [("values", v.dtype), ("head", FLOAT), ("state", FLOAT)]
        + (kept if residuals == "save" else []),
        scratch=[(dims.V, dims.K)],
        heads=options.heads_per_step(HEADS["forward"]),
        in_order=True,
        vmem_limit=VMEM_LIMIT,
        name="gdn2_forward",
        flops=flops(dims),
        exps=dims.C * dims.K,
    )  # fmt: skip
    return (o, final), Residuals(entering, kept)


def backward(inputs, residuals, do, d_final_state, options):
    """One launch. Returns: gradients of the six inputs, scale and the initial state."""
    *six, scale = inputs
    dims = options.dims
    *gradients, d_initial, d_scale = launch(
        functools.partial(
            backward_kernel, K=dims.K, V=dims.V, precision=options.precision,
            unroll=options.interpret is False, recompute=not residuals.kept,
        ),
        options,
        [("number", scale), *zip(KINDS, six), ("state", residuals.entering),
         ("values", do), ("head", d_final_state),
         *zip(("square", "square", "values"), residuals.kept)],
        [(kind, x.dtype) for kind, x in zip(KINDS, six)]
        + [("head", FLOAT), ("head row", FLOAT)],
        scratch=[(dims.V, dims.K), (SUB, dims.C, dims.K)],
        heads=options.heads_per_step(HEADS["backward"]),
        in_order=True,
        backwards=True,
        vmem_limit=VMEM_LIMIT,
        name="gdn2_backward",
        flops=2 * flops(dims),
        exps=dims.C * dims.K,
    )  # fmt: skip
    return *gradients, jnp.sum(d_scale).reshape(1, 1), d_initial


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def with_backward(q, k, v, g, b, w, scale, initial_state, residuals, options):
    """q, k, g, b (B, L, H*K), v, w (B, L, H*V), scale (1, 1), initial_state
    (B, H, K, V), L whole chunks. Returns: o (B, L, H*V), final state (B, H, K, V).
    """
    # Nobody asked for gradients: as little as possible is kept.
    return forward(q, k, v, g, b, w, scale, initial_state, "recompute", options)[0]


def _with_backward_fwd(q, k, v, g, b, w, scale, initial_state, residuals, options):
    inputs = q, k, v, g, b, w, scale
    results, kept = forward(*inputs, initial_state, residuals, options)
    return results, (inputs, kept)


def _with_backward_bwd(residuals, options, kept, cotangents):
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
    options = Options.of(
        q, v, precision, chunk_size, interpret, smallest=SUB, usual=CHUNK_SIZE
    )
    scale = scale.astype(FLOAT).reshape(1, 1)

    def run(*inputs_and_state):
        *inputs, state = inputs_and_state
        return with_backward(*inputs, scale, state, residuals, options)

    return on_blocks(run, (q, k, v, g, b, w), initial_state, options)
