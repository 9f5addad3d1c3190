"""A chunked form to plant errors in: short, slow, and right when none is planted.

The decay between two tokens is the product of the decays in between, for every pair
and channel; gradients are left to JAX. (The stage `wy` is this, made fast.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Faults(NamedTuple):
    """Every field a scalar: one program for all controls. Zero or False: right."""

    unscaled: float = 0.0  # o without its scale
    masked_dg: bool = False  # no gradient through a decay that is exactly one
    damping: float = 0.0  # of the scores that are inverted
    floor: float = -np.inf  # of every exponent
    differences: bool = False  # decays from differences of the running sum of g
    one_sided: bool = False  # exp(G_i) * exp(-G_j)
    middle: bool = False  # exp(G_i - r) * exp(r - G_j), r in the middle of the chunk
    powers: bool = False  # the inverse by powers of A
    leak: float = 0.0  # the gradient of the scores is not masked
    passes: float = 6.0  # of a product: 1 rounds its operands to bfloat16
    rough_state: bool = False  # the final state went through bfloat16
    first_head: bool = False  # every head decays like the first
    unmasked: bool = False  # behind the last token comes the last token again


def rounded(x, faults):
    coarse = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.where(faults.passes == 1, coarse, x)


def dot(a, b, faults):
    return jnp.matmul(
        rounded(a, faults), rounded(b, faults), precision=lax.Precision.HIGHEST
    )


def decay_between(g, faults):
    """(C, C, K): of token j up to token i >= j; above the diagonal one."""
    C = g.shape[0]
    i, j = jnp.indices((C, C))
    G = jnp.cumsum(g, 0)
    inside = (i >= j)[..., None]
    r = G[C // 2]

    def by_products():
        def next_row(row, token):
            later, a = token
            row = jnp.where(later[:, None], row * a, 1)
            return row, row

        return lax.scan(next_row, jnp.ones_like(g), (i > j, jnp.exp(g)))[1]

    def by_differences():
        x = jnp.where(inside, G[:, None] - G[None], 0)
        return jnp.exp(jnp.maximum(x, faults.floor))

    def one_sided():
        return jnp.where(inside, jnp.exp(G)[:, None] * jnp.exp(-G)[None], 1)

    def middle():
        return jnp.where(inside, jnp.exp(G - r)[:, None] * jnp.exp(r - G)[None], 1)

    differences = faults.differences | (faults.floor > -np.inf)
    which = jnp.where(
        differences, 1, jnp.where(faults.one_sided, 2, jnp.where(faults.middle, 3, 0))
    )
    return lax.switch(which, [by_products, by_differences, one_sided, middle])


def inverse(A, faults):
    identity = jnp.eye(A.shape[0], dtype=A.dtype)

    def by_substitution():
        return lax.linalg.triangular_solve(
            identity + A, identity, left_side=True, lower=True, unit_diagonal=True
        )

    def by_powers():  # (I - A) (I + A^2) (I + A^4) ..
        X, power, n = identity - A, A, 2
        while n < A.shape[0]:
            power = jnp.matmul(power, power, precision=lax.Precision.HIGHEST)
            X, n = X + jnp.matmul(X, power, precision=lax.Precision.HIGHEST), 2 * n
        return X

    return lax.cond(faults.powers, by_powers, by_substitution)


def chunk(S, tokens, scale, faults):
    """S (K, V); tokens q, k, g, b (C, K), v, w (C, V)."""
    q, k, v, g, b, w = tokens
    C = q.shape[0]
    lower = jnp.tril(jnp.ones((C, C), bool))
    E = decay_between(g, faults)
    P, Q = jnp.exp(g[0]) * E[:, 0], E[-1]  # since the start, up to the end
    forgotten = faults.masked_dg & (P == 1)
    P = jnp.where(forgotten, lax.stop_gradient(P), P)
    bk = b * k

    def scores(x):
        return jnp.einsum(
            "id,jd,ijd->ij",
            rounded(x, faults),
            rounded(k, faults),
            E,
            precision=lax.Precision.HIGHEST,
        )

    def masked(A, mask):
        return jnp.where(mask, A, faults.leak * (A - lax.stop_gradient(A)))

    Aqk = masked(scores(q), lower)
    A = (1 - faults.damping) * jnp.where(lower & ~jnp.eye(C, dtype=bool), scores(bk), 0)
    vn = dot(inverse(A, faults), w * v - dot(bk * P, S, faults), faults)
    o = jnp.where(faults.unscaled == 1, 1, scale) * (
        dot(q * P, S, faults) + dot(Aqk, vn, faults)
    )
    return P[-1][:, None] * S + dot((k * Q).T, vn, faults), o


def gdn2(inputs, state, scale, faults, C):
    """Shapes as `gdn2_kernels.gdn2`. Returns: o, final state."""
    L = inputs[0].shape[1]
    N = -(-L // C)

    def chunks(x):  # (B, L, H, D) -> (N, B, H, C, D)
        filled = jnp.pad(x, ((0, 0), (0, N * C - L), (0, 0), (0, 0)), mode="edge")
        behind = (jnp.arange(N * C) >= L)[:, None, None] & ~faults.unmasked
        x = jnp.where(behind, 0, filled)
        return x.reshape(x.shape[0], N, C, *x.shape[2:]).transpose(1, 0, 3, 2, 4)

    q, k, v, g, b, w = inputs
    g = jnp.where(faults.first_head, g[:, :, :1], g)

    def step(S, tokens):
        def one(S, *tokens):
            return chunk(S, tokens, scale, faults)

        return jax.vmap(jax.vmap(one))(S, *tokens)

    state, o = lax.scan(step, state, [chunks(x) for x in (q, k, v, g, b, w)])
    o = o.transpose(1, 0, 3, 2, 4).reshape(v.shape[0], N * C, *v.shape[2:])[:, :L]
    coarse = lax.reduce_precision(state, exponent_bits=8, mantissa_bits=7)
    return o, jnp.where(faults.rough_state, coarse, state)
