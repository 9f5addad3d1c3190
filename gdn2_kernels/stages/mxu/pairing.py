"""Heads of 64 channels as kernels see them: two of them count as one head of 128, whose
chunks have 64 tokens.

Tokens (B, L, H, 64) lie in memory as (B, L, H/2, 128) do, states (B, H, 64, 64) as
(B, H/2, 128, 64). Nothing is copied, and no lane is empty.
"""

import jax.numpy as jnp

from gdn2_kernels.stages.mxu.lanes import HALF, Pair

MEMBERS = Pair.MEMBERS


def fit(q, v, chunk_size):
    """Are there heads to pair up? Not where chunks of another size are asked for, and not
    a single head: with a head of zeros beside it it would be slower.
    """
    chunks = chunk_size in (None, HALF)
    return chunks and q.shape[-1] == v.shape[-1] == HALF and q.shape[2] > 1


def _even(x, axis):
    """With a head of zeros if their number is odd."""
    filled = [(0, x.shape[axis] % MEMBERS if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, filled)


def tokens_in(x):
    """(B, L, H, 64) -> (B, L, H/2, 128)."""
    x = _even(x, 2)
    B, L, H, D = x.shape
    return x.reshape(B, L, H // MEMBERS, MEMBERS * D)


def tokens_out(x, H):
    """Inverse of `tokens_in`."""
    B, L = x.shape[:2]
    return x.reshape(B, L, -1, HALF)[:, :, :H]


def state_in(state):
    """(B, H, 64, 64) -> (B, H/2, 128, 64)."""
    state = _even(state, 1)
    B, H, K, V = state.shape
    return state.reshape(B, H // MEMBERS, MEMBERS * K, V)


def state_out(state, H):
    """Inverse of `state_in`."""
    return state.reshape(state.shape[0], -1, HALF, HALF)[:, :H]
