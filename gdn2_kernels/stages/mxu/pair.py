"""Two heads of 64 channels, side by side in the lanes of a register as they lie in
memory. Methods as those of `Alone`.

States (V, K) have zeros outside two blocks on the diagonal. For pairs of tokens

- a product over channels gets the lanes of one member and zeros, for each member;
- a product that gives channels is made for each member, and lanes are chosen;
- of transposed operands a member has half the rows;
- where one head leaves half of a product empty, in every level of the tree, and fills
  it with low parts at most, the other member stands there.

Zeros keep members apart: numbers have to be finite.
"""

import jax.numpy as jnp

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.tiles import (
    REGISTER,
    ROWS,
    C,
    earlier,
    later,
    mirrored,
    roll_lanes,
    roll_rows,
    unstacked,
    upside_down,
    weave,
)
from gdn2_kernels.tile import columns, int32, only, rows

HALF = 64  # lanes, channels of a member


class Pair:
    """Two heads of 64 channels."""

    MEMBERS = 2

    @staticmethod
    def own(x):
        first = columns(x.shape) < HALF
        return [only(first, x), only(~first, x)]

    @staticmethod
    def chosen(parts):
        first, second = parts
        return jnp.where(columns(first.shape) < HALF, first, second)

    @staticmethod
    def on_diagonal(state):
        return only((rows(state.shape) < HALF) == (columns(state.shape) < HALF), state)

    @staticmethod
    def values_by(passes, values, squares):
        values = values if isinstance(values, tuple) else passes.split(values)
        first, second = ([x[:HALF] for x in values], [x[HALF:] for x in values])
        products = [
            passes.dot(tuple(x), square) for x, square in zip((first, second), squares)
        ]
        return jnp.concatenate(products)

    @staticmethod
    def pairs_by_values(passes, x, values):
        # A member's 64 values are half of the contraction: low parts go into the other.
        if passes.packs:
            high, low = passes.split(x)
            low = roll_lanes(low, HALF)
            first = columns(x.shape) < HALF
            packed = [jnp.where(first, high, low), jnp.where(first, low, high)]
        else:
            packed = Pair.own(x)
        of_members = passes.split(values[:HALF]), passes.split(mirrored(values[HALF:]))
        return [
            passes.packed_dot(x, [jnp.concatenate([part] * 2) for part in values])
            for x, values in zip(packed, of_members)
        ]

    # ---------------------------------------------- levels of h >= 8
    #
    # Some matrices have their columns mirrored, in groups of eight: 8t .. 8t+7 at
    # 120 - 8t. So earlier halves are later ones at every level, and what has to share the
    # contraction of a product finds its place without a rotation. Rows that meet mirrored
    # columns are turned upside down, in whole registers, which moves nothing.
    #
    # Mirrored are dAqk and dA of the second member, for `read`; and dA^T of both, for
    # `written`. (And the second inverse of two: `inverse.Two`.)

    @staticmethod
    def each_level(passes, load):
        return load  # anew for every level: their parts would not stay in registers

    @staticmethod
    def turned(i, member, x):
        x = (upside_down(x) if i == 1 else x).T
        return upside_down(x) if member == 1 else x

    @staticmethod
    def pack_blocks(i, member, x, turned=False):
        if i == 1 if turned else member == 1:
            return mirrored(tiles.pack_blocks(upside_down(x)))
        return tiles.pack_blocks(x)

    @staticmethod
    def read(passes, matrices, keys, h):
        in_early, _ = tiles.halves_of_block(h)
        early_mirrored, _ = mirror_of_halves(h)
        packed = [
            jnp.where(in_early, later(first, h), only(early_mirrored, later(second, h)))
            for first, second in matrices
        ]
        first, second = zip(*(Pair.own(x) for x in passes.split(keys)))
        keys = tuple(weave(x, upside_down(y), h) for x, y in zip(first, second))
        return passes.dot(jnp.concatenate(packed), keys)

    @staticmethod
    def written(passes, turned, bk, q, h):
        _, in_late = tiles.halves_of_block(h)
        _, late_mirrored = mirror_of_halves(h)
        both = [
            jnp.where(in_late, earlier(dAqk, h), only(late_mirrored, earlier(dA, h)))
            for dAqk, dA in zip(*turned)
        ]
        queries = zip(passes.split(bk), passes.split(q))
        queries = tuple(weave(upside_down(x), y, h) for x, y in queries)
        products = passes.dot(jnp.concatenate(both), queries)
        return Pair.chosen(unstacked(products, Pair.MEMBERS))

    # ---------------------------------------------- levels within registers

    @staticmethod
    def further():
        return (columns(REGISTER) >> int32(6)) * int32(2)

    @staticmethod
    def in_one_register(packed):
        # Of the eight columns of a block two are asked for: the second member's go next
        # to the first one's (and in the last rows, into the block after it).
        first, second = packed
        here = ((columns(REGISTER) - rows(REGISTER) + int32(1)) & int32(7)) < 2
        return jnp.where(here, first, roll_lanes(second, 2))

    @staticmethod
    def keys_by_queries(passes, keys, queries, h):
        keys = tiles.choose_rows(h, roll_rows(keys, h), keys)
        early_row = (rows(keys.shape) & int32(h)) == 0
        keys = only(early_row == (columns(keys.shape) < HALF), keys)
        terms = passes.terms(keys, queries, transpose_b=True)
        # Packed before they are added: 15/16 of them are no pairs of this level.
        first, *others = (tiles.pack_blocks(x) for x in terms)
        pairs = sum(others, first)
        return [pairs, roll_rows(pairs, -h)]

    @staticmethod
    def read_in_registers(passes, pairs, keys, in_early, in_late, h):
        packed = tuple(tiles.beside(x, y, in_early, in_late, h) for x, y in zip(*pairs))
        first, second = Pair.own(keys)
        return passes.blocks_dot(packed, first + roll_rows(second, h))

    @staticmethod
    def written_in_registers(passes, pairs, queries, late_row, h):
        packed = tuple(
            jnp.where(late_row, roll_rows(y, h), x) for x, y in zip(*pairs)
        )
        written = passes.blocks_dot(packed, queries)
        return Pair.chosen([written, roll_rows(written, -h)])


def mirror_of_halves(h):
    """`tiles.halves_of_block` where columns are mirrored."""
    shift = int32(h.bit_length() - 1)
    block = rows((C // 2, C)) >> shift
    half = (columns((C // 2, C)) ^ int32(C - ROWS)) >> shift
    return half == 2 * block, half == 2 * block + 1
