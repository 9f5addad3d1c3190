"""One chunk of one head inside the fused kernels: plain functions of arrays in VMEM.

A chunk of C tokens is cut into sub-blocks of SUB rows.

Within a sub-block the pairs (i, j) are taken by distance d = i - j. Carried from one
distance to the next is k_j decayed down to row i, for all rows at once:

    down_d[i] = a[i] * down_{d-1}[i-1],    down_0 = k,    a = exp(g)

Between sub-blocks a pair's decay is a product of two factors cut at the first row of
i's sub-block, so that all pairs of a sub-block's rows with everything before it are one
matrix product. Every factor is at most one: nothing can overflow.

Shapes: q, k, bk, a (C, K); states (V, K), rows are value channels.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from gdn2_kernels.tile import (
    columns,
    dot,
    int32,
    only,
    roll,
    rows,
    sum_after,
    sum_before,
    sum_from,
    sum_up_to,
)

SUB = 16


def row_within(shape):
    """The row within its sub-block."""
    return rows(shape) & int32(SUB - 1)


def by_distance(step, carry, unroll, backwards=False):
    """carry = step(distance, carry) for distances 1 .. SUB-1, or SUB-1 .. 1.

    Unrolled on the chip, where the compiler overlaps one distance with the next and one
    head with another; a loop where it is interpreted, and compiles in a tenth the time.
    """
    order = range(SUB - 1, 0, -1) if backwards else range(1, SUB)
    if unroll:
        for distance in order:
            carry = step(distance, carry)
        return carry

    def nth(n, carry):
        return step(jnp.int32(order[0]) + jnp.int32(order.step) * n, carry)

    # int32 bounds: under x64 Python ints would count in int64.
    return lax.fori_loop(jnp.int32(0), jnp.int32(SUB - 1), nth, carry)


def sub_blocks(x):
    return [x[i : i + SUB] for i in range(0, x.shape[0], SUB)]


# ------------------------------------------------------ decay factors


class Decay(NamedTuple):
    """Decayed operands of a chunk, one entry a sub-block; `before` and `reach` have one
    more, for the end of the chunk.
    """

    P: list  # (SUB, K) decay from the first row of the sub-block to each row, inclusive
    Q: list  # (SUB, K) decay from each row, exclusive, to the end of the sub-block
    whole: list  # (1, K) decay over the sub-block
    before: list  # (1, K) decay over the sub-blocks before it
    reach: list  # k of all earlier sub-blocks decayed to its start, (n*SUB, K) or None


def decayed(k, g):
    """Cut k and a chunk's log decay at the sub-blocks. `reach[-1]` is k*exp(G_C - G).
    """
    # Exponentials of sums, not products of exponentials: a channel that decays alike at
    # every token rounds alike at every token, and in a product such errors add up, over
    # the whole sequence in `before[-1]`, which the state meets once a chunk.
    sums = [sum_up_to(x) for x in sub_blocks(g)]
    P = [jnp.exp(x) for x in sums]
    Q = [jnp.exp(sum_after(x)) for x in sub_blocks(g)]
    whole = [p[SUB - 1 :] for p in P]
    G, before, reach = jnp.zeros_like(whole[0]), [jnp.ones_like(whole[0])], [None]
    for k_own, q_own, all_of_it, x in zip(sub_blocks(k), Q, whole, sums):
        G = G + x[SUB - 1 :]
        before.append(jnp.exp(G))
        earlier = [] if reach[-1] is None else [reach[-1] * all_of_it]
        reach.append(jnp.concatenate([*earlier, k_own * q_own]))
    return Decay(P, Q, whole, before, reach)


def from_start(x, decay):
    """x * exp(G): every row decayed from the start of the chunk. (C, K)"""
    parts = zip(sub_blocks(x), decay.P, decay.before)
    return jnp.concatenate([x * P * before for x, P, before in parts])


# ------------------------------------------------------ scores


def scores(q, k, bk, a, decay, precision, unroll):
    """Aqk with its diagonal, and A below it, both (C, C)."""
    C = q.shape[0]
    apart, within = rows((C, C)) - columns((C, C)), row_within((C, C))

    def put(matrix, distance, x, down):
        pairs = (apart == distance) & (within >= distance)
        return jnp.where(pairs, jnp.sum(x * down, 1, keepdims=True), matrix)

    def step(distance, carry):
        Aqk, A, down = carry
        down = a * roll(down, 1)
        return put(Aqk, distance, q, down), put(A, distance, bk, down), down

    A = jnp.zeros((C, C), jnp.float32)
    Aqk, A, _ = by_distance(step, (put(A, 0, q, k), A, k), unroll)

    far_q, far_bk = [], []
    for q, bk, P, reach in zip(sub_blocks(q), sub_blocks(bk), decay.P, decay.reach):
        if reach is None:
            far = jnp.zeros((2 * SUB, C), jnp.float32)
        else:
            reads = jnp.concatenate([q * P, bk * P])
            far = dot(reads, reach, precision, transpose_b=True)
            if reach.shape[0] < C:
                nothing = jnp.zeros((2 * SUB, C - reach.shape[0]), jnp.float32)
                far = jnp.concatenate([far, nothing], 1)
        far_q.append(far[:SUB]), far_bk.append(far[SUB:])
    return Aqk + jnp.concatenate(far_q), A + jnp.concatenate(far_bk)


def scores_back(
    q, k, bk, a, decay, dAqk, dA, dkg, d_read, down_scratch, precision, unroll
):  # fmt: skip
    """Gradients through `scores`, and through the decay of everything in the chunk.

    Arguments:
      dAqk, dA: (C, C), read below their diagonals. dkg (C, K), of `reach[-1]`.
      d_read: q*dq + bk*d_bk as far as it came through the state, (C, K).
      down_scratch: ref (SUB, C, K).
    Returns: dq, dk, d_bk, dg (C, K), the parts named here and no others.
    """
    C, K = q.shape
    apart, within = rows((C, C)) - columns((C, C)), row_within((C, C))

    # Pairs within a sub-block, by distance. What row i owes to its own decay is what
    # came down through it: down_d[i] * (gradient of down_d[i]), all of one kind.
    def keep(distance, down):
        down = a * roll(down, 1)
        down_scratch[distance] = down
        return down

    def step(distance, carry):
        dq, d_bk, dg, d_down = carry
        pairs = (apart == distance) & (within >= distance)
        from_q = jnp.sum(only(pairs, dAqk), 1, keepdims=True)
        from_bk = jnp.sum(only(pairs, dA), 1, keepdims=True)
        down = down_scratch[distance]
        dq, d_bk = dq + from_q * down, d_bk + from_bk * down
        d_down = from_q * q + from_bk * bk + roll(a * d_down, -1)
        return dq, d_bk, dg + down * d_down, d_down

    by_distance(keep, k, unroll)
    nothing = (jnp.zeros((C, K), jnp.float32),) * 4
    dq, d_bk, dg, d_down = by_distance(step, nothing, unroll, backwards=True)
    dk = roll(a * d_down, -1)

    # Pairs between sub-blocks, last sub-block first: the mirror image of `decayed`.
    blocks = C // SUB
    cut = [sub_blocks(x) for x in (q, k, bk, d_read, dAqk, dA)]
    far_q, far_k, far_bk, far_g = ([None] * blocks for _ in range(4))
    d_reach, read_later = dkg, jnp.zeros((1, K), jnp.float32)
    for n in reversed(range(blocks)):
        q, k, bk, d_read, dAqk, dA = (x[n] for x in cut)
        P, Q, whole, reach = decay.P[n], decay.Q[n], decay.whole[n], decay.reach[n]
        far_k[n] = Q * d_reach[n * SUB :]
        passing = read_later
        far_q[n] = far_bk[n] = jnp.zeros((SUB, K), jnp.float32)
        if reach is not None:
            M = jnp.concatenate([dAqk[:, : n * SUB], dA[:, : n * SUB]])
            d_reads = dot(M, reach, precision)
            far_q[n], far_bk[n] = P * d_reads[:SUB], P * d_reads[SUB:]
            d_reach = d_reach[: n * SUB] * whole
            passing = passing + jnp.sum(d_reach * reach, 0, keepdims=True)
            reads = jnp.concatenate([q * P, bk * P])
            d_reach = d_reach + dot(M, reads, precision, transpose_a=True)
        own = q * far_q[n] + bk * far_bk[n] + d_read
        far_g[n] = passing + sum_from(own) + sum_before(k * far_k[n])
        read_later = read_later + jnp.sum(d_read, 0, keepdims=True)
    far_q, far_k, far_bk, far_g = map(jnp.concatenate, (far_q, far_k, far_bk, far_g))
    return dq + far_q, dk + far_k, d_bk + far_bk, dg + far_g


def diagonal(x):
    """The diagonal of x (C, C) as a column (C, 1)."""
    return jnp.sum(only(rows(x.shape) == columns(x.shape), x), 1, keepdims=True)
