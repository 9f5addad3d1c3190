"""Gradients through one level of the tree, on registers: `plain.levels_back`, taken
apart.

`sums` are dq, d(b*k), dk (C, K) as far as they have come; `owed` (blocks, 8, K) is what
the rows of a block owe to the decay of every row of it, still to be summed over the 8.
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.lanes import weights
from gdn2_kernels.stages.mxu.passes import woven_parts
from gdn2_kernels.stages.mxu.tiles import (
    REGISTER,
    ROWS,
    earlier,
    later,
    matrix,
    registers,
    roll_lanes,
    roll_rows,
    weave,
)  # fmt: skip
from gdn2_kernels.tile import columns, int32, only, rows


def owed_over_halves(q, k, bk, sums, owed, h):
    """Before level h >= 8 is added: from blocks of 2h to their halves. What later rows
    read from outside passes over the earlier half, what leaves the earlier over the later.
    """
    dq, d_bk, dk = sums

    def folded(x):  # all registers of a half added
        x = x.reshape(-1, h // ROWS, ROWS, x.shape[-1])
        return functools.reduce(jnp.add, [x[:, i] for i in range(h // ROWS)])

    reading = folded(later(q, h) * later(dq, h) + later(bk, h) * later(d_bk, h))
    written = folded(earlier(k, h) * earlier(dk, h))
    halves = jnp.stack([owed + reading, owed + written], 1)
    return halves.reshape(-1, ROWS, q.shape[1])


def level(q, k, bk, factors, pairs, turned, sums, h, passes, lanes):
    """`sums` with level h >= 8 added. pairs: parts of dAqk, of dA; turned: their
    transposes.
    """
    dq, d_bk, dk = sums
    P, U = later(factors, h), earlier(factors, h)
    q_P, bk_P, k_U = later(q, h) * P, later(bk, h) * P, earlier(k, h) * U
    half = len(k_U)
    in_early, in_late = tiles.halves_of_block(2 * half, h)

    # Rows: later queries. Columns: earlier keys.
    both = [
        passes.pack_parts([later(x, h) for x in parts], in_early, in_late, h)
        for parts in pairs
    ]
    keys = weights(lanes, passes, woven_parts(passes, k_U, k_U, h))
    read = passes.packed_dot(jnp.concatenate(both), keys)

    # Rows: earlier keys. Columns: later queries, q in the later half, b*k moved to the
    # earlier one.
    dAqk, dA = turned
    moved = only(in_early, roll_lanes(earlier(dA, h), -h))
    both = jnp.where(in_late, earlier(dAqk, h), moved)
    queries = weights(lanes, passes, woven_parts(passes, bk_P, q_P, h))
    written = passes.dot(both, queries)

    def add_later(x, y):
        return weave(earlier(x, h), later(x, h) + y, h)

    dq, d_bk = add_later(dq, read[:half] * P), add_later(d_bk, read[half:] * P)
    return dq, d_bk, weave(earlier(dk, h) + written * U, later(dk, h), h)


def owed_in_registers(q, k, bk, sums, owed, h):
    """The same for h < 8; `owed` (C/8, 8, K): its sum over a block of 2h rows."""
    dq, d_bk, dk = sums
    late = tiles.in_later_rows(owed, h)
    passing = owed + jnp.where(late, registers(q * dq + bk * d_bk), registers(k * dk))
    down = pltpu.roll(passing, int32(h), 1)
    up = pltpu.roll(passing, int32(ROWS - h), 1)
    return owed + (down if h == 4 else jnp.where(late, down, up))


def level_in_registers(q, k, bk, factors, packed, turned, sums, h, passes, lanes):
    """`sums` with level h < 8 added. packed: 8 x 8 blocks, parts of dAqk, of dA; turned:
    of their transposes.
    """
    dq, d_bk, dk = sums
    factors = registers(factors)
    late = tiles.in_later_rows(factors, h)
    P = matrix(only(late, factors))
    U = matrix(only(~late, factors))
    queries = q * P + roll_rows(bk * P, -h)  # b*k moved to the earlier rows
    keys = k * U

    row, column = rows(REGISTER), columns(REGISTER) & int32(7)
    same = ((row ^ column) & int32(-2 * h)) == 0
    in_early = same & ((column & int32(h)) == 0)
    in_late = same & ((column & int32(h)) != 0)
    late_row = (row & int32(h)) != 0

    # Rows: later ones q's, earlier ones (of the same block) those of b*k.
    both = [jnp.where(late_row, x, roll_rows(y, -h)) for x, y in zip(*packed)]
    both = passes.pack_parts(both, in_early, in_late, h)
    keys = keys + roll_rows(keys, h) if passes.packs else keys
    read = passes.blocks_dot(both, keys, lanes)

    both = [
        jnp.where(in_late, x, only(in_early, roll_lanes(y, -h)))
        for x, y in zip(*turned)
    ]
    both = passes.stack_parts(both, late_row, h)
    written = passes.blocks_dot(both, queries, lanes)
    written = written + roll_rows(written, -h) if passes.packs else written
    return dq + read * P, d_bk + roll_rows(read, h) * P, dk + written * U
