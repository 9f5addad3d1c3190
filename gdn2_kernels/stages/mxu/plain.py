"""The algorithm of one chunk of one head, one idea per function, nothing rearranged for
the chip. It serves chunk sizes the fast kernels do not, and they are tested against it.

The tree. At level h = 1, 2, 4, .., C/2 the chunk is cut into blocks of 2h tokens. A pair
(i, j), j < i, belongs to the one level at which i is in the later and j in the earlier
half of the same block. Cut its decay where the halves meet:

    exp(G_i - G_j) = [product of a up to i in i's half] * [product of a after j in j's]

with a = exp(g) <= 1. Two factors, each of one token only: the pairs of a level are one
matrix product. Neither factor can exceed 1, whatever the decay.

Shapes: q, k, bk, a (C, K); v, w, do (C, V); states (V, K), rows are value channels.
"""

import jax.numpy as jnp

from gdn2_kernels.tile import columns, dot, int32, only, roll, rows


def in_later_half(x, h):
    """Which rows are in the later half of their block of 2h."""
    return (rows(x.shape) & int32(h)) != 0


def swap_halves(x, h):
    """Row t holds row t xor h."""
    return jnp.where(in_later_half(x, h), roll(x, h), roll(x, -h))


def same_block(C, h):
    """(C, C): are row and column in the same block of 2h?"""
    return ((rows((C, C)) ^ columns((C, C))) & int32(-2 * h)) == 0


# ------------------------------------------------------ the tree of decays


SUMMED = 8  # rows whose decays are summed before exp, where every digit counts


def level_factors(a, g=None):
    """The factors of every level, finest first, and those of the whole chunk.

    a: exp(g), (C, K), one exp for each token and channel. Rounding it is half a unit in
      the last place; where g is the same at every token, so is the error, and it adds up
      over all that is remembered.
    g: given, blocks of SUMMED rows are exponentials of sums: an eighth of that error.
    Returns: [(left, right) of level 1, 2, .., C/2], each (C, K): `left` is the decay
      from the start of the later half through its row, zero in earlier halves; `right`
      from after its row to the end of the earlier half, zero in later ones. Then
      P = exp(G) and Q = exp(G_C - G).
    """
    P, Q = a, jnp.ones_like(a)  # up to the row, after the row, within its block
    whole = a  # of the row's block
    levels = []
    h = 1
    while h < a.shape[0]:
        if h == SUMMED and g is not None:
            P, Q, whole = (jnp.exp(x) for x in sums_in_blocks(g, SUMMED))
        later = in_later_half(a, h)
        levels.append((only(later, P), only(~later, Q)))
        P, Q, whole = merged(P, Q, whole, h, jnp.multiply)
        h *= 2
    return levels, P, Q


def merged(up_to, after, whole, h, join):
    """Up to a row of its block, after it, all of it: of blocks of 2h, from those of h."""
    later, other = in_later_half(whole, h), swap_halves(whole, h)
    up_to = jnp.where(later, join(up_to, other), up_to)
    after = jnp.where(later, after, join(after, other))
    return up_to, after, join(whole, other)


def sums_in_blocks(g, size):
    """Sums over a row's block of `size` rows: up to the row, after it, all. (C, K)"""
    sums = g, jnp.zeros_like(g), g
    h = 1
    while h < size:
        sums = merged(*sums, h, jnp.add)
        h *= 2
    return sums


# ------------------------------------------------------ forward


def scores_and_inverse(q, k, bk, levels, precision):
    """Aqk (C, C) with its diagonal, and X = (I + A)^-1.

    With X the inverse of the blocks of h on the diagonal, and A_h what of A belongs to
    level h, the blocks of 2h have the inverse X - X A_h X: A itself is never formed.
    """
    C = q.shape[0]
    on_diagonal = rows((C, C)) == columns((C, C))
    Aqk = only(on_diagonal, jnp.sum(q * k, 1, keepdims=True))  # no decay
    X = on_diagonal.astype(jnp.float32)
    for n, (left, right) in enumerate(levels):
        queries = jnp.concatenate([q * left, bk * left])
        pairs = dot(queries, k * right, precision, transpose_b=True)
        same = same_block(C, 1 << n)
        Aqk = Aqk + only(same, pairs[:C])
        A_h = only(same, pairs[C:])
        X = X - dot(X, dot(A_h, X, precision), precision)
    return Aqk, X


def forward_chunk(q, k, v, g, b, w, S, precision):
    """Returns: o (C, V), state leaving (V, K), residuals (X, Aqk, vn)."""
    C, bk = q.shape[0], b * k
    levels, P, Q = level_factors(jnp.exp(g), g if precision == "highest" else None)
    Aqk, X = scores_and_inverse(q, k, bk, levels, precision)
    reads = jnp.concatenate([q * P, bk * P])
    from_state = dot(reads, S, precision, transpose_b=True)
    vn = dot(X, w * v - from_state[C:], precision)  # net writes
    o = from_state[:C] + dot(Aqk, vn, precision)
    S = P[C - 1 :] * S + dot(vn, k * Q, precision, transpose_a=True)
    return o, S, (X, Aqk, vn)


# ------------------------------------------------------ backward


def levels_back(q, k, bk, levels, dAqk, dA, dq, dk, d_bk, owed, precision):
    """Every level's share added to dq, dk, d_bk, and dg.

    dg of a token is owed by what passes over it: later reads of earlier writes. Before a
    level is added, what its later halves owe by reading from outside the block has to
    pass over the earlier half, and so on: going from coarse to fine, all that is owed
    reaches the row that owes it, each term once, and nothing is subtracted.

    Arguments: dAqk, dA (C, C); dq, dk, d_bk (C, K) as they come from outside the chunk;
      owed (C, K), its sum over the rows is owed by every token.
    """
    C = q.shape[0]
    both = jnp.concatenate([dAqk, dA])
    for n in reversed(range(len(levels))):
        h, (left, right) = 1 << n, levels[n]
        passing = jnp.where(in_later_half(q, h), q * dq + bk * d_bk, k * dk)
        owed = owed + swap_halves(owed + passing, h)

        same = same_block(C, h)
        pairs = only(jnp.concatenate([same, same]), both)
        read = dot(pairs, k * right, precision)
        dq, d_bk = dq + left * read[:C], d_bk + left * read[C:]
        queries = jnp.concatenate([q * left, bk * left])
        dk = dk + right * dot(pairs, queries, precision, transpose_a=True)
    return dq, dk, d_bk, owed + q * dq + bk * d_bk


def backward_chunk(q, k, v, g, b, w, S, do, dS, residuals, precision):
    """Given the state S that entered and the gradient dS of the state that left.

    Returns: dq, dk, dv, dg, db, dw, gradient of the state that entered.
    """
    X, Aqk, vn = residuals
    C, bk = q.shape[0], b * k
    levels, P, Q = level_factors(jnp.exp(g), g if precision == "highest" else None)
    whole = P[C - 1 :]

    dvn = dot(Aqk, do, precision, transpose_a=True)
    dvn = dvn + dot(k * Q, dS, precision, transpose_b=True)
    dz = dot(X, dvn, precision, transpose_a=True)  # of z = w*v - kb S
    both = jnp.concatenate([do, dz])
    from_vn = dot(both, vn, precision, transpose_b=True)
    from_S = dot(both, S, precision)
    reads = jnp.concatenate([q * P, -bk * P])
    dS_in = whole * dS + dot(both, reads, precision, transpose_a=True)

    first = rows(q.shape) == 0
    owed = only(first, whole * jnp.sum(dS * S, 0, keepdims=True))
    dAqk, dA = from_vn[:C], -from_vn[C:]
    dq, d_bk, dk = from_S[:C] * P, -from_S[C:] * P, dot(vn, dS, precision) * Q
    dq, dk, d_bk, dg = levels_back(
        q, k, bk, levels, dAqk, dA, dq, dk, d_bk, owed, precision
    )
    on_diagonal = rows((C, C)) == columns((C, C))
    own = jnp.sum(only(on_diagonal, dAqk), 1, keepdims=True)
    dk = dk + own * q + b * d_bk  # a token's own write passes no decay
    return (dq + own * k, dk, w * dz, dg, k * d_bk, v * dz), dS_in
