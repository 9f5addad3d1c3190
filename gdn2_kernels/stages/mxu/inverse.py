"""The inverse X^T = (I + A)^-T by doubling blocks, in halves that one alone leaves empty.

Every level of A, and with it every product of the inverse, fills half of a contraction.
At more than one pass of the matrix unit the products are what takes the time, and two
inverses share one (C, C): the two of a pair (`Pair`), or those of two heads that stand
side by side (a *slot*, of two members). One alone fills the empty half with low parts
(`One`), which saves fewer passes and loads twice as many weights.

Zeros keep the two members of a slot apart: numbers have to be finite. So two heads share
a slot only if they belong to the same sequence.
"""

from typing import NamedTuple

import jax.numpy as jnp

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.passes import woven_parts
from gdn2_kernels.stages.mxu.tiles import (
    REGISTER,
    ROWS,
    C,
    earlier,
    later,
    mirrored,
    upside_down,
    weave,
)
from gdn2_kernels.tile import columns, int32, only


class One:
    """An inverse alone. A leaf, what is made on the vector unit, is X of all 8 x 8
    blocks, packed.
    """

    LEAF = 1  # registers
    LEVELS = (8, 16, 32, 64)  # of h, where products make blocks of 2h from blocks of h

    @staticmethod
    def start(leaves):
        ((X8,),) = leaves
        return tiles.unpack_blocks(X8)

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
    def whole(X):
        """(C, C) of each member, of what `doubled` returned last."""
        return [X]


class Two:
    """Two inverses in one (C, C): the first on the diagonal, the second across, its
    columns mirrored (`tiles.mirrored`), so that at every level what has to share the
    contraction of a product finds its place without a rotation of lanes.

    A leaf is X of all 8 x 8 blocks, packed, and what lies between two of them: blocks of
    16 are made on the vector unit too.
    """

    LEAF = 2
    LEVELS = (16, 32, 64)

    @staticmethod
    def start(leaves):
        eight = columns(REGISTER) >> int32(3)
        sixteen = eight >> int32(1)
        # Registers are 8 rows: of a block of 16 the late one has its own 8 x 8 block, the
        # early one also what lies beside it.
        first, second = leaves
        late = first[0], mirrored(second[0])
        is_early = (eight & int32(1)) == 0
        first, second = (jnp.where(is_early, *leaf) for leaf in leaves)
        early = first, mirrored(second)

        def register(block, at, count, members):
            first, second = members
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
    def doubled(passes, X, A, h):
        early, late = earlier(X, h), later(X, h)
        _, in_late = tiles.halves_of_block(h)

        def parted(x, turn):  # rows of the first member, then of the second, woven
            first, second = only(in_late, x), only(~in_late, x)
            return weave(first, turn(second), h)

        parts = passes.split(late)
        half = passes.dot(A, tuple(parted(x, lambda x: x) for x in parts))
        yield
        parts = passes.split(half)
        across = passes.dot(early, tuple(parted(x, upside_down) for x in parts))
        if 2 * h < C:
            return weave(early - across, late, h)
        # Here the two would meet: from now on each has its own.
        return [
            weave(only(mine, early) - only(~mine, across), only(~mine, late), h)
            for mine in (~in_late, in_late)
        ]

    @staticmethod
    def whole(X):
        first, second = X
        return [first, mirrored(second)]


class Slot(NamedTuple):
    """Members whose inverses are made together: of one head, or of two."""

    heads: tuple
    kind: type  # One or Two

    @property
    def n(self):
        """Its place in scratch."""
        return self.heads[0].n

    def place(self, head):
        """Of the head's first member among those of the slot."""
        return 0 if head is self.heads[0] else 1

    def squares(self, ref):
        """As `Head.squares`, of all members."""
        return [at for head in self.heads for at in head.squares(ref)]

    def put_level(self, refs, head, h, pairs, passes):
        """Keep level h of A, pairs (C/2, C) of each member: keys of earlier halves by
        queries of later ones, in the columns of the earlier half.
        """
        if h not in self.kind.LEVELS:
            for i, x in enumerate(pairs, self.place(head)):
                refs.leaves[self.n, i, 1] = tiles.pack_level(x)
            return
        in_early, in_late = tiles.halves_of_block(h)
        at = (self.n, One.LEVELS.index(h))
        if self.kind is One:
            refs.A[at] = passes.pack(pairs[0], in_early, in_late, h)
            return
        if self.place(head) == 0:
            refs.A[at] = only(in_early, pairs[0])
        if self.place(head) == 1 or len(pairs) == 2:
            refs.A[at] = tiles.beside(refs.A[at], pairs[-1], in_early, in_late, h)

    def put_leaf(self, refs, head, i, A8):
        """Generator. Keep the leaf of the head's member i, from 8 x 8 blocks of A^T."""
        at = (self.n, self.place(head) + i)
        X8 = yield from tiles.inverse_of_blocks(A8)
        refs.leaves[(*at, 0)] = X8
        if self.kind is Two:
            beside = yield from tiles.doubled_blocks(X8, refs.leaves[(*at, 1)])
            refs.leaves[(*at, 1)] = beside

    def inverse(self, refs, passes):
        """Generator. X^T of each member (C, C)."""
        members, parts = range(len(self.squares(refs.X))), range(self.kind.LEAF)
        leaves = [[refs.leaves[self.n, i, j] for j in parts] for i in members]
        X = self.kind.start(leaves)
        yield
        for h in self.kind.LEVELS:
            A = refs.A[self.n, One.LEVELS.index(h)]
            X = yield from self.kind.doubled(passes, X, A, h)
            yield
        return self.kind.whole(X)


def slots(heads, passes, alone):
    """The slots of a grid step, in the order of its heads. alone: no two heads in one."""
    found, heads = [], list(heads)
    while heads:
        head, *rest = heads
        same_sequence = rest and rest[0].at[0] == head.at[0]
        if head.lanes.MEMBERS == 2:
            together, kind = (head,), Two
        elif same_sequence and not alone and not passes.single:
            together, kind = (head, rest[0]), Two
        else:
            together, kind = (head,), One
        found.append(Slot(together, kind))
        heads = heads[len(together) :]
    return found
