"""The two kernels: one grid step is one chunk of several heads, chunks in order.

The state stays in VMEM from the first chunk to the last, in the backward kernel its
gradient from the last to the first.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from gdn2_kernels.stages.atomic_gdn2 import chunk
from gdn2_kernels.tile import dot, f32, inverse, side_by_side


def of_head(ref, head, D):
    """Channels of one head out of a block (C, heads*D), as float32."""
    return f32(ref[:, head * D : (head + 1) * D])


# ------------------------------------------------------ forward


def forward_chunk(q, k, v, g, b, w, S, precision, unroll):
    """Generator over one chunk of one head; q, k, g, b (C, K), v, w (C, V), S (V, K).

    Returns: o (C, V), state leaving (V, K), (X, Aqk, vn).
    """
    a, bk = jnp.exp(g), b * k
    decay = chunk.decayed(k, g)
    Aqk, A = chunk.scores(q, k, bk, a, decay, precision, unroll)
    yield
    X = yield from inverse(A, precision)
    C = q.shape[0]
    reads = [chunk.from_start(x, decay) for x in (q, bk)]
    from_state = dot(jnp.concatenate(reads), S, precision, transpose_b=True)
    yield
    vn = dot(X, w * v - from_state[C:], precision)
    yield
    o = from_state[:C] + dot(Aqk, vn, precision)
    kg = decay.reach[-1]
    S = decay.before[-1] * S + dot(vn, kg, precision, transpose_a=True)
    return o, S, (X, Aqk, vn)


def turn(states, turned):
    """The states of all heads (heads, ..), transposed, from one ref into another."""
    for i in range(states.shape[0]):
        turned[i] = states[i].T


def forward_kernel(
    scale, q, k, v, g, b, w, initial, o, final, entering, *rest,
    K, V, precision, unroll,
):  # fmt: skip
    *kept, state = rest  # refs of X, Aqk, vn where they are kept
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        turn(initial, state)

    entering[...] = state[...]

    def head(i):
        q_, k_, g_, b_ = [of_head(x, i, K) for x in (q, k, g, b)]
        v_, w_ = [of_head(x, i, V) for x in (v, w)]
        o_, state[i], residuals = yield from forward_chunk(
            scale[0, 0] * q_, k_, v_, g_, b_, w_, state[i], precision, unroll
        )
        o[:, i * V : (i + 1) * V] = o_.astype(o.dtype)
        if kept:
            X, Aqk, vn = kept
            X[i], Aqk[i] = residuals[:2]
            vn[:, i * V : (i + 1) * V] = residuals[2]

    side_by_side(head(i) for i in range(state.shape[0]))

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        turn(state, final)


# ------------------------------------------------------ backward


def backward_chunk(
    q, k, v, g, b, w, S, do, dS, residuals, down, precision, unroll
):  # fmt: skip
    """Generator over one chunk of one head, given the state S that entered it and the
    gradient dS of the state that left it. `down`: scratch ref (SUB, C, K).

    Returns: dq, dk, dv, dg, db, dw, gradient of the state that entered.
    """
    C = q.shape[0]
    a, bk = jnp.exp(g), b * k
    decay = chunk.decayed(k, g)
    X, Aqk, vn = residuals
    qg, kb = chunk.from_start(q, decay), chunk.from_start(bk, decay)
    kg, total = decay.reach[-1], decay.before[-1]

    dvn = dot(Aqk, do, precision, transpose_a=True)
    dvn = dvn + dot(kg, dS, precision, transpose_b=True)
    yield
    dz = dot(X, dvn, precision, transpose_a=True)  # of z = w*v - kb S
    yield
    from_vn = dot(jnp.concatenate([do, dz]), vn, precision, transpose_b=True)
    dAqk, dA = from_vn[:C], -from_vn[C:]
    from_S = dot(jnp.concatenate([do, dz]), S, precision)
    dqg, dkb = from_S[:C], -from_S[C:]
    dkg = dot(vn, dS, precision)
    reads = jnp.concatenate([qg, -kb])
    dS_in = total * dS
    dS_in = dS_in + dot(jnp.concatenate([do, dz]), reads, precision, transpose_a=True)
    yield
    d_read = qg * dqg + kb * dkb
    dq, dk, d_bk, dg = chunk.scores_back(
        q, k, bk, a, decay, dAqk, dA, dkg, d_read, down, precision, unroll
    )
    yield
    own = chunk.diagonal(dAqk)  # a token's own write passes no decay
    dq = dq + chunk.from_start(dqg, decay) + own * k
    d_bk = d_bk + chunk.from_start(dkb, decay)
    dk = dk + own * q + b * d_bk
    dg = dg + total * jnp.sum(dS * S, 0, keepdims=True)  # the state passes every token
    return (dq, dk, w * dz, dg, k * d_bk, v * dz), dS_in


def backward_kernel(
    scale, q, k, v, g, b, w, entering, do, d_final, *rest,
    K, V, recompute, precision, unroll,
):  # fmt: skip
    kept = () if recompute else rest[:3]
    dq, dk, dv, dg, db, dw, d_initial, d_scale, d_state, down = rest[len(kept) :]
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        turn(d_final, d_state)
        d_scale[...] = jnp.zeros(d_scale.shape, jnp.float32)

    def head(i):
        q_, k_, g_, b_ = [of_head(x, i, K) for x in (q, k, g, b)]
        v_, w_, do_ = [of_head(x, i, V) for x in (v, w, do)]
        inputs = scale[0, 0] * q_, k_, v_, g_, b_, w_, entering[i]
        if recompute:
            _, _, residuals = yield from forward_chunk(*inputs, precision, unroll)
        else:
            X, Aqk, vn = kept
            residuals = X[i], Aqk[i], of_head(vn, i, V)
        gradients, d_state[i] = yield from backward_chunk(
            *inputs, do_, d_state[i], residuals, down.at[i], precision, unroll
        )
        d_scale[i] += jnp.sum(q_ * gradients[0], 0, keepdims=True)
        gradients = (scale[0, 0] * gradients[0], *gradients[1:])
        for ref, x, D in zip((dq, dk, dv, dg, db, dw), gradients, (K, K, V, K, K, V)):
            ref[:, i * D : (i + 1) * D] = x.astype(ref.dtype)

    side_by_side(head(i) for i in range(d_state.shape[0]))

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        turn(d_state, d_initial)
