"""The heads of a grid step: blocks hold some of the batch and some of the heads."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


class Head(NamedTuple):
    n: int  # among those of the grid step
    at: tuple  # (batch, head) within the blocks


def heads_of(states):
    """All heads of a block of states (batch, heads, V, K)."""
    batch, heads = states.shape[:2]
    return [Head(i * heads + j, (i, j)) for i in range(batch) for j in range(heads)]


def read(tokens, head, D, rows=slice(None)):
    """Channels of one head out of a block (batch, C, heads*D), as float32: a v5e has no
    bfloat16 arithmetic.
    """
    i, j = head.at
    return tokens[i, rows, j * D : (j + 1) * D].astype(jnp.float32)


def write(tokens, head, x, rows=slice(None)):
    i, j = head.at
    D = x.shape[-1]
    tokens[i, rows, j * D : (j + 1) * D] = x.astype(tokens.dtype)


def side_by_side(heads):
    """Advance generators in step: each to its next yield, then each to the one after.

    The compiler overlaps what stands near in the program. A product takes 131 cycles to
    come back; between two yields the other heads have work that does not wait for it.
    """
    heads = list(heads)
    while heads:
        going_on = []
        for head in heads:
            if next(head, StopIteration) is not StopIteration:
                going_on.append(head)
            yield
        heads = going_on


def run(steps):
    for _ in steps:
        pass


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
