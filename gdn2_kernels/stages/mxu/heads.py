"""The heads of a grid step: blocks hold some of the batch and some of the heads."""

import itertools
from typing import NamedTuple

from jax.experimental import pallas as pl

from gdn2_kernels.stages.mxu.lanes import Alone, Pair
from gdn2_kernels.tile import f32, int32


class Head(NamedTuple):
    """A head, or a pair of heads in the same lanes."""

    n: int  # among those of the grid step
    at: tuple  # (batch, head) within the blocks
    lanes: type  # Alone or Pair

    def place(self, ref):
        """In a block (batch, heads, ..), or in scratch (batch*heads, ..)."""
        return self.at if len(ref.shape) == 4 else (self.n,)


def heads_of(states, members=1):
    """All heads of a block of states (batch, heads, ..), each of so many members."""
    batch, heads = states.shape[:2]
    places = itertools.product(range(batch), range(heads))
    lanes = {1: Alone, 2: Pair}[members]
    return [Head(n, at, lanes) for n, at in enumerate(places)]


def read(tokens, head, D, rows=slice(None)):
    """Channels of one head out of a block (batch, C, heads*D), as float32."""
    i, j = head.at
    return f32(tokens[i, rows, j * D : (j + 1) * D])


def write(tokens, head, x, rows=slice(None)):
    i, j = head.at
    D = x.shape[-1]
    tokens[i, rows, j * D : (j + 1) * D] = x.astype(tokens.dtype)


def spread(steps, count, others, start=0):
    """Run `count` steps with functions `others` called evenly between those after the
    first `start`.
    """
    for _ in range(start):
        next(steps)
    count -= start
    done = 0
    for i in range(count):
        next(steps)
        while (done + 0.5) * count < (i + 1) * len(others):
            others[done]()
            done += 1


def phase(number, apart=True):
    """A condition that always holds makes its body a block of its own: the compiler does
    not keep values of one phase in registers for the next, which would spill them.

    apart: not so where phases are short, and the waits at their ends cost more.
    """
    if not apart:
        return lambda body: body()
    # Different for each phase, or neighbours would be merged.
    return pl.when(pl.program_id(2) > int32(-1 - number))
