"""The backward kernel: one chunk of several heads, last chunk first, in three phases.

It computes `plain.backward_chunk` with the arrangements of the forward kernel, and:

- what the forward kernel kept comes transposed, do^T and dz^T are made long before they
  are used: no transpose stands in front of a product;
- the levels run from coarse to fine, so the tree is built first and its factors kept;
- in levels smaller than a register the pairs are blocks on the diagonal: 64 tokens to a
  product, high and low parts in one contraction;
- level 1 and the diagonal are gathered on the vector unit, a few rows between one level
  and the next, while products are under way.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.stages.mxu import levels_back, tiles, tree
from gdn2_kernels.stages.mxu.forward import IN_REGISTERS, whole_registers
from gdn2_kernels.stages.mxu.heads import heads_of, phase, read, spread, write
from gdn2_kernels.stages.mxu.lanes import is_brief, turned_operand, weights
from gdn2_kernels.stages.mxu.passes import PASSES
from gdn2_kernels.stages.mxu.tiles import (
    LANES,
    REGISTER,
    ROWS,
    matrix,
    registers,
    roll_lanes,
    roll_rows,
)
from gdn2_kernels.tile import f32, in_step, int32, only, rows, side_by_side

TILE = 16  # rows: a register of bfloat16 numbers
NEAR_TILE = 32  # rows whose neighbours are gathered together


class Refs(NamedTuple):
    scale: object
    q: object
    k: object
    v: object
    g: object
    b: object
    w: object
    X: object  # transposed, as Aqk and vn
    Aqk: object
    vn: object
    entering: object
    do: object
    d_final: object
    dq: object
    dk: object
    dv: object
    dg: object
    db: object
    dw: object
    d_initial: object
    d_scale: object
    d_state: object  # scratch of each head from here on, as in `forward.Refs`: (V, K)
    P: object  # (C, K)
    U: object  # (C, K)
    small: object  # (2, C, K): factors of levels 2 and 4, U in earlier rows, P in later
    large: object  # (levels, C, K): of levels 8 ..
    dz: object  # (C, V); dvn before it
    turned: object  # (2, V, C): do, dz transposed
    pairs: object  # (2, C, C): dAqk, dA
    turned_pairs: object  # (2, C, C)
    so_far: object  # (3, C, K): dq, d(b*k), dk
    shared: (
        object  # (C, max(K, V)): vn turned back, and when it is used up what is owed
    )
    near: object  # (4, C, K): dq, d(b*k), dk, dg of level 1 and the diagonal


def backward_scratch(C, K, V, members):
    rows = V // members
    large = (len(whole_registers(C)), C, K)
    factors = [(C, K), (C, K), (len(IN_REGISTERS), C, K), large]
    products = [(C, V), (2, rows, LANES), *[(2, C, LANES)] * 2]
    return [(rows, K), *factors, *products, (3, C, K), (C, max(K, V)), (4, C, K)]


def backward_kernel(*refs, precision):
    refs, passes = Refs(*refs), PASSES[precision]
    C = refs.X.shape[-2]
    heads = heads_of(refs.d_final, members=LANES // C)
    brief = is_brief(heads[0].lanes, passes)
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        refs.d_scale[...] = jnp.zeros(refs.d_scale.shape, jnp.float32)
        for head in heads:
            refs.d_state[head.n] = refs.d_final[head.at].T

    @phase(0)
    def _():
        side_by_side(solve(refs, head, passes) for head in heads)

    @phase(1, apart=not brief)
    def _():
        side_by_side(start_from_state(refs, head, passes) for head in heads)
        gathered = [neighbours_to_gather(refs, head) for head in heads]
        near = [
            functools.partial(
                neighbours, refs, heads, gathered, slice(start, start + NEAR_TILE)
            )
            for start in range(0, C, NEAR_TILE)
        ]
        levels = in_step(large_levels(refs, head, passes) for head in heads)
        count = len(whole_registers(C)) * len(heads)
        late = passes.single and not brief
        spread(levels, count, near, start=count // 2 if late else 0)

    @phase(2, apart=not brief)
    def _():
        side_by_side(small_levels(refs, head, passes) for head in heads)

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        for head in heads:
            refs.d_initial[head.at] = refs.d_state[head.n].T


def load(refs, head, tile=slice(None)):
    """q (scaled), k, b, all (C, K)."""
    K = refs.d_state.shape[2]
    q, k, b = (read(x, head, K, tile) for x in (refs.q, refs.k, refs.b))
    return refs.scale[0, 0] * q, k, b


# ------------------------------------------------------ phase 0


def solve(refs, head, passes):
    """The tree, dz, and the gradients of all pairs."""
    n, V, K, lanes = head.n, refs.dz.shape[2], refs.P.shape[2], head.lanes
    build_tree(refs, head, passes)
    do, dS = read(refs.do, head, V), refs.d_state[n]
    refs.turned[n, 0] = lanes.turned(do)
    refs.shared[n, :, :V] = turned_operand(lanes, passes, f32(refs.vn[head.at]))
    kg = read(refs.k, head, K) * refs.U[n]
    dvn = passes.dot(f32(refs.Aqk[head.at]), weights(lanes, passes, do))
    from_state = passes.dot(kg, weights(lanes, passes, dS), transpose_b=True)
    refs.dz[n] = dvn + from_state
    yield
    dz = passes.dot(f32(refs.X[head.at]), weights(lanes, passes, refs.dz[n]))
    write(refs.dv, head, dz * read(refs.w, head, V))
    write(refs.dw, head, dz * read(refs.v, head, V))
    refs.dz[n] = -dz  # from here on
    refs.turned[n, 1] = -lanes.turned(dz)
    yield
    both = jnp.concatenate([do, refs.dz[n]])
    pairs = passes.dot(both, weights(lanes, passes, f32(refs.vn[head.at])))
    refs.pairs[n, 0], refs.pairs[n, 1] = pairs[: len(do)], pairs[len(do) :]


def build_tree(refs, head, passes):
    n, K = head.n, refs.d_state.shape[2]
    g = read(refs.g, head, K)
    P, U = tree.first_doubling(jnp.exp(g))
    for level, h in enumerate(IN_REGISTERS):
        refs.small[n, level] = tiles.choose_rows(h, P, U)
        P, U = tree.doubling_in_registers(P, U, h)
    if passes.exact:
        P, U = tree.from_sums(g)
    for level, h in enumerate(whole_registers(len(g))):
        refs.large[n, level] = tiles.weave(tiles.earlier(U, h), tiles.later(P, h), h)
        P, U = tree.doubling(P, U, h)
    refs.P[n], refs.U[n] = P, U


# ------------------------------------------------------ phase 1


def start_from_state(refs, head, passes):
    """Generator. What dq, d(b*k), dk get through the state; dv and dw."""
    n, lanes, (C, V) = head.n, head.lanes, refs.dz.shape[1:]
    P, U, dz = refs.P[n], refs.U[n], refs.dz[n]
    both = jnp.concatenate([read(refs.do, head, V), dz])
    from_state = passes.dot(both, weights(lanes, passes, f32(refs.entering[head.at])))
    refs.so_far[n, 0], refs.so_far[n, 1] = from_state[:C] * P, from_state[C:] * P
    for i, x in enumerate(turned_pairs(refs, head, passes)):
        refs.turned_pairs[n, i] = x
    dS = weights(lanes, passes, refs.d_state[n])
    refs.so_far[n, 2] = passes.dot(refs.shared[n, :, :V], dS) * U
    yield


def both_of(ref, head):
    """dAqk, dA"""
    return ref[head.n, 0], ref[head.n, 1]


def turned_pairs(refs, head, passes):
    n, lanes, V = head.n, head.lanes, refs.dz.shape[2]
    for i in range(2):
        if is_brief(lanes, passes):  # made anew, by products
            of_all = weights(lanes, passes, refs.turned[n, i])
            yield passes.dot(refs.shared[n, :, :V], of_all)
        else:
            yield lanes.turned(refs.pairs[n, i])


def large_levels(refs, head, passes):
    """Generator. A step for each level."""
    n, K = head.n, refs.d_state.shape[2]
    q, k, b = load(refs, head)
    bk = b * k
    pairs = [passes.split(x) for x in both_of(refs.pairs, head)]
    sums = tuple(refs.so_far[n, i] for i in range(3))
    owed = first_row_of(refs, head)
    for level, h in reversed(list(enumerate(whole_registers(len(q))))):
        owed = levels_back.owed_over_halves(q, k, bk, sums, owed, h)
        turned = both_of(refs.turned_pairs, head)
        sums = levels_back.level(
            q, k, bk, refs.large[n, level], pairs, turned, sums, h, passes, head.lanes
        )
        if level == 0:
            refs.shared[n, :, :K] = matrix(owed)
            for i, x in enumerate(sums):
                refs.so_far[n, i] = x
        yield


def first_row_of(refs, head):
    """What every token owes for the state that passes over it, in the first row of a
    register (1, 8, K).
    """
    n, K = head.n, refs.d_state.shape[2]
    through = jnp.sum(refs.d_state[n] * f32(refs.entering[head.at]), 0, keepdims=True)
    first = rows((ROWS, K)) == 0
    return registers(only(first, whole_decay(refs, head) * through))


def whole_decay(refs, head):
    """Of the chunk, (1, K)."""
    C = refs.P.shape[1]
    return refs.P[head.n, C - 1 :]


def neighbours_to_gather(refs, head):
    """Packed blocks of which column t - 1 is, for row t: the diagonal, and level 1."""
    dAqk, dA = (tiles.pack_blocks(x) for x in both_of(refs.pairs, head))
    odd = (rows(REGISTER) & int32(1)) != 0
    return roll_lanes(dAqk, -1), only(odd, dAqk), only(odd, dA)


def neighbours(refs, heads, gathered, at):
    """Level 1 and the diagonal of some rows, all heads."""
    row, K = rows(REGISTER), refs.d_state.shape[2]
    parts = [[] for _ in heads]
    for start in range(at.start, at.stop, ROWS):
        before = int32(start - 1) + heads[0].lanes.first_lane()
        lanes = (row + before) & int32(LANES - 1)
        # Heads inside: they share the pattern.
        for part, packed in zip(parts, gathered):
            part.append([tiles.lane_gather(x, lanes) for x in packed])
    for head, part in zip(heads, parts):
        own, of_q, of_bk = (
            jnp.concatenate([jnp.concatenate(x)] * (K // LANES), 1) for x in zip(*part)
        )
        q, k, b = load(refs, head, at)
        a = jnp.exp(read(refs.g, head, K, at))
        before = roll_rows(k, 1) * a
        to_key = of_q * q + of_bk * (b * k)
        refs.near[head.n, 0, at] = of_q * before + own * k
        refs.near[head.n, 1, at] = of_bk * before
        refs.near[head.n, 2, at] = own * q + roll_rows(a * to_key, -1)
        refs.near[head.n, 3, at] = to_key * before


# ------------------------------------------------------ phase 2


def small_levels(refs, head, passes):
    n, K = head.n, refs.d_state.shape[2]
    if passes.packs:
        leave_through_state(refs, head, passes)
    q, k, b = load(refs, head)
    bk = b * k
    sums = tuple(refs.so_far[n, i] for i in range(3))
    owed = registers(refs.shared[n, :, :K])
    packed, turned = (
        [passes.split(tiles.pack_blocks(x)) for x in both_of(ref, head)]
        for ref in (refs.pairs, refs.turned_pairs)
    )
    for level, h in reversed(list(enumerate(IN_REGISTERS))):
        owed = levels_back.owed_in_registers(q, k, bk, sums, owed, h)
        sums = levels_back.level_in_registers(
            q, k, bk, refs.small[n, level], packed, turned, sums, h, passes, head.lanes
        )
        if level == 0:
            refs.shared[n, :, :K] = matrix(owed)
            for i, x in enumerate(sums):
                refs.so_far[n, i] = x
            yield
        elif not passes.packs:
            # The vector unit is busier here, and products fit between.
            leave_through_state(refs, head, passes)
    passed = refs.d_scale[head.at]
    for start in range(0, len(q), TILE):
        passed += results(refs, head, slice(start, start + TILE))
        yield
    refs.d_scale[head.at] = passed


def leave_through_state(refs, head, passes):
    n, lanes = head.n, head.lanes
    q, k, b = load(refs, head)
    P = refs.P[n]
    by_q = passes.dot(refs.turned[n, 0], weights(lanes, passes, q * P))
    by_bk = passes.dot(refs.turned[n, 1], weights(lanes, passes, b * k * P))
    refs.d_state[n] = refs.d_state[n] * whole_decay(refs, head) + (by_q + by_bk)


def results(refs, head, at):
    """dq, dk, dg, db of some rows, level 1 and the diagonal included. Returns: what they
    add to the gradient of scale, (8, K).
    """
    n, K = head.n, refs.d_state.shape[2]
    q, k, b = load(refs, head, at)
    dq, d_bk, dk = (refs.so_far[n, i, at] for i in range(3))
    near_q, near_bk, near_k, near_g = (refs.near[n, i, at] for i in range(4))
    owing = q * dq + (b * k) * d_bk
    owed = registers(refs.shared[n, at, :K])
    late = tiles.in_later_rows(owed, 1)
    passing = owed + jnp.where(late, registers(owing), registers(k * dk))
    up, down = pltpu.roll(passing, int32(7), 1), pltpu.roll(passing, int32(1), 1)
    write(
        refs.dg, head, matrix(owed + jnp.where(late, down, up)) + (owing + near_g), at
    )
    dq, d_bk = dq + near_q, d_bk + near_bk
    write(refs.dq, head, refs.scale[0, 0] * dq, at)
    write(refs.dk, head, dk + near_k + d_bk * b, at)
    write(refs.db, head, d_bk * k, at)
    return jnp.sum(registers(read(refs.q, head, K, at) * dq), 0)
