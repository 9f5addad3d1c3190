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
from gdn2_kernels.stages.mxu.lanes import is_brief, weights
from gdn2_kernels.stages.mxu.passes import PASSES, woven_parts
from gdn2_kernels.stages.mxu.tiles import (
    LANES,
    REGISTER,
    earlier,
    later,
    roll_lanes,
    roll_rows,
    weave,
)
from gdn2_kernels.tile import columns, f32, in_step, int32, only, rows, side_by_side

IN_REGISTERS = (2, 4)  # levels h whose halves are less than a register



def whole_registers(C):
    """Levels h of chunks of C tokens whose halves are registers."""
    return [h for h in (8, 16, 32, 64) if h < C]


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
    # Scratch of each head from here on. Its size is that of one head; of a pair, what
    # belongs to a member has half of the columns (`lanes`).
    state: object  # (V, K)
    P: object  # (C, K)
    U: object  # (C, K)
    A: object  # (levels, C/2, C): levels of A, of the first head of a slot those of all
    leaves: object  # (2, 2, 8, C): of each head of a slot, what its inverse starts from
    Aqk8: object  # (8, C): levels of Aqk within registers, packed
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
    rows = V // members
    levels = (len(whole_registers(C)), C // 2, LANES)
    registers = [(2, 2, *REGISTER), REGISTER]
    scratch = [(rows, K), (C, K), (C, K), levels, *registers, (C, V), (rows, LANES)]
    return scratch + ([] if keep else [(C, LANES)] * 2)


def forward_kernel(*refs, precision, keep=True, alone=False):
    """keep: write what the backward launch needs. alone: no head shares an inverse."""
    refs, passes = Refs.of(refs, keep), PASSES[precision]
    C = refs.X.shape[-2]
    heads = heads_of(refs.initial, members=LANES // C)
    shared = slots(heads, passes, alone)
    brief = is_brief(heads[0].lanes, passes)
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

    @phase(1, apart=not brief)
    def _():
        steps = in_step(inverse(refs, slot, passes) for slot in shared)
        count = sum(steps_of_inverse(slot, C) for slot in shared)
        near = [functools.partial(blocks_of_q, refs, head, passes) for head in heads]
        if not passes.single:
            # First: the doubling begins with products that wait for each other.
            for of_head in near:
                of_head()
            near = []
        # At one pass they do all the way: later, when states have been read.
        spread(steps, count, near, start=5 * count // 8)

    @phase(2, apart=not brief)
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
    C = len(q)
    g = read(refs.g, head, refs.state.shape[2])
    P = jnp.exp(g)
    A8 = level_1(bk, k, P, lanes)
    Aqk8 = jnp.zeros_like(A8)
    P, U = tree.first_doubling(P)
    if not is_brief(lanes, passes):  # half as many rows, all done in one pass
        yield
    for h in IN_REGISTERS:
        of_q, of_bk, here = pairs_in_registers(q, k, bk, P, U, h, passes, lanes)
        Aqk8 = jnp.where(here, of_q, Aqk8)
        A8 = jnp.where(here, of_bk, A8)
        P, U = tree.doubling_in_registers(P, U, h)
    refs.Aqk8[head.n] = Aqk8
    if passes.single:
        yield
    if passes.exact:
        P, U = tree.from_sums(g)
    Aqk = jnp.zeros((C, LANES), jnp.float32)
    for h in whole_registers(C):
        pairs = pairs_of_level(q, k, bk, P, U, h, passes, lanes)
        _, in_late = tiles.halves_of_block(C, h)
        early = jnp.where(in_late, pairs, earlier(Aqk, h))
        Aqk = weave(early, later(Aqk, h), h)
        slot.put_level(refs, head, h, pairs, passes)
        P, U = tree.doubling(P, U, h)
    refs.P[head.n], refs.U[head.n] = P, U
    refs.Aqk[head.place(refs.Aqk)] = Aqk.astype(refs.Aqk.dtype)
    yield
    yield from slot.put_leaf(refs, head, A8)


def level_1(x, k, a, lanes):
    """Level 1, [key, query] of q or b*k, of 8 x 8 blocks, packed."""
    before = roll_rows(k, 1) * a  # the key before, decayed once
    row, column = rows(REGISTER), columns(REGISTER) & int32(7)
    here = (column == row + 1) & ((row & int32(1)) == 0)
    sums = tiles.pack_row_sums(lanes.own(x * before), lanes.chosen)
    return only(here, roll_rows(sums, -1))  # to the key's row


def diagonal(q, k, passes, lanes):
    """Of Aqk, of 8 x 8 blocks, packed."""
    here = rows(REGISTER) == (columns(REGISTER) & int32(7))
    if is_brief(lanes, passes):
        ones = lanes.weights(jnp.ones(q.shape, q.dtype))
        sums = tiles.pack_blocks(passes.product(q * k, ones))
    else:
        sums = tiles.pack_row_sums(lanes.own(q * k), lanes.chosen)
    return only(here, sums)


def blocks_of_q(refs, head, passes):
    """What Aqk lacks: its 8 x 8 blocks, the diagonal and the levels h < 8."""
    K, lanes, at = refs.state.shape[2], head.lanes, head.place(refs.Aqk)
    q, k, _ = load(refs, head)
    near = level_1(q, k, jnp.exp(read(refs.g, head, K)), lanes)
    packed = refs.Aqk8[head.n] + near + diagonal(q, k, passes, lanes)
    blocks = tiles.unpack_blocks(packed, len(q))
    refs.Aqk[at] = (f32(refs.Aqk[at]) + blocks).astype(refs.Aqk.dtype)


def pairs_in_registers(q, k, bk, P, U, h, passes, lanes):
    """Level h < 8. Returns: [key, query] of q and of b*k, packed, and where they are."""
    keys, queries = k * U, tiles.choose_rows(h, q * P, roll_rows(bk * P, -h))
    if passes.packs:  # later rows of keys are free: their low parts go there
        high, low = passes.split(keys)
        keys = tiles.choose_rows(h, roll_rows(low, h), high)
    of_parts = [
        passes.product(keys, x, transpose_b=True)
        for x in weights(lanes, passes, queries)
    ]
    pairs = tiles.pack_blocks(sum(of_parts[1:], of_parts[0]))
    if passes.packs:
        pairs = pairs + roll_rows(pairs, -h)
    row, column = rows(REGISTER), columns(REGISTER) & int32(7)
    apart = row ^ column
    here = (apart >= h) & (apart < 2 * h) & (row < column)
    return pairs, roll_lanes(pairs, h), here


def pairs_of_level(q, k, bk, P, U, h, passes, lanes):
    """Level h >= 8, (C/2, 128): keys of earlier halves by, in every block, the b*k of the
    later half (in columns of the earlier one) and its q.
    """
    decay = later(P, h)
    queries = woven_parts(passes, later(bk, h) * decay, later(q, h) * decay, h)
    keys = earlier(k, h) * earlier(U, h)
    return passes.dot(keys, weights(lanes, passes, queries), transpose_b=True)


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
    for head, x in zip(slot.heads, X):
        refs.X[head.place(refs.X)] = x.astype(refs.X.dtype)


def steps_of_inverse(slot, C):
    """Of `inverse`, its end counted."""
    return 1 + 2 * len(slot.levels(C)) + len(slot.heads) + 1


def read_state(refs, head, passes):
    lanes, V = head.lanes, refs.o_state.shape[2]
    q, _, bk = load(refs, head)
    C, P, S = len(q), refs.P[head.n], refs.state[head.n]
    if refs.entering is not None:
        refs.entering[head.at] = S.astype(refs.entering.dtype)
    both = jnp.concatenate([q * P, bk * P])
    reads = passes.dot(both, weights(lanes, passes, S), transpose_b=True)
    refs.o_state[head.n] = reads[:C]
    z = read(refs.w, head, V) * read(refs.v, head, V) - reads[C:]
    refs.z[head.n] = lanes.turned(z)


# ------------------------------------------------------ phase 2


def outputs(refs, head, passes):
    lanes, K = head.lanes, refs.state.shape[2]
    X, Aqk = (f32(x[head.place(x)]) for x in (refs.X, refs.Aqk))
    vn = passes.dot(refs.z[head.n], weights(lanes, passes, X))
    yield
    if refs.vn is not None:
        refs.vn[head.at] = vn.astype(refs.vn.dtype)
    vn = passes.split(vn)
    o = passes.dot(vn, weights(lanes, passes, Aqk))
    yield
    write(refs.o, head, refs.o_state[head.n] + lanes.turned(o))
    kg = read(refs.k, head, K) * refs.U[head.n]
    decayed = refs.state[head.n] * refs.P[head.n, len(kg) - 1 :]
    refs.state[head.n] = decayed + passes.dot(vn, weights(lanes, passes, kg))
