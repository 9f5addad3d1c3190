"""The nine launches as one differentiable function."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdn2_kernels.stages.atomic_ops.backward import (
    log_decay_back,
    own_outputs,
    prepare_back,
    scan_back,
    scores_back,
)
from gdn2_kernels.stages.atomic_ops.forward import (
    TILE,
    inverse,
    prepare,
    scan,
    scores,
)
from gdn2_kernels.stages.launch import Options, on_blocks
from gdn2_kernels.stages.views import check, padded

CHUNK_SIZE = 64
LARGEST_CHUNK = 256


class Residuals(NamedTuple):
    """What the backward launches are given besides the six inputs."""

    Aqk: jax.Array  # (B, H, N, C, C)
    X: jax.Array  # (B, H, N, C, C)
    W: jax.Array  # (B, L, H*K)
    kg: jax.Array  # (B, L, H*K)
    qg: jax.Array  # (B, L, H*K)
    decay: jax.Array  # (B, H, N, 1, K) exp(G_C)
    vn: jax.Array  # (B, L, H*V)
    S: jax.Array  # (B, H, N, V, K) state entering each chunk, transposed


def residual_bytes(B, L, H, K, V, chunk_size=CHUNK_SIZE) -> int:
    """Bytes of `Residuals`: 2C + 3K + V numbers per token and head, K*V + K per chunk.

    K and V count as the multiples of 128 that they are padded to, L as whole chunks.
    (A chip holds whole registers of 128 lanes: there C = 64 takes the room of 128.)
    """
    C, N = chunk_size, -(-L // chunk_size)
    K, V = padded(K), padded(V)
    return 4 * B * H * N * (C * (2 * C + 3 * K + V) + K * V + K)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def with_backward(q, k, v, g, b, w, initial_state, options):
    """Four launches.

    Arguments: q (scaled), k, g, b (B, L, H*K), v, w (B, L, H*V), initial_state
    (B, H, K, V), L whole chunks. Returns: o (B, L, H*V), final state (B, H, K, V).
    """
    return forward(q, k, v, g, b, w, initial_state, options)[0]


def forward(q, k, v, g, b, w, initial_state, options):
    """A, B, C, D. Returns: (o, final state), `Residuals`."""
    Aqk, Akk = scores(q, k, g, b, options)
    X = inverse(Akk, options)
    W, U, kg, qg, decay = prepare(q, k, v, g, b, w, X, options)
    o, vn, S, final_state = scan(
        Aqk, W, U, kg, qg, decay, initial_state, v.dtype, options
    )
    return (o, final_state), Residuals(Aqk, X, W, kg, qg, decay, vn, S)


def backward(inputs, residuals, do, d_final_state, options):
    """B2, B1, B3, B4, B5. Returns: gradients of the six inputs and the initial state.
    """
    q, k, v, g, b, w = inputs
    Aqk, X, W, kg, qg, decay, vn, S = residuals
    dAqk, dvn = own_outputs(do, Aqk, vn, options)
    dvn, dS, d_initial = scan_back(do, dvn, W, kg, qg, decay, d_final_state, options)
    dq, dk, dbk, dv, dw, dAkk, reads, writes, passing = prepare_back(
        k, v, g, b, w, X, kg, qg, decay, vn, S, do, dvn, dS, options
    )
    dq, dk, db, pairs = scores_back(q, k, g, b, dAqk, dAkk, dq, dk, dbk, options)
    dg = log_decay_back(reads, writes, passing, pairs, g.dtype, options)
    return dq, dk, dv, dg, db, dw, d_initial


def _with_backward_fwd(q, k, v, g, b, w, initial_state, options):
    results, residuals = forward(q, k, v, g, b, w, initial_state, options)
    return results, ((q, k, v, g, b, w), residuals)


def _with_backward_bwd(options, kept, cotangents):
    return backward(*kept, *cotangents, options)


with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)


def atomic_ops(
    q, k, v, g, b, w, scale, initial_state, *, precision, chunk_size, interpret
):  # fmt: skip
    """Nine Pallas launches, one per step of the algebra. Shapes and contract as `gdn2`.

    Memory for the backward pass: the inputs and `residual_bytes`.

    Raises:
      ValueError: K or V not a multiple of 8 up to 256, float64 inputs, a chunk size
        below 8 or above 256.
    """
    check("atomic_ops", q, v, chunk_size, TILE, LARGEST_CHUNK)
    options = Options.of(
        q, v, precision, chunk_size, interpret, smallest=TILE, usual=CHUNK_SIZE
    )
    run = functools.partial(with_backward, options=options)
    q = q.astype(jnp.float32) * scale
    return on_blocks(run, (q, k, v, g, b, w), initial_state, options)
