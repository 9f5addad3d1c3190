"""The heads of a grid step: blocks hold some of the batch and some of the heads."""

from typing import NamedTuple

import numpy as np
from jax.experimental import pallas as pl

from gdn2_kernels.tile import f32


class Head(NamedTuple):
    n: int  # among those of the grid step
    at: tuple  # (batch, head) within the blocks


def heads_of(states):
    """All heads of a block of states (batch, heads, V, K)."""
    batch, heads = states.shape[:2]
    return [Head(i * heads + j, (i, j)) for i in range(batch) for j in range(heads)]


def read(tokens, head, D, rows=slice(None)):
    """Channels of one head out of a block (batch, C, heads*D), as float32."""
    i, j = head.at
    return f32(tokens[i, rows, j * D : (j + 1) * D])


def write(tokens, head, x, rows=slice(None)):
    i, j = head.at
    D = x.shape[-1]
    tokens[i, rows, j * D : (j + 1) * D] = x.astype(tokens.dtype)


def spread(steps, count, others):
    """Run `count` steps with functions `others` called evenly between them."""
    done = 0
    for i in range(count):
        next(steps)
        while (done + 0.5) * count < (i + 1) * len(others):
            others[done]()
            done += 1


def phase(number):
    """A condition that always holds makes its body a block of its own: the compiler does
    not keep values of one phase in registers for the next, which would spill them.
    """
    # Different for each phase, or neighbours would be merged.
    return pl.when(pl.program_id(2) > np.int32(-1 - number))
