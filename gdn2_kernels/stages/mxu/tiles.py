"""Arrangements in vector registers, which hold 8 rows of 128 lanes.

Three forms of the rows of a chunk, at a level h of the tree: all of them; the earlier or
the later half of every block of 2h (`earlier`, `later`, undone by `weave`), which moves
nothing when h >= 8; within registers, for h < 8, by rotating the rows of each register.

A matrix of pairs of tokens, (C, 128), is (C, C) of one head, or (C, C) each of 128/C heads
side by side in the lanes: its *members*. Where only the 8 x 8 blocks on the diagonals of
its members matter, it is packed into one register: the blocks of rows 8t .. 8t+7 in the
lanes that they have anyway.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.tile import columns, int32, only, rows

ROWS = 8  # of a register
LANES = 128
REGISTER = (ROWS, LANES)


def earlier(x, h):
    """Earlier halves of all blocks of 2h rows, one after another."""
    n, D = x.shape
    return x.reshape(n // (2 * h), 2, h, D)[:, 0].reshape(n // 2, D)


def later(x, h):
    n, D = x.shape
    return x.reshape(n // (2 * h), 2, h, D)[:, 1].reshape(n // 2, D)


def weave(early, late, h):
    """Inverse of `earlier` and `later`."""
    n, D = early.shape
    halves = [x.reshape(n // h, h, D) for x in (early, late)]
    return jnp.stack(halves, 1).reshape(2 * n, D)


def registers(x):
    """(C, D) as (C/8, 8, D)."""
    return x.reshape(-1, ROWS, x.shape[-1])


def matrix(x):
    """Inverse of `registers`."""
    return x.reshape(-1, x.shape[-1])


def roll_lanes(x, by):
    """Column c holds column c - by, around the end."""
    return pltpu.roll(x, int32(by % x.shape[1]), 1)


def roll_rows(x, by):
    """Within every register, row r holds row r - by. Takes and gives (C, D)."""
    return matrix(pltpu.roll(registers(x), int32(by % ROWS), 1))


def row_of_register(x):
    """The row within its register of each element, for x (n, 8, D)."""
    # All three axes: under x64 a mask is not broadcast by every JAX.
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def in_later_rows(x, h):
    """Rows of registers (n, 8, D) in the later half of their block of 2h, h < 8."""
    return (row_of_register(x) & int32(h)) != 0


def choose_rows(h, late, early):
    """Later rows of one, earlier rows of the other, h < 8; (C, D)."""
    late, early = registers(late), registers(early)
    return matrix(jnp.where(in_later_rows(late, h), late, early))


def token_of_lane(shape, C):
    """The column of each element within its member."""
    return columns(shape) & int32(C - 1)


def halves_of_block(C, h):
    """Masks (C/2, 128), rows as `earlier` or `later` leave them: the columns of the
    earlier and of the later half of a row's block of 2h.
    """
    shape = (C // 2, LANES)
    shift = int32(h.bit_length() - 1)  # not //, which asks what chip it is for
    block = rows(shape) >> shift
    half = token_of_lane(shape, C) >> shift
    return half == 2 * block, half == 2 * block + 1


def beside(first, second, in_early, in_late, h):
    """Early columns of one, and in the late ones those of the other."""
    return jnp.where(in_early, first, only(in_late, roll_lanes(second, h)))


def upside_down(x):
    """Registers (rows of eight) in reverse order."""
    starts = reversed(range(0, len(x), ROWS))
    return jnp.concatenate([x[i : i + ROWS] for i in starts])


def mirrored(x, C):
    """(R, 128) with the groups of eight columns of each member in reverse order."""
    lanes = columns(REGISTER) ^ int32(C - ROWS)
    starts = range(0, len(x), ROWS)
    return jnp.concatenate([lane_gather(x[i : i + ROWS], lanes) for i in starts])


# ------------------------------------------------------ 8 x 8 blocks in one register


def _merge(tiles, bit=ROWS):
    """(8, 128) whose lanes 8t .. 8t+7 (of each member) come from the t-th register; with
    `bit` 16, lanes 16t .. 16t+15.
    """
    lane = columns(REGISTER)
    while len(tiles) > 1:
        odd = (lane & int32(bit)) != 0
        tiles = [jnp.where(odd, b, a) for a, b in zip(tiles[::2], tiles[1::2])]
        bit *= 2
    return tiles[0]


def pack_blocks(x):
    """(C, 128) -> (8, 128): blocks on the diagonal."""
    return _merge([x[i : i + ROWS] for i in range(0, len(x), ROWS)])


def pack_level(x):
    """(C/2, 128), level h = 8: the block of each register in lanes 16t .. 16t+7."""
    starts = range(0, len(x), ROWS)
    return _merge([x[i : i + ROWS] for i in starts], bit=2 * ROWS)


def unpack_blocks(packed, C):
    """(8, 128) -> (C, 128), zeros outside the blocks."""
    block = token_of_lane(REGISTER, C) >> int32(3)
    return jnp.concatenate([only(block == t, packed) for t in range(C // ROWS)])


def pack_row_sums(of_members, chosen):
    """(C, D) of each member -> (8, 128): sum over row r of register t in lanes
    8t .. 8t+7 of row r. chosen: of registers, one for each member, the lanes of each.
    """
    sums = [jnp.sum(x, 1, keepdims=True) for x in of_members]
    starts = range(0, len(of_members[0]), ROWS)
    return _merge([
        chosen([jnp.broadcast_to(s[i : i + ROWS], REGISTER) for s in sums])
        for i in starts
    ])


def halves_twice(packed):
    """Of 16 blocks the first eight in the left and in the right half of the lanes, and
    the last eight.
    """
    lane = columns(REGISTER)
    turned = roll_lanes(packed, 64)
    return jnp.where(lane < 64, packed, turned), jnp.where(lane < 64, turned, packed)


def lane_gather(x, lanes):
    """Column c holds column lanes[c] of its row."""
    # jnp.take_along_axis would make the lanes 64 bits wide under x64.
    along_lanes = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return lax.gather(
        x, lanes[..., None], along_lanes, slice_sizes=(1, 1),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )  # fmt: skip


def in_block(j):
    """Lanes: of every lane the j-th of its group of eight."""
    return (columns(REGISTER) & int32(~7)) | int32(j)


def inverse_of_blocks(packed):
    """Generator. (I + A)^-1 transposed of 8 x 8 blocks, A^T strictly above their
    diagonals, packed: by substitution, on the vector unit. Yields after each gather, so
    that heads side by side share its pattern, which costs more than the gather.
    """
    X = (rows(REGISTER) == (columns(REGISTER) & int32(7))).astype(jnp.float32)
    for j in range(ROWS - 1, 0, -1):
        X = X - lane_gather(packed, in_block(j)) * X[j : j + 1]
        yield
    return X


def doubled_blocks(X, A):
    """Generator. What lies beside the early one of two 8 x 8 blocks of X^T, -X_early A
    X_late, where the late one has its columns. A: as `pack_level` leaves it. Yields as
    `inverse_of_blocks`.
    """
    late = roll_lanes(X, -ROWS)  # columns of the early block from here on
    half, across = jnp.zeros_like(X), jnp.zeros_like(X)
    for j in range(ROWS):
        half = half + lane_gather(A, in_block(j)) * late[j : j + 1]
        yield
    for j in range(ROWS):
        across = across - lane_gather(X, in_block(j)) * half[j : j + 1]
        yield
    return roll_lanes(across, ROWS)
