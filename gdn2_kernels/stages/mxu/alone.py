"""What depends on who has the 128 lanes of a register: here one head, of 128 channels or
more. `Pair` has the same methods for two heads of 64 channels.

Most of the kernels does not ask. What is done channel by channel is the same whose ever
the channel is, and through the state a pair is one head of 128 channels. Only pairs of
tokens, (C, C), belong to one head, a *member* of the group: they come in lists, here of
one.
"""

import jax.numpy as jnp

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.passes import woven_parts
from gdn2_kernels.stages.mxu.tiles import earlier, later, roll_lanes, roll_rows
from gdn2_kernels.tile import int32, only


class Alone:
    """One head."""

    MEMBERS = 1

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

    # ---------------------------------------------- levels of h >= 8

    @staticmethod
    def each_level(passes, load):
        """load(): (C, C) of each member, for dAqk and dA. Returns a function that gives
        `read` what it takes.
        """
        matrices = [[passes.split(x) for x in members] for members in load()]
        return lambda: matrices

    @staticmethod
    def turned(i, member, x):
        """dAqk or dA (i = 0, 1) of a member transposed, as `written` takes it."""
        return x.T

    @staticmethod
    def pack_blocks(i, member, x, turned=False):
        """8 x 8 blocks on the diagonal of what `pairs_by_values` or `turned` returned."""
        return tiles.pack_blocks(x)

    @staticmethod
    def read(passes, matrices, keys, h):
        """Later rows of dAqk, then of dA, by keys (C/2, D) of earlier ones."""
        halves = tiles.halves_of_block(h)
        packed = [
            passes.pack_parts([later(x, h) for x in parts], *halves, h)
            for (parts,) in matrices
        ]
        keys = woven_parts(passes, keys, keys, h)
        return passes.packed_dot(jnp.concatenate(packed), keys)

    @staticmethod
    def written(passes, turned, bk, q, h):
        """dAqk^T by q and dA^T by bk, (C/2, D) of later rows: gradients of earlier keys."""
        (dAqk,), (dA,) = turned
        in_early, in_late = tiles.halves_of_block(h)
        # Rows: keys. Columns: queries, q in the later half, b*k moved to the earlier one.
        moved = only(in_early, roll_lanes(earlier(dA, h), -h))
        both = jnp.where(in_late, earlier(dAqk, h), moved)
        return passes.dot(both, woven_parts(passes, bk, q, h))

    # ---------------------------------------------- levels within registers

    @staticmethod
    def in_one_register(packed):
        """Of 8 x 8 blocks (packed, of each member), the diagonal and what is before it."""
        return packed[0]

    @staticmethod
    def further():
        """How much further right `in_one_register` has that of the member of a lane."""
        return int32(0)

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
