"""The plain form as kernels: one head after another, one chunk per grid step."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from gdn2_kernels.stages.mxu.heads import heads_of, read, write
from gdn2_kernels.stages.mxu.plain import backward_chunk, forward_chunk
from gdn2_kernels.tile import f32


def scratch(C, K, V, members):
    """Shapes of one head: the state, or its gradient."""
    assert members == 1
    return [(V, K)]


def forward_kernel(
    scale, q, k, v, g, b, w, initial, o, final, *rest, precision
):  # fmt: skip
    *residuals, state = rest  # X, Aqk, vn, entering, where they are kept
    n = pl.program_id(2)
    K, V = state.shape[2], state.shape[1]

    for head in heads_of(initial):

        @pl.when(n == 0)
        def _():
            state[head.n] = initial[head.at].T

        S = state[head.n]
        o_, state[head.n], kept = forward_chunk(
            scale[0, 0] * read(q, head, K), read(k, head, K), read(v, head, V),
            read(g, head, K), read(b, head, K), read(w, head, V), S, precision,
        )  # fmt: skip
        write(o, head, o_)
        for ref, x in zip(residuals, (*(x.T for x in kept), S)):
            ref[head.at] = x.astype(ref.dtype)

        @pl.when(n == pl.num_programs(2) - 1)
        def _():
            final[head.at] = state[head.n].T


def backward_kernel(
    scale, q, k, v, g, b, w, X, Aqk, vn, entering, do, d_final,
    dq, dk, dv, dg, db, dw, d_initial, d_scale, d_state, *, precision,
):  # fmt: skip
    n = pl.program_id(2)
    K, V = d_state.shape[2], d_state.shape[1]

    @pl.when(n == 0)
    def _():
        d_scale[...] = jnp.zeros(d_scale.shape, jnp.float32)

    for head in heads_of(d_final):

        @pl.when(n == 0)
        def _():
            d_state[head.n] = d_final[head.at].T

        q_ = read(q, head, K)
        kept = [f32(x[head.at]).T for x in (X, Aqk, vn)]
        gradients, d_state[head.n] = backward_chunk(
            scale[0, 0] * q_, read(k, head, K), read(v, head, V), read(g, head, K),
            read(b, head, K), read(w, head, V), f32(entering[head.at]),
            read(do, head, V), d_state[head.n], kept, precision,
        )  # fmt: skip
        passed = (q_ * gradients[0]).reshape(-1, 8, K)
        d_scale[head.at] += jnp.sum(passed, 0)
        gradients = (scale[0, 0] * gradients[0], *gradients[1:])
        for ref, x in zip((dq, dk, dv, dg, db, dw), gradients):
            write(ref, head, x)

        @pl.when(n == pl.num_programs(2) - 1)
        def _():
            d_initial[head.at] = d_state[head.n].T
