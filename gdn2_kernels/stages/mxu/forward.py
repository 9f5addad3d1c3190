"""The forward kernel: one chunk of several heads, in three phases.

It computes `plain.forward_chunk`, rearranged:

- all heads go through a step before the next step (`side_by_side`);
- only later halves are queries and only earlier halves keys, and one operand holds both
  queries: q in the later rows, b*k in the earlier rows, shifted by h;
- keys stream past queries as weights: only half the rows, and products come out
  transposed, [key, query], as the backward kernel wants them;
- inverses share products, or have their low parts in the empty half of the contraction
  (`inverse`);
- pairs at distance one, the diagonal, and the inverse of small blocks are not worth a
  product: they stay on the vector unit. Those of q wait for the phase in which it is
  idle.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from gdn2_kernels.stages.mxu import tiles, tree
from gdn2_kernels.stages.mxu.heads import heads_of, phase, read, spread, write
from gdn2_kernels.stages.mxu.inverse import slots
from gdn2_kernels.stages.mxu.passes import PASSES, woven_parts
from gdn2_kernels.stages.mxu.tiles import (
    REGISTER,
    C,
    earlier,
    later,
    roll_lanes,
    roll_rows,
    unstacked,
    weave,
)
from gdn2_kernels.tile import columns, f32, in_step, int32, only, rows, side_by_side

IN_REGISTERS = (2, 4)  # levels h whose halves are less than a register
WHOLE_REGISTERS = (8, 16, 32, 64)


class Refs(NamedTuple):
    scale: object
    q: object
    k: object
    v: object
    g: object
    b: object
    w: object
    initial: object
    o: object
    final: object
    X: object  # transposed, as Aqk and vn
    Aqk: object
    vn: object  # None where no backward launch will want it, as entering
    entering: object
    state: object  # scratch of each head from here on: (V, K)
    P: object  # (C, K)
    U: object  # (C, K)
    A: object  # (4, C/2, C): levels of A, of the first head of a slot those of all
    leaves: object  # (2, 2, 8, C): of each member of a slot, what its inverse starts from
    Aqk8: object  # (members, 8, C): levels of Aqk within registers, packed
    o_state: object  # (C, V): what o reads from the state
    z: object  # (V, C): w*v - kb S, transposed


    @classmethod
    def of(cls, refs, keep):
        if keep:
            return cls(*refs)
        *others, X, Aqk = refs  # scratch, behind all other
        at = cls._fields.index("X")
        return cls(*others[:at], X, Aqk, None, None, *others[at:])


def forward_scratch(C, K, V, members, keep=True):
    levels = (len(WHOLE_REGISTERS), C // 2, C)
    registers = [(2, 2, 8, C), (members, 8, C)]
    scratch = [(V, K), (C, K), (C, K), levels, *registers, (C, V), (V, C)]
    return scratch + ([] if keep else [(members * C, C)] * 2)


def forward_kernel(*refs, precision, keep=True, alone=False):
    """keep: write what the backward launch needs. alone: no head shares an inverse."""
    refs, passes = Refs.of(refs, keep), PASSES[precision]
    heads = heads_of(refs.initial, members=refs.X.shape[-2] // C)
    shared = slots(heads, passes, alone)
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        for head in heads:
            refs.state[head.n] = refs.initial[head.at].T

    @phase(0)
    def _():
        side_by_side(
            scores(refs, head, slot, passes) for slot in shared for head in slot.heads
        )

    @phase(1)
    def _():
        steps = in_step(inverse(refs, slot, passes) for slot in shared)
        count = sum(steps_of_inverse(slot) for slot in shared)
        near = [functools.partial(blocks_of_q, refs, head) for head in heads]
        if not passes.single:
            # First: the doubling begins with products that wait for each other.
            for of_head in near:
                of_head()
            near = []
        # At one pass they do all the way: later, when states have been read.
        spread(steps, count, near, start=count // 2)

    @phase(2)
    def _():
        side_by_side(outputs(refs, head, passes) for head in heads)

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        for head in heads:
            refs.final[head.at] = refs.state[head.n].T


def load(refs, head):
    """q (scaled), k, b*k, all (C, K)."""
    K = refs.state.shape[2]
    k = read(refs.k, head, K)
    return refs.scale[0, 0] * read(refs.q, head, K), k, read(refs.b, head, K) * k


# ------------------------------------------------------ phase 0


def scores(refs, head, slot, passes):
    """Aqk without its 8 x 8 blocks, A, P and U, and leaves of the inverse."""
    lanes = head.lanes
    q, k, bk = load(refs, head)
    g = read(refs.g, head, refs.state.shape[2])
    P = jnp.exp(g)
    A8 = level_1(bk, k, P, lanes)
    Aqk8 = [jnp.zeros_like(x) for x in A8]
    P, U = tree.first_doubling(P)
    yield
    for h in IN_REGISTERS:
        of_q, of_bk, here = pairs_in_registers(q, k, bk, P, U, h, passes, lanes)
        Aqk8 = [jnp.where(here, new, old) for new, old in zip(of_q, Aqk8)]
        A8 = [jnp.where(here, new, old) for new, old in zip(of_bk, A8)]
        P, U = tree.doubling_in_registers(P, U, h)
    for i, x in enumerate(Aqk8):
        refs.Aqk8[head.n, i] = x
    if passes.single:
        yield
    if passes.exact:
        P, U = tree.from_sums(g)
    Aqk = [jnp.zeros((C, C), jnp.float32) for _ in Aqk8]
    for h in WHOLE_REGISTERS:
        pairs = pairs_of_level(q, k, bk, P, U, h, passes, lanes)  # (C/2, C) each
        _, in_late = tiles.halves_of_block(h)
        for i, of_level in enumerate(pairs):
            early = jnp.where(in_late, of_level, earlier(Aqk[i], h))
            Aqk[i] = weave(early, later(Aqk[i], h), h)
        slot.put_level(refs, head, h, pairs, passes)
        P, U = tree.doubling(P, U, h)
    refs.P[head.n], refs.U[head.n] = P, U
    for at, x in zip(head.squares(refs.Aqk), Aqk):
        refs.Aqk[at] = x.astype(refs.Aqk.dtype)
    yield
    yield from in_step(slot.put_leaf(refs, head, i, x) for i, x in enumerate(A8))


def level_1(x, k, a, lanes):
    """Level 1, [key, query] of q or b*k, of 8 x 8 blocks, packed; of each member."""
    before = roll_rows(k, 1) * a  # the key before, decayed once
    row, column = rows(REGISTER), columns(REGISTER) & int32(7)
    here = (column == row + 1) & ((row & int32(1)) == 0)
    sums = (tiles.pack_row_sums(x) for x in lanes.own(x * before))
    return [only(here, roll_rows(x, -1)) for x in sums]  # to the key's row


def blocks_of_q(refs, head):
    """What Aqk lacks: its 8 x 8 blocks, the diagonal and the levels h < 8."""
    K = refs.state.shape[2]
    q, k, _ = load(refs, head)
    near = level_1(q, k, jnp.exp(read(refs.g, head, K)), head.lanes)
    diagonal = rows(REGISTER) == (columns(REGISTER) & int32(7))
    for i, x in enumerate(head.lanes.own(q * k)):
        own = only(diagonal, tiles.pack_row_sums(x))
        blocks = tiles.unpack_blocks(refs.Aqk8[head.n, i] + near[i] + own)
        at = head.squares(refs.Aqk)[i]
        refs.Aqk[at] = (f32(refs.Aqk[at]) + blocks).astype(refs.Aqk.dtype)


def pairs_in_registers(q, k, bk, P, U, h, passes, lanes):
    """Level h < 8. Returns: [key, query] of q and of b*k, packed, of each member, and
    where they are.
    """
    queries = tiles.choose_rows(h, q * P, roll_rows(bk * P, -h))
    pairs = lanes.keys_by_queries(passes, k * U, queries, h)
    row, column = rows(REGISTER), columns(REGISTER) & int32(7)
    apart = row ^ column
    here = (apart >= h) & (apart < 2 * h) & (row < column)
    return pairs, [roll_lanes(x, h) for x in pairs], here


def pairs_of_level(q, k, bk, P, U, h, passes, lanes):
    """Level h >= 8, (C/2, C) of each member: keys of earlier halves by, in every block,
    the b*k of the later half (in columns of the earlier one) and its q.
    """
    decay = later(P, h)
    queries = woven_parts(passes, later(bk, h) * decay, later(q, h) * decay, h)
    keys = passes.split(earlier(k, h) * earlier(U, h))
    keys = tuple(jnp.concatenate(lanes.own(x)) for x in keys)
    return unstacked(passes.dot(keys, queries, transpose_b=True), lanes.MEMBERS)


# ------------------------------------------------------ phase 1


def inverse(refs, slot, passes):
    """X^T = (I + A)^-1 transposed; what is read from the state."""
    steps = slot.inverse(refs, passes)
    for _ in range(3):  # the start, and the two products of a level
        next(steps)
        yield
    for head in slot.heads:
        read_state(refs, head, passes)
        yield
    X = yield from steps
    for at, x in zip(slot.squares(refs.X), X):
        refs.X[at] = x.astype(refs.X.dtype)


def steps_of_inverse(slot):
    """Of `inverse`, its end counted."""
    return 1 + 2 * len(slot.kind.LEVELS) + len(slot.heads) + 1


def read_state(refs, head, passes):
    V, K = refs.state.shape[1:]
    q, _, bk = load(refs, head)
    P, S = refs.P[head.n], refs.state[head.n]
    if refs.entering is not None:
        refs.entering[head.at] = S.astype(refs.entering.dtype)
    reads = passes.dot(jnp.concatenate([q * P, bk * P]), S, transpose_b=True)
    refs.o_state[head.n] = reads[:C]
    z = read(refs.w, head, V) * read(refs.v, head, V) - reads[C:]
    refs.z[head.n] = z.T


# ------------------------------------------------------ phase 2


def outputs(refs, head, passes):
    lanes, K = head.lanes, refs.state.shape[2]
    X, Aqk = ([f32(x[at]) for at in head.squares(x)] for x in (refs.X, refs.Aqk))
    vn = lanes.values_by(passes, refs.z[head.n], X)
    yield
    if refs.vn is not None:
        refs.vn[head.at] = vn.astype(refs.vn.dtype)
    vn = passes.split(vn)
    o = lanes.values_by(passes, vn, Aqk)
    kg = read(refs.k, head, K) * refs.U[head.n]
    decayed = refs.state[head.n] * refs.P[head.n, C - 1 :]
    refs.state[head.n] = decayed + lanes.on_diagonal(passes.dot(vn, kg))
    yield
    write(refs.o, head, refs.o_state[head.n] + o.T)
