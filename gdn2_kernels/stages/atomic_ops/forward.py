"""Forward launches A, B, C, D: one kernel each, everything between them through HBM.

Shapes inside a kernel, one chunk of one head: q, k, g, b (C, K), v, w (C, V), states
transposed (V, K).
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gdn2_kernels import tile
from gdn2_kernels.stages.launch import launch
from gdn2_kernels.tile import (
    columns,
    dot,
    f32,
    lower,
    only,
    rows,
    side_by_side,
    sum_after,
    sum_up_to,
)

FLOAT = jnp.float32
TILE = 8  # rows of one float32 vector register

# ------------------------------------------------------ A: scores


class Walk(NamedTuple):
    """How `each_column` goes over the columns of a chunk."""

    tile: int  # columns that share one set of rows
    unroll: bool  # those columns laid out one after another

    @classmethod
    def of(cls, options):
        if options.interpret is False:
            # Unrolled, the long way of a sum over lanes (115 cycles) in one column
            # overlaps with the next columns.
            return cls(TILE, True)
        # The same code in a program an order of magnitude smaller, for XLA to compile.
        return cls(max(TILE, options.dims.C // 2), False)


def each_column(keys, log_decay, walk, start, column, finish):
    """Walk over the columns j of all pairs i >= j of a chunk, last one first, in tiles
    of columns.

    The exponent of a pair, the sum of g over j+1 .. i, is carried along for all rows i:
    one addition per step to the left. It is a sum of g alone, never a difference of
    running sums, so it is at most zero and as exact as g. Rows above the diagonal hold
    -inf, whose exponential is the zero that belongs there.

    Arguments:
      keys, log_decay: refs (C, K) float32 of k and g.
      start(first): carry for the tile of columns that starts at `first`.
      column(carry, first, j, decay, key): handles column first + j; decay is
        exp(sum of g) for the rows first .. C-1, (C - first, K); key is k_j, (1, K).
      finish(carry, first): after the tile.
    """
    C, K = keys.shape
    exponent = None
    for first in reversed(range(0, C, walk.tile)):
        above = jnp.full((walk.tile, K), -jnp.inf, FLOAT)
        exponent = above if exponent is None else jnp.concatenate([above, exponent])
        row = rows(exponent.shape)

        def step(i, carry, first=first, row=row):
            exponent, carry = carry
            j = walk.tile - 1 - i
            exponent = only(row != j, exponent)
            here = pl.ds(first + j, 1)
            carry = column(carry, first, j, jnp.exp(exponent), keys[here, :])
            return exponent + log_decay[here, :], carry

        carry = exponent, start(first)
        if walk.unroll:
            for i in range(walk.tile):
                carry = step(i, carry)
        else:
            # int32 bounds: under x64 Python ints would count in int64.
            carry = lax.fori_loop(jnp.int32(0), jnp.int32(walk.tile), step, carry)
        exponent, carry = carry
        finish(carry, first)


def scores_kernel(q, k, g, b, Aqk, Akk, keys, log_decay, *, walk):
    C = q.shape[0]
    keys[...], log_decay[...] = f32(k), f32(g)
    queries, erases = f32(q), f32(b) * keys[...]
    Aqk[...], Akk[...] = jnp.zeros((C, C), FLOAT), jnp.zeros((C, C), FLOAT)

    def start(first):
        return Aqk[first:, :], Akk[first:, :]

    def column(carry, first, j, decay, key):
        decayed = decay * key
        lane = columns((C - first, C))

        def put(scores, readers):
            total = jnp.sum(readers[first:] * decayed, 1, keepdims=True)
            return jnp.where(lane == first + j, total, scores)

        return put(carry[0], queries), put(carry[1], erases)

    def finish(carry, first):
        Aqk[first:, :], Akk[first:, :] = carry

    each_column(keys, log_decay, walk, start, column, finish)
    Aqk[...], Akk[...] = lower(Aqk[...]), lower(Akk[...], diagonal=False)


def scores(q, k, g, b, options):
    """A. Pair scores by broadcast, multiply, sum over channels: exact float32 on the
    vector unit, whatever the precision of products.

        Aqk_ij = sum_d q_id k_jd exp(G_id - G_jd)          j <= i
        Akk_ij = sum_d b_id k_id k_jd exp(G_id - G_jd)     j < i

    Arguments: q (scaled), k, g, b "keys". Returns: Aqk, Akk "square".
    """
    dims = options.dims
    return launch(
        functools.partial(scores_kernel, walk=Walk.of(options)),
        options,
        [("keys", x) for x in (q, k, g, b)],
        [("square", FLOAT)] * 2,
        scratch=[(dims.C, dims.K)] * 2,
        name="A_scores",
        flops=6 * dims.pairs,
        exps=dims.pairs,
    )


# ------------------------------------------------------ B: inverse


def inverse_kernel(Akk, X, *, precision):
    [X[...]] = side_by_side([tile.inverse(Akk[...], precision)])


def inverse(Akk, options):
    """B. X = (I + Akk)^-1 by doubling the blocks on the diagonal: X <- X - X M X, M the
    part of Akk between two neighbouring blocks. Each product waits for the one before.

    Arguments and result: "square".
    """
    kernel = functools.partial(inverse_kernel, precision=options.precision)
    C = options.dims.C
    return launch(
        kernel,
        options,
        [("square", Akk)],
        [("square", FLOAT)],
        name="B_inverse",
        flops=4 * C**3 * (C.bit_length() - 2),
    )[0]


# ------------------------------------------------------ C: what the scan needs


def prepare_kernel(q, k, v, g, b, w, X, W, U, kg, qg, decay, *, precision):
    keys, log_decay = f32(k), f32(g)
    from_start, to_end = jnp.exp(sum_up_to(log_decay)), jnp.exp(sum_after(log_decay))
    W[...] = dot(X[...], f32(b) * keys * from_start, precision)
    U[...] = dot(X[...], f32(w) * f32(v), precision)
    kg[...] = keys * to_end
    qg[...] = f32(q) * from_start
    decay[...] = from_start[-1:]


def prepare(q, k, v, g, b, w, X, options):
    """C. Everything about a chunk that does not need the state.

        W = X (b*k*exp(G))    U = X (w*v)    kg = k*exp(G_C - G)    qg = q*exp(G)

    Returns: W "keys", U "values", kg, qg "keys", decay = exp(G_C) "row".
    """
    dims = options.dims
    return launch(
        functools.partial(prepare_kernel, precision=options.precision),
        options,
        [("keys", q), ("keys", k), ("values", v), ("keys", g), ("keys", b),
         ("values", w), ("square", X)],
        [("keys", FLOAT), ("values", FLOAT), ("keys", FLOAT), ("keys", FLOAT),
         ("row", FLOAT)],
        name="C_prepare",
        flops=2 * dims.C**2 * (dims.K + dims.V),
        exps=2 * dims.C * dims.K,
    )  # fmt: skip


# ------------------------------------------------------ D: scan over chunks


def scan_kernel(
    Aqk, W, U, kg, qg, decay, initial, o, vn, entering, final, state, *, precision
):  # fmt: skip
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        state[...] = initial[...].T

    S = state[...]
    entering[...] = S
    writes = U[...] - dot(W[...], S, precision, transpose_b=True)
    read = dot(qg[...], S, precision, transpose_b=True)
    o[...] = (read + dot(Aqk[...], writes, precision)).astype(o.dtype)
    vn[...] = writes
    state[...] = decay[...] * S + dot(writes, kg[...], precision, transpose_a=True)

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        final[...] = state[...].T


def scan(Aqk, W, U, kg, qg, decay, initial, dtype, options):
    """D. The state from chunk to chunk, in VMEM; the outputs on the way.

        vn = U - W S    o = qg S + Aqk vn    S' = diag(exp(G_C)) S + kg^T vn

    Arguments: as `scores` and `prepare` return them; initial "head"; dtype of o.
    Returns: o, vn "values", S entering each chunk "state", final state "head".
    """
    dims = options.dims
    return launch(
        functools.partial(scan_kernel, precision=options.precision),
        options,
        [("square", Aqk), ("keys", W), ("values", U), ("keys", kg), ("keys", qg),
         ("row", decay), ("head", initial)],
        [("values", dtype), ("values", FLOAT), ("state", FLOAT), ("head", FLOAT)],
        scratch=[(dims.V, dims.K)],
        in_order=True,
        name="D_scan",
        flops=2 * dims.C * dims.V * (3 * dims.K + dims.C),
    )  # fmt: skip
