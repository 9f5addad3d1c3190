"""Matrix products of the fast kernels in one, three or six passes of the matrix unit.

At "high" a float32 number is a high and a low bfloat16 part. Where the contraction of a
product is half empty, as in every level of the tree, the low parts of the left operand
fit into the empty half: two passes do the work of three (four, in fact).

`tile.dot` is the same arithmetic without these arrangements.
"""

import functools

import jax.numpy as jnp

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.tiles import roll_lanes, roll_rows
from gdn2_kernels.tile import exact, high_part, one_pass, only


class Unsplit:
    """Operands as they are: one pass, or exact float32."""

    packs = False

    def __init__(self, product):
        self.product = product
        self.exact = product is exact
        self.single = product is one_pass

    @staticmethod
    def split(x):
        return (x,)

    def dot(self, a, b, transpose_b=False):
        """a @ b, or a @ b^T; operands may come as their parts."""
        (term,) = self.terms(a, b, transpose_b)
        return term

    def terms(self, a, b, transpose_b=False):
        """Matrices that `dot` is the sum of."""
        (a,), (b,) = parts(self, a), parts(self, b)
        return [self.product(a, b, transpose_b=transpose_b)]

    def packed_dot(self, packed, b):
        return self.product(packed, b[0])

    @staticmethod
    def pack(x, at, low_at, by):
        return only(at, x)

    @staticmethod
    def pack_parts(x, at, low_at, by):
        return only(at, x[0])

    @staticmethod
    def pack_whole(x, by):
        return x

    @staticmethod
    def stack_parts(x, late_row, by):
        return only(~late_row, x[0])

    def blocks_dot(self, packed, b, lanes):
        """8 x 8 blocks on the diagonal, packed, by b (C, D)."""
        blocks = tiles.unpack_blocks(packed, len(b))
        return self.product(blocks, lanes.weights(b))


class Split:
    """Three passes: high x high, high x low and low x high."""

    packs = True
    exact = False
    single = False
    product = staticmethod(one_pass)

    @staticmethod
    def split(x):
        high = high_part(x)
        return high, x - high

    def dot(self, a, b, transpose_b=False):
        """a @ b, or a @ b^T; operands may come as their parts."""
        high, *low = self.terms(a, b, transpose_b)
        return high + (low[0] + low[1])

    def terms(self, a, b, transpose_b=False):
        """Matrices that `dot` is the sum of: of high parts, and two with a low one."""
        (a_high, a_low), (b_high, b_low) = parts(self, a), parts(self, b)
        product = functools.partial(one_pass, transpose_b=transpose_b)
        rows = a_high.shape[0]
        if rows > 128:
            high = product(a_high, b_high)
            return high, product(a_high, b_low), product(a_low, b_high)
        # b_high is loaded into the unit once for both parts of a.
        by_high = product(jnp.concatenate([a_high, a_low]), b_high)
        return by_high[:rows], by_high[rows:], product(a_high, b_low)

    @staticmethod
    def packed_dot(packed, b):
        """Product of what `pack` made with the parts of b, whose rows stand twice."""
        return one_pass(packed, b[0]) + one_pass(packed, b[1])

    @staticmethod
    def pack(x, at, low_at, by):
        """The high part of x where `at`, its low part `by` lanes on, where `low_at`."""
        return Split.pack_parts(Split.split(x), at, low_at, by)

    @staticmethod
    def pack_parts(x, at, low_at, by):
        high, low = x
        return jnp.where(at, high, only(low_at, roll_lanes(low, by)))

    @staticmethod
    def pack_whole(x, by):
        """The same where x is zero outside its place anyway."""
        high = high_part(x)
        return high + roll_lanes(x - high, by)

    @staticmethod
    def stack_parts(x, late_row, by):
        high, low = x
        return jnp.where(late_row, roll_rows(low, by), high)

    @staticmethod
    def blocks_dot(packed, b, lanes):
        """8 x 8 blocks on the diagonal by b (C, D), as `stack_parts` or `pack_parts` made
        them.
        """
        return lanes.small_blocks_dot(one_pass, packed, Split.split(b))


def parts(passes, x):
    return x if isinstance(x, tuple) else passes.split(x)


def woven_parts(passes, early, late, h):
    """The parts of two operands (C/2, D), each pair as one of all rows."""
    halves = zip(passes.split(early), passes.split(late))
    return tuple(tiles.weave(x, y, h) for x, y in halves)


PASSES = {"default": Unsplit(one_pass), "high": Split(), "highest": Unsplit(exact)}
