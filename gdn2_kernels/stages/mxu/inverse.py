"""The inverse X^T = (I + A)^-T by doubling blocks, in halves that one alone leaves empty.

Every level of A, and with it every product of the inverse, fills half of a contraction.
At more than one pass of the matrix unit the products are what takes the time, and two
inverses share one (C, 128): those of two heads that stand side by side (a *slot*). One
alone fills the empty half with low parts (`One`), which saves fewer passes and loads
twice as many weights.

Zeros keep the two heads of a slot apart: numbers have to be finite. So two heads share
a slot only if they belong to the same sequence.
"""

from typing import NamedTuple

import jax.numpy as jnp

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.lanes import weights
from gdn2_kernels.stages.mxu.passes import woven_parts
from gdn2_kernels.stages.mxu.tiles import (
    REGISTER,
    ROWS,
    earlier,
    later,
    mirrored,
    upside_down,
    weave,
)
from gdn2_kernels.tile import int32, only


class One:
    """An inverse alone. A leaf, what is made on the vector unit, is X of all 8 x 8
    blocks, packed.
    """

    LEAF = 1  # registers
    LEVELS = (8, 16, 32, 64)  # of h < C, where products make blocks of 2h

    @staticmethod
    def start(leaves, C):
        ((X8,),) = leaves
        return tiles.unpack_blocks(X8, C)

    @staticmethod
    def doubled(passes, lanes, X, A, h):
        """Generator. The inverse of blocks of 2h, transposed, from blocks of h."""
        early, late = earlier(X, h), later(X, h)
        twice = weights(lanes, passes, woven_parts(passes, late, late, h))
        half = passes.packed_dot(A, twice)
        yield
        twice = weights(lanes, passes, woven_parts(passes, half, half, h))
        across = passes.packed_dot(passes.pack_whole(early, h), twice)
        return weave(early - across, late, h)

    @staticmethod
    def whole(X):
        """(C, 128) of each head, of what `doubled` returned last."""
        return [X]


class Two:
    """Two inverses in one (C, 128): the first on the diagonal, the second across, its
    columns mirrored (`tiles.mirrored`), so that at every level what has to share the
    contraction of a product finds its place without a rotation of lanes.

    A leaf is X of all 8 x 8 blocks, packed, and what lies between two of them: blocks of
    16 are made on the vector unit too.
    """

    LEAF = 2
    LEVELS = (16, 32, 64)

    @staticmethod
    def start(leaves, C):
        eight = tiles.token_of_lane(REGISTER, C) >> int32(3)
        sixteen = eight >> int32(1)
        # Registers are 8 rows: of a block of 16 the late one has its own 8 x 8 block, the
        # early one also what lies beside it.
        first, second = leaves
        late = first[0], mirrored(second[0], C)
        is_early = (eight & int32(1)) == 0
        first, second = (jnp.where(is_early, *leaf) for leaf in leaves)
        early = first, mirrored(second, C)

        def register(block, at, count, of_heads):
            first, second = of_heads
            return jnp.where(block == at, first, only(block == count - 1 - at, second))

        return jnp.concatenate([
            x
            for t in range(C // 16)
            for x in (
                register(sixteen, t, C // 16, early),
                register(eight, 2 * t + 1, C // ROWS, late),
            )
        ])

    @staticmethod
    def doubled(passes, lanes, X, A, h):
        early, late = earlier(X, h), later(X, h)
        _, in_late = tiles.halves_of_block(len(X), h)

        def parted(x, turn):  # rows of the first head, then of the second, woven
            first, second = only(in_late, x), only(~in_late, x)
            return lanes.weights(weave(first, turn(second), h))

        parts = passes.split(late)
        half = passes.dot(A, tuple(parted(x, lambda x: x) for x in parts))
        yield
        parts = passes.split(half)
        across = passes.dot(early, tuple(parted(x, upside_down) for x in parts))
        if 2 * h < len(X):
            return weave(early - across, late, h)
        # Here the two would meet: from now on each has its own.
        return [
            weave(only(mine, early) - only(~mine, across), only(~mine, late), h)
            for mine in (~in_late, in_late)
        ]

    @staticmethod
    def whole(X):
        first, second = X
        return [first, mirrored(second, len(second))]


class Slot(NamedTuple):
    """Heads whose inverses are made together, one or two."""

    heads: tuple
    kind: type  # One or Two

    @property
    def n(self):
        """Its place in scratch."""
        return self.heads[0].n

    def levels(self, C):
        """Of h, where products make blocks of 2h from blocks of h."""
        return [h for h in self.kind.LEVELS if h < C]

    def put_level(self, refs, head, h, pairs, passes):
        """Keep level h of A, pairs (C/2, 128): keys of earlier halves by queries of later
        ones, in the columns of the earlier half.
        """
        place = self.heads.index(head)
        if h not in self.kind.LEVELS:
            refs.leaves[self.n, place, 1] = tiles.pack_level(pairs)
            return
        in_early, in_late = tiles.halves_of_block(2 * len(pairs), h)
        at = (self.n, One.LEVELS.index(h))
        if self.kind is One:
            refs.A[at] = passes.pack(pairs, in_early, in_late, h)
        elif place == 0:
            refs.A[at] = only(in_early, pairs)
        else:
            refs.A[at] = tiles.beside(refs.A[at], pairs, in_early, in_late, h)

    def put_leaf(self, refs, head, A8):
        """Generator. Keep the head's leaf, from 8 x 8 blocks of A^T."""
        at = (self.n, self.heads.index(head))
        X8 = yield from tiles.inverse_of_blocks(A8)
        refs.leaves[(*at, 0)] = X8
        if self.kind is Two:
            beside = yield from tiles.doubled_blocks(X8, refs.leaves[(*at, 1)])
            refs.leaves[(*at, 1)] = beside

    def inverse(self, refs, passes):
        """Generator. X^T of each head (C, 128)."""
        C, parts = refs.X.shape[-2], range(self.kind.LEAF)
        leaves = [
            [refs.leaves[self.n, i, j] for j in parts] for i in range(len(self.heads))
        ]
        X = self.kind.start(leaves, C)
        yield
        for h in self.levels(C):
            A = refs.A[self.n, One.LEVELS.index(h)]
            X = yield from self.kind.doubled(passes, self.heads[0].lanes, X, A, h)
            yield
        return self.kind.whole(X)


def slots(heads, passes, alone):
    """The slots of a grid step, in the order of its heads. alone: no two heads in one."""
    found, heads = [], list(heads)
    while heads:
        head, *rest = heads
        same_sequence = rest and rest[0].at[0] == head.at[0]
        if same_sequence and not alone and not passes.single:
            together, kind = (head, rest[0]), Two
        else:
            together, kind = (head,), One
        found.append(Slot(together, kind))
        heads = heads[len(together) :]
    return found
