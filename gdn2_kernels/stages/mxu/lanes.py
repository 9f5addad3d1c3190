"""Who has the 128 lanes of a register: one head of 128 channels or more and chunks of 128
tokens, or two heads of 64 channels, the *members* of a pair, and chunks of 64 tokens.

Most of the kernels does not ask. What is done channel by channel is the same whose ever
the channel is. Tokens of a pair lie side by side in memory, (C, 2*64), and everything
else a kernel holds of a pair has that shape as well:

- pairs of tokens (C, 2*C), values turned over (V, 2*C), states (V, 2*K): a member has 64
  of the lanes;
- in a product, one operand streams past weights. The one that streams is taken as it is;
  of the weights one member has the upper left quarter, the other the lower right one, and
  zeros keep them apart. So a product has as many rows, and fills the matrix unit as well,
  as that of one head.

Because of those zeros numbers have to be finite, or what is not reaches the neighbour.
"""

import jax.numpy as jnp

from gdn2_kernels.stages.mxu import tiles
from gdn2_kernels.stages.mxu.passes import parts
from gdn2_kernels.stages.mxu.tiles import LANES
from gdn2_kernels.tile import columns, int32, only, rows

HALF = LANES // 2  # lanes of a member


class Alone:
    """One head."""

    MEMBERS = 1

    @staticmethod
    def own(x):
        """x with the lanes of each member, zero elsewhere."""
        return [x]

    @staticmethod
    def chosen(parts):
        """With the lanes of each member from what was made for it."""
        return parts[0]

    @staticmethod
    def weights(x):
        """x as the right operand of a product."""
        return x

    @staticmethod
    def turned(x):
        """Each member transposed."""
        return x.T

    @staticmethod
    def first_lane():
        """Of the member a lane belongs to."""
        return int32(0)

    @staticmethod
    def small_blocks_dot(product, packed, parts):
        """8 x 8 blocks, packed, by the sum of the parts (C, D): 64 tokens to a product,
        whose contraction holds the high and the low part of them.
        """
        return jnp.concatenate([
            product(
                tiles.unpack_blocks(half, HALF),
                jnp.concatenate([x[start : start + HALF] for x in parts]),
            )
            for half, start in zip(tiles.halves_twice(packed), (0, HALF))
        ])


class Pair:
    """Two heads of 64 channels. Methods as those of `Alone`."""

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
    def weights(x):
        return jnp.concatenate(Pair.own(x))

    @staticmethod
    def turned(x):
        both = jnp.concatenate([x, x]).T
        return Pair.chosen([both[:HALF], both[HALF:]])

    @staticmethod
    def first_lane():
        return columns(tiles.REGISTER) & int32(HALF)

    @staticmethod
    def small_blocks_dot(product, packed, parts):
        halves = tiles.halves_twice(packed)
        left = jnp.concatenate([tiles.unpack_blocks(x, HALF) for x in halves])
        both = product(left, jnp.concatenate(parts))
        return Pair.chosen([both[:HALF], both[HALF:]])


def weights(lanes, passes, x):
    """The parts of x, or parts, as the right operand of a product."""
    return tuple(lanes.weights(part) for part in parts(passes, x))


def is_brief(lanes, passes):
    """Is the head a pair at one pass? Then its phases are short, the matrix unit has time,
    and the cross-lane unit has none: it turns twice as many matrices for each token as of
    one head, and sums every row twice.
    """
    return passes.single and lanes is Pair


def turned_operand(lanes, passes, x):
    """x turned (`lanes.turned`), for use as an operand of products."""
    if not is_brief(lanes, passes):
        return lanes.turned(x)
    # By a product with ones: exact, for an operand of one pass is rounded anyway.
    token = tiles.token_of_lane((HALF, LANES), HALF)
    ones = (rows(token.shape) == token).astype(jnp.float32)
    return passes.product(ones, lanes.weights(x), transpose_b=True)
