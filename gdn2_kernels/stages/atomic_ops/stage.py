"""The nine launches as one differentiable function."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdn2_kernels.environment import on_tpu
from gdn2_kernels.stages.atomic_ops.backward import (
    log_decay_back,
    own_outputs,
    prepare_back,
    scan_back,
    scores_back,
)
from gdn2_kernels.stages.atomic_ops.forward import inverse, prepare, scan, scores
from gdn2_kernels.stages.atomic_ops.launch import TILE, Dims, Options

LANES = 128  # of a vector register
LARGEST_D = 256
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


def padded(D: int) -> int:
    """Channels as kernels see them. A block takes D of H*D lanes, and the chip wants
    whole registers of 128: the channels in between are zeros, which do nothing.
    """
    return -(-D // LANES) * LANES


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def with_backward(q, k, v, g, b, w, initial_state, options):
    """Four launches.

    Arguments: q (scaled), k, g, b (B, L, H*K), v, w (B, L, H*V), initial_state
    (B, H, V, K), L whole chunks. Returns: o (B, L, H*V), final state (B, H, V, K).
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


def _with_backward_forward(q, k, v, g, b, w, initial_state, options):
    results, residuals = forward(q, k, v, g, b, w, initial_state, options)
    return results, ((q, k, v, g, b, w), residuals)


def _with_backward_backward(options, kept, cotangents):
    return backward(*kept, *cotangents, options)


with_backward.defvjp(_with_backward_forward, _with_backward_backward)


def atomic_ops(
    q, k, v, g, b, w, scale, initial_state, *, precision, chunk_size, interpret
):  # fmt: skip
    """Nine Pallas launches, one per step of the algebra. Shapes and contract as `gdn2`.

    Memory for the backward pass: the inputs and `residual_bytes`.

    Raises:
      ValueError: K or V not a multiple of 8 up to 256, float64 inputs, a chunk size
        below 8 or above 256.
    """
    check(q, v, chunk_size)
    B, L, H, K = q.shape
    V = v.shape[-1]
    C = chunk_size or max(TILE, min(CHUNK_SIZE, 1 << (L - 1).bit_length()))
    N = -(-L // C)
    if interpret is None:
        interpret = not on_tpu()
    options = Options(Dims(B, H, N, C, padded(K), padded(V)), precision, interpret)

    def view(x):  # (B, L, H, D) -> (B, N*C, H*padded(D))
        D = x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, N * C - L), (0, 0), (0, padded(D) - D)))
        return x.reshape(B, N * C, H * padded(D))

    state = jnp.pad(
        initial_state.mT, ((0, 0), (0, 0), (0, padded(V) - V), (0, padded(K) - K))
    )
    q = q.astype(jnp.float32) * scale
    o, final_state = with_backward(*map(view, (q, k, v, g, b, w)), state, options)
    o = o.reshape(B, N * C, H, padded(V))[:, :L, :, :V]
    return o, final_state[:, :, :V, :K].mT


def check(q, v, chunk_size, stage="atomic_ops"):
    """Refuse by name what kernels do not serve."""
    if q.dtype == jnp.float64:
        raise ValueError(
            f"q: expected float32 or bfloat16 for stage={stage!r} (a TPU kernel has no "
            "float64), got float64; stage='wy' computes in float64"
        )
    for name, x in (("q", q), ("v", v)):
        D = x.shape[-1]
        if D % 8 or D > LARGEST_D:
            raise ValueError(
                f"{name}: expected channels a multiple of 8 up to {LARGEST_D} for "
                f"stage={stage!r}, got {D}"
            )
    if chunk_size is not None and not TILE <= chunk_size <= LARGEST_CHUNK:
        raise ValueError(
            f"chunk_size: expected {TILE} to {LARGEST_CHUNK} for stage={stage!r}, got "
            f"{chunk_size}"
        )
