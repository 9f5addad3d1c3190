"""The tree of decays of a chunk, a level at a time, on registers.

P: product of a from the start of a row's block through the row. U: product over the rows
after it, to the end of its block. Blocks have one row at first (P = a, U = 1).
"""

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from gdn2_kernels.stages.mxu.plain import SUMMED, sums_in_blocks
from gdn2_kernels.stages.mxu.tiles import (
    earlier,
    in_later_rows,
    later,
    matrix,
    registers,
    row_of_register,
    weave,
)  # fmt: skip
from gdn2_kernels.tile import int32, only


def first_doubling(a):
    """P, U of blocks of two rows."""
    x = registers(a)
    late = in_later_rows(x, 1)
    before, after = pltpu.roll(x, int32(1), 1), pltpu.roll(x, int32(7), 1)
    return matrix(jnp.where(late, x * before, x)), matrix(only(~late, after, 1))


def doubling_in_registers(P, U, h):
    """P, U of blocks of 2h from those of h = 2 or 4: the products of whole halves are
    rows of P, broadcast to the rows they meet.
    """
    x, u = registers(P), registers(U)
    late = in_later_rows(x, h)
    if h == 2:
        first = row_of_register(x) < 4
        of_earlier = jnp.where(first, x[:, 1:2], x[:, 5:6])
        of_later = jnp.where(first, x[:, 3:4], x[:, 7:8])
    else:
        of_earlier, of_later = x[:, 3:4], x[:, 7:8]
    return matrix(jnp.where(late, x * of_earlier, x)), matrix(
        jnp.where(late, u, u * of_later)
    )


def from_sums(g):
    """P, U of blocks of a register as exponentials of sums of g: where every digit
    counts, see `plain.level_factors`.
    """
    up_to, after, _ = sums_in_blocks(g, SUMMED)
    return jnp.exp(up_to), jnp.exp(after)


def doubling(P, U, h):
    """P, U of blocks of 2h from those of h >= 8: whole registers times one row."""
    D = P.shape[-1]
    blocks = lambda x: x.reshape(-1, h, D)  # noqa: E731
    P0, P1, U0, U1 = (blocks(f(x, h)) for x in (P, U) for f in (earlier, later))
    P1_new, U0_new = P1 * P0[:, h - 1 :], U0 * P1[:, h - 1 :]
    return weave(matrix(P0), matrix(P1_new), h), weave(matrix(U0_new), matrix(U1), h)
