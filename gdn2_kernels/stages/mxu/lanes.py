"""Who has the 128 lanes of a register: one head (of 128 channels or more), or a pair of
heads of 64 channels, side by side as they lie in memory.

For the pair most of the kernels stays as it is. What is done channel by channel does not
ask whose channel it is. Through the state it is one head of 128 channels whose states
(V, K) have zeros outside two blocks on the diagonal. Only the pairs of tokens, (C, C),
are of one head, a *member*, each. This file is where the two cases differ:

- a product over channels gets the lanes of one member and zeros, for each member;
- a product that gives channels is made for each member, and lanes are chosen;
- of transposed operands a member has half the rows;
- where one head leaves half of a product empty, in every level of the tree and of the
  inverse, and fills it with low parts at most, a pair has its other member there.
"""

import jax.numpy as jnp
import numpy as np

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.passes import woven_parts
from gdn2_kernels.stages.mxu.tiles import (
    REGISTER,
    ROWS,
    C,
    earlier,
    later,
    roll_lanes,
    roll_rows,
    weave,
)
from gdn2_kernels.tile import columns, only, rows

HALF = 64  # lanes, channels of a head of a pair


class Alone:
    """One head. `pairs`, `X` and so on are lists, of one for each member."""

    members = 1

    @staticmethod
    def own(x):
        """x with the lanes of each member, zero elsewhere."""
        return [x]

    @staticmethod
    def chosen(parts):
        """(R, D) with the lanes of each member from what was made for it."""
        return parts[0]

    @staticmethod
    def on_diagonal(state):
        """A product (V, K), without what would mix members."""
        return state

    @staticmethod
    def values_by(passes, values, squares):
        """values (V, C), or their parts, by the (C, C) of each member."""
        return passes.dot(values, squares[0])

    @staticmethod
    def pairs_by_values(passes, x, values):
        """x (R, V) by values (V, C): a product (R, C) for each member."""
        return [passes.dot(x, values)]

    # -------------------------------------------------- levels of h >= 8

    @staticmethod
    def level_of_inverse(passes, pairs, in_early, in_late, h):
        """What `doubled` needs of a level of A^T: pairs (C/2, C), `in_early` of them."""
        return passes.pack(pairs[0], in_early, in_late, h)

    @staticmethod
    def inverse_of_blocks(packed):
        """What `doubled` starts from: blocks of 8 x 8, packed, of each member."""
        return tiles.unpack_blocks(packed[0])

    @staticmethod
    def doubled(passes, X, A, h):
        """Generator. The inverse of blocks of 2h, transposed, from blocks of h."""
        early, late = earlier(X, h), later(X, h)
        twice = woven_parts(passes, late, late, h)
        half = passes.packed_dot(A, twice)
        yield
        twice = woven_parts(passes, half, half, h)
        across = passes.packed_dot(passes.pack_whole(early, h), twice)
        return weave(early - across, late, h)

    @staticmethod
    def whole_inverse(X):
        """(C, C) of each member, of what `doubled` returned last."""
        return [X]

    @staticmethod
    def read(passes, pairs, keys, in_early, in_late, h):
        """Rows of each matrix of `pairs` by keys (C/2, D): gradients of queries.

        pairs: for each matrix, by member, parts (C/2, C), the keys in their early
          columns.
        """
        packed = [passes.pack_parts(x, in_early, in_late, h) for (x,) in pairs]
        keys = woven_parts(passes, keys, keys, h)
        return passes.packed_dot(jnp.concatenate(packed), keys)

    # -------------------------------------------------- levels within registers

    @staticmethod
    def keys_by_queries(passes, keys, queries, h):
        """Pairs [key, query] of earlier keys, packed, of each member."""
        if passes.packs:  # later rows are free: low parts of the keys go there
            high, low = passes.split(keys)
            keys = tiles.choose_rows(h, roll_rows(low, h), high)
        products = [
            passes.product(keys, x, transpose_b=True) for x in passes.split(queries)
        ]
        pairs = tiles.pack_blocks(sum(products[1:], products[0]))
        return [pairs + roll_rows(pairs, -h) if passes.packs else pairs]

    @staticmethod
    def read_in_registers(passes, pairs, keys, in_early, in_late, h):
        """Packed blocks (parts, of each member) by keys, zero in later rows."""
        packed = passes.pack_parts(pairs[0], in_early, in_late, h)
        keys = keys + roll_rows(keys, h) if passes.packs else keys
        return passes.blocks_dot(packed, keys)

    @staticmethod
    def written_in_registers(passes, pairs, queries, late_row, h):
        """Packed blocks (parts, of each member) by queries: right in earlier rows."""
        packed = passes.stack_parts(pairs[0], late_row, h)
        written = passes.blocks_dot(packed, queries)
        return written + roll_rows(written, -h) if passes.packs else written


class Pair:
    """Two heads of 64 channels. Methods as those of `Alone`."""

    members = 2

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
        first = columns(x.shape) < HALF
        x, values = passes.split(x), passes.split(values)
        products = []
        for at, here in (first, slice(0, HALF)), (~first, slice(HALF, None)):
            twice = tuple(jnp.concatenate([part[here]] * 2) for part in values)
            packed = passes.pack_parts(x, at, ~at, HALF)
            products.append(passes.packed_dot(packed, twice))
        return products

    # -------------------------------------------------- levels of h >= 8
    #
    # Columns of the second member's inverse stand mirrored, in registers' widths: 8t ..
    # 8t+7 at 120 - 8t. So earlier halves are later ones at every level, and while blocks
    # grow both inverses share one (C, C), the first on the diagonal, the second across.

    @staticmethod
    def level_of_inverse(passes, pairs, in_early, in_late, h):
        first, second = pairs
        return jnp.where(in_early, first, only(in_late, roll_lanes(second, h)))

    @staticmethod
    def inverse_of_blocks(packed):
        first, second = packed
        second = mirrored(second)
        block = columns(REGISTER) >> np.int32(3)
        last = C // ROWS - 1
        return jnp.concatenate([
            jnp.where(block == t, first, only(block == last - t, second))
            for t in range(last + 1)
        ])  # fmt: skip

    @staticmethod
    def doubled(passes, X, A, h):
        early, late = earlier(X, h), later(X, h)
        _, in_late = tiles.halves_of_block(h)
        members = woven_parts(passes, only(in_late, late), only(~in_late, late), h)
        half = passes.dot(A, members)
        yield
        second = only(~in_late, half).reshape(-1, ROWS, C)
        second = jnp.concatenate([second[t] for t in reversed(range(len(second)))])
        members = woven_parts(passes, only(in_late, half), second, h)
        across = passes.dot(early, members)
        if 2 * h < C:
            return weave(early - across, late, h)
        # Here the two would meet: from now on each has its own.
        return [
            weave(only(mine, early) - only(~mine, across), only(~mine, late), h)
            for mine in (~in_late, in_late)
        ]

    @staticmethod
    def whole_inverse(X):
        first, second = X
        return [first, jnp.concatenate([
            mirrored(second[i : i + ROWS]) for i in range(0, C, ROWS)
        ])]  # fmt: skip

    @staticmethod
    def read(passes, pairs, keys, in_early, in_late, h):
        packed = [
            [
                jnp.where(in_early, x, only(in_late, roll_lanes(y, h)))
                for x, y in zip(first, second)
            ]
            for first, second in pairs
        ]
        packed = tuple(jnp.concatenate(part) for part in zip(*packed))
        return passes.dot(packed, woven_parts(passes, *Pair.own(keys), h))

    # -------------------------------------------------- levels within registers

    @staticmethod
    def keys_by_queries(passes, keys, queries, h):
        first, second = Pair.own(keys)
        keys = tiles.choose_rows(h, roll_rows(second, h), first)
        pairs = tiles.pack_blocks(passes.dot(keys, queries, transpose_b=True))
        return [pairs, roll_rows(pairs, -h)]

    @staticmethod
    def read_in_registers(passes, pairs, keys, in_early, in_late, h):
        packed = tuple(
            jnp.where(in_early, x, only(in_late, roll_lanes(y, h)))
            for x, y in zip(*pairs)
        )
        first, second = Pair.own(keys)
        return passes.blocks_dot(packed, first + roll_rows(second, h))

    @staticmethod
    def written_in_registers(passes, pairs, queries, late_row, h):
        packed = tuple(
            jnp.where(late_row, roll_rows(y, h), x) for x, y in zip(*pairs)
        )
        written = passes.blocks_dot(packed, queries)
        return Pair.chosen([written, roll_rows(written, -h)])


def mirrored(x):
    """(8, C) with its groups of eight columns in reverse order."""
    return tiles.lane_gather(x, columns(REGISTER) ^ np.int32(C - ROWS))


def sharing(members):
    """Alone or Pair."""
    return {1: Alone, 2: Pair}[members]


def unstacked(x, members):
    """Rows for each member, one after the other."""
    n = x.shape[0] // members
    return [x[i * n : (i + 1) * n] for i in range(members)]
