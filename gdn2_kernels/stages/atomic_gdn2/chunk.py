"""One chunk of one head inside the fused kernels: plain functions of arrays in VMEM.

A chunk of C tokens is cut into sub-blocks of SUB rows.

Within a sub-block the pairs (i, j) are taken by distance d = i - j. Carried from one
distance to the next is k_j decayed down to row i, for all rows at once:

    down_d[i] = a[i] * down_{d-1}[i-1],    down_0 = k,    a = exp(g)

Between sub-blocks a pair's decay is a product of two factors cut at the first row of
i's sub-block, so that all pairs of a sub-block's rows with everything before it are one
matrix product. Every factor is a product of numbers a <= 1: nothing can overflow.

Shapes: q, k, bk, a (C, K); states (V, K), rows are value channels.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.tile import dot

SUB = 16
WITHIN = np.int32(SUB - 1)  # mask: the row within its sub-block, in 32 bits


def side_by_side(heads):
    """Run generators in step: each to its next yield, then each to the one after.

    The compiler overlaps what stands near in the program. A product takes 131 cycles to
    come back; between two yields the other heads have work that does not wait for it.
    """
    heads = list(heads)
    while heads:
        heads = [head for head in heads if next(head, StopIteration) is not StopIteration]


def rows(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 0)


def columns(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def roll(x, by):
    """Row i holds row i - by, around the end."""
    # int32: under x64 a Python int would be 64 bits wide, which the chip refuses.
    return pltpu.roll(x, np.int32(by), 0)


def shift_down(x, by=1):
    """Row i holds row i - by. The first rows hold what fell out at the end."""
    return roll(x, by)


def shift_up(x):
    """Row i holds row i + 1."""
    return roll(x, x.shape[0] - 1)


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


def factors(a):
    """P: product of a from the first row of the sub-block to each row. Q: product of a
    over the rows after each row, to the end of the sub-block. Both (C, K).
    """
    row = rows(a.shape) & WITHIN
    last = a.shape[0] - 1
    P, Q = a, jnp.where(row < SUB - 1, roll(a, last), 1.0)
    step = 1
    while step < SUB:
        P = P * jnp.where(row >= step, roll(P, step), 1.0)
        Q = Q * jnp.where(row < SUB - step, roll(Q, last + 1 - step), 1.0)
        step *= 2
    return P, Q


class Decay(NamedTuple):
    """Decayed operands of a chunk, one entry a sub-block; `reach` has one more."""

    P: list  # (SUB, K)
    Q: list  # (SUB, K)
    whole: list  # (1, K) product over the sub-block
    before: list  # (1, K) product over the sub-blocks before it
    reach: list  # k of all earlier sub-blocks decayed to its start, (n*SUB, K) or None


def decayed(k, a):
    """Cut k and a chunk's decay at the sub-blocks. `reach[-1]` is k*exp(G_C - G)."""
    P, Q = map(sub_blocks, factors(a))
    whole = [p[SUB - 1 :] for p in P]
    before, reach = [jnp.ones_like(whole[0])], [None]
    for k_own, q_own, all_of_it in zip(sub_blocks(k), Q, whole):
        before.append(before[-1] * all_of_it)
        own = k_own * q_own
        earlier = [] if reach[-1] is None else [reach[-1] * all_of_it]
        reach.append(jnp.concatenate([*earlier, own]))
    return Decay(P, Q, whole, before, reach)


def from_start(x, decay):
    """x * exp(G): every row decayed from the start of the chunk. (C, K)"""
    parts = zip(sub_blocks(x), decay.P, decay.before)
    return jnp.concatenate([x * P * before for x, P, before in parts])


# ------------------------------------------------------ scores


def scores(q, k, bk, a, decay, precision, unroll):
    """Aqk with its diagonal, and A below it, both (C, C)."""
    C = q.shape[0]
    row, column = rows((C, C)), columns((C, C))

    def put(matrix, distance, x, down):
        pairs = (row - column == distance) & ((row & WITHIN) >= distance)
        return jnp.where(pairs, jnp.sum(x * down, 1, keepdims=True), matrix)

    def step(distance, carry):
        Aqk, A, down = carry
        down = a * shift_down(down)
        return put(Aqk, distance, q, down), put(A, distance, bk, down), down

    A = jnp.zeros((C, C), jnp.float32)
    Aqk, A, _ = by_distance(step, (put(A, 0, q, k), A, k), unroll)

    far_q, far_bk = [], []
    for q, bk, P, reach in zip(sub_blocks(q), sub_blocks(bk), decay.P, decay.reach):
        if reach is None:
            far = jnp.zeros((2 * SUB, C), jnp.float32)
        else:
            far = dot(jnp.concatenate([q * P, bk * P]), reach, precision, transpose_b=True)
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
    row, column = rows((C, C)), columns((C, C))

    # Pairs within a sub-block, by distance. What row i owes to its own decay is what
    # came down through it: down_d[i] * (gradient of down_d[i]), all of one kind.
    def keep(distance, down):
        down = a * shift_down(down)
        down_scratch[distance] = down
        return down

    def step(distance, carry):
        dq, d_bk, dg, d_down = carry
        pairs = (row - column == distance) & ((row & WITHIN) >= distance)
        from_q = jnp.sum(jnp.where(pairs, dAqk, 0.0), 1, keepdims=True)
        from_bk = jnp.sum(jnp.where(pairs, dA, 0.0), 1, keepdims=True)
        down = down_scratch[distance]
        dq, d_bk = dq + from_q * down, d_bk + from_bk * down
        d_down = from_q * q + from_bk * bk + shift_up(a * d_down)
        return dq, d_bk, dg + down * d_down, d_down

    by_distance(keep, k, unroll)
    nothing = (jnp.zeros((C, K), jnp.float32),) * 4
    dq, d_bk, dg, d_down = by_distance(step, nothing, unroll, backwards=True)
    dk = shift_up(a * d_down)

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


def sum_from(x):
    """Row t: rows t, t+1, .. of the sub-block summed."""
    row, step = rows(x.shape), 1
    while step < SUB:
        x = x + jnp.where(row < SUB - step, roll(x, SUB - step), 0.0)
        step *= 2
    return x


def sum_before(x):
    """Row t: rows 0 .. t-1 of the sub-block summed."""
    row, step = rows(x.shape), 1
    x = jnp.where(row >= 1, roll(x, 1), 0.0)
    while step < SUB:
        x = x + jnp.where(row >= step, roll(x, step), 0.0)
        step *= 2
    return x


# ------------------------------------------------------ inverse


def inverse(A, precision):
    """(I + A)^-1 of a strictly lower triangular A (C, C), by doubling the blocks on
    the diagonal: X <- X - X M X, where M is the part of A between two neighbours.

    A generator (see `side_by_side`): each product waits for the one before it.
    """
    C = A.shape[0]
    row, column = rows((C, C)), columns((C, C))
    differ = row ^ column  # the highest bit tells at which level a pair meets
    identity = (row == column).astype(jnp.float32)
    X = identity - jnp.where(differ == 1, A, 0.0)
    h = 2
    while h < C:
        M = jnp.where((differ >= h) & (differ < 2 * h), A, 0.0)
        MX = dot(M, X, precision)
        yield
        X = X - dot(X, MX, precision)
        yield
        h *= 2
    return X


def diagonal(x):
    """The diagonal of x (C, C) as a column (C, 1)."""
    return jnp.sum(jnp.where(rows(x.shape) == columns(x.shape), x, 0.0), 1, keepdims=True)
