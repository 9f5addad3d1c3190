"""Stage 3: chunks of C tokens. Matrix products inside a chunk, one state per chunk
between them.

With S the state that enters the chunk, G the running sum of g inside it and
X = (I + A)^-1,

    A_ij   = sum_d b_id k_id k_jd exp(G_id - G_jd)     j < i
    Aqk_ij = sum_d q_id k_jd exp(G_id - G_jd)          j <= i
    vn     = X (w*v) - X (b*k*exp(G)) S  =  U - W S    each token's net write
    o      = (q*exp(G)) S + Aqk vn
    S'     = diag(exp(G_C)) S + (k*exp(G_C - G))^T vn

(W and U are the "WY" pair that gives the form its name.)

No exponent above zero is ever formed, so any g <= 0 is served: pairs (i, j) are sorted
into a binary tree of blocks (`forward_tree`), and inside a block exp(G_i - G_j) is a
product of two factors that are both at most one.

Source of the chunked form: Yang et al., arXiv 2406.06484 (DeltaNet) and 2412.06464
(Gated DeltaNet). The tree with local factors and the gradient of g without cancellation
are derived in the chapter of this name.

Shapes: n = N*B*H chunks in all, q, k, b, a = exp(g) (n, C, K), v, w (n, C, V).
Names: bk = b*k, qg = q*exp(G), kb = bk*exp(G), kg = k*exp(G_C - G).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn2_kernels.tile import compute_dtype, from_chunks, matmul, to_chunks

CHUNK_SIZE = 64
# Chunks worked on together. Enough for wide products, few enough that what lives only
# inside a segment does not grow with L.
SEGMENT = 4


class Residuals(NamedTuple):
    """What the backward pass is given besides the six inputs: 2C + V + K*V/C numbers
    per token and head.
    """

    X: jax.Array  # (n, C, C) inverse of I + A
    Aqk: jax.Array  # (n, C, C)
    vn: jax.Array  # (n, C, V)
    S: jax.Array  # (n, K, V) state entering each chunk


# ------------------------------------------------------ the tree of blocks


def halves(x, h):
    """(n, C, D) -> earlier and later halves of its blocks of 2h rows.

    Each half (blocks, h, D).
    """
    x = x.reshape(-1, 2, h, x.shape[-1])
    return x[:, 0], x[:, 1]


def join(earlier, later, C):
    """Inverse of `halves`: two (blocks, h, D) -> (n, C, D)."""
    return jnp.stack([earlier, later], axis=1).reshape(-1, C, earlier.shape[-1])


def levels(C):
    """Half the block size at each level, fine to coarse: 1, 2, 4, .., C/2."""
    return [1 << i for i in range(C.bit_length() - 1)]


def decay_factors(a):
    """Decay inside growing blocks, by products only: no sum of g is formed and no
    difference of two taken.

    Arguments: a (n, C, K) in [0, 1], the decay exp(g) of each token.
    Returns:
      factors: for each of `levels(C)` one array (n, C, K). On the later half of each
        block of 2h rows it is the product of a from the first later row to row i, on
        the earlier half the product over the rows after row j up to the last earlier
        row. For i later and j earlier, factor_i * factor_j = exp(G_i - G_j).
      P: exp(G), (n, C, K). Q: exp(G_C - G), (n, C, K).
    """
    C = a.shape[1]
    # P: from the start of the block to each row. Q: after each row to the end.
    P, Q = a, jnp.ones_like(a)
    factors = []
    for h in levels(C):
        (P_earlier, P_later), (Q_earlier, Q_later) = halves(P, h), halves(Q, h)
        factors.append(join(Q_earlier, P_later, C))
        P = join(P_earlier, P_later * P_earlier[:, -1:], C)
        Q = join(Q_earlier * P_later[:, -1:], Q_later, C)
    return factors, P, Q


def forward_tree(q, k, bk, factors, precision):
    """Aqk and X = (I + A)^-1, both (n, C, C), grown together from 1 x 1 blocks.

    Two neighbouring blocks merge into [[Aqk1, 0], [Mq, Aqk2]] and
    [[X1, 0], [-X2 M X1, X2]], where Mq and M are the level's scores between the later
    and the earlier half. This is block doubling: every intermediate is an inverse of a
    diagonal block, so it is as tame as the answer. (Powers of A are not; see the
    chapter.)
    """
    # A token does not decay against itself.
    Aqk = (q * k).sum(-1).reshape(-1, 1, 1)
    X = jnp.ones_like(Aqk)
    for h, factor in zip(levels(q.shape[1]), factors):
        k_earlier, _ = halves(k * factor, h)
        _, q_later = halves(q * factor, h)
        _, bk_later = halves(bk * factor, h)
        reads = jnp.concatenate([q_later, bk_later], 1)
        scores = matmul(reads, k_earlier.mT, precision)
        Mq, M = scores[:, :h], scores[:, h:]
        X1, X2 = X[0::2], X[1::2]
        X = _merge(X1, -matmul(X2, matmul(M, X1, precision), precision), X2)
        Aqk = _merge(Aqk[0::2], Mq, Aqk[1::2])
    return Aqk, X


def _merge(earlier, below, later):
    """Two diagonal blocks and what stands below the first -> one lower triangular block
    of twice the size.
    """
    above = jnp.zeros_like(below)
    upper = jnp.concatenate([earlier, above], 2)
    return jnp.concatenate([upper, jnp.concatenate([below, later], 2)], 1)


def backward_tree(q, k, bk, factors, dAqk, dA, precision):
    """Gradients through the scores of `forward_tree`: what pairs i > j owe to q, k, bk
    and g.

    dAqk, dA: (n, C, C), only what stands below their diagonals is read. Returns dq, dk,
      d_bk, dg (n, C, K).
    """
    C = q.shape[1]
    dq, dk, d_bk, dg = (jnp.zeros_like(q) for _ in range(4))
    for h, factor in zip(reversed(levels(C)), reversed(factors)):
        # (blocks, 2h, h): the rows that q owns above those of bk
        M = jnp.concatenate([dAqk[:, h:, :h], dA[:, h:, :h]], 1)
        dAqk, dA = _diagonal_blocks(dAqk, h), _diagonal_blocks(dA, h)
        k_earlier, _ = halves(k * factor, h)
        _, q_later = halves(q * factor, h)
        _, bk_later = halves(bk * factor, h)
        reads = jnp.concatenate([q_later, bk_later], 1)
        dk_earlier = matmul(M.mT, reads, precision)
        d_later = matmul(M, k_earlier, precision)
        dq_later, d_bk_later = d_later[:, :h], d_later[:, h:]
        dg += join(
            sum_before(k_earlier * dk_earlier, precision),
            sum_from(q_later * dq_later + bk_later * d_bk_later, precision),
            C,
        )
        nothing = jnp.zeros_like(dk_earlier)
        dq += factor * join(nothing, dq_later, C)
        d_bk += factor * join(nothing, d_bk_later, C)
        dk += factor * join(dk_earlier, nothing, C)
    return dq, dk, d_bk, dg


def _diagonal_blocks(x, h):
    """(blocks, 2h, 2h) -> its diagonal blocks (2*blocks, h, h)."""
    return jnp.stack([x[:, :h, :h], x[:, h:, h:]], 1).reshape(-1, h, h)


# The gradient of g counts what straddles a token: a later read of an earlier write
# passes the decay of every token after the write, up to and including the read. A
# reader i therefore owes to all rows up to its own, a writer j to all rows after it,
# and a sum over the level's rows is all there is: no term cancels another. (The usual
# way sums q*dq + bk*d_bk - k*dk from the end, a difference of nearly equal numbers; see
# the chapter.)


def sum_from(x, precision):
    """Row t of the result: rows t, t+1, .. of x (blocks, h, D) summed. A product with
    ones, for the matrix unit.
    """
    return matmul(_ones(jnp.triu, x), x, precision)


def sum_before(x, precision):
    """Row t of the result: rows 0 .. t-1 of x (blocks, h, D) summed."""
    return matmul(_ones(functools.partial(jnp.tril, k=-1), x), x, precision)


def _ones(triangle, x):
    blocks, h, _ = x.shape
    return jnp.broadcast_to(triangle(jnp.ones((h, h), x.dtype)), (blocks, h, h))


# ------------------------------------------------------ forward and backward


def _all_chunks(x):  # (N, B*H, ...) -> (n, ...)
    return x.reshape(-1, *x.shape[2:])


def _by_chunk(x, N):  # (n, ...) -> (N, B*H, ...)
    return x.reshape(N, -1, *x.shape[1:])


def forward_segment(q, k, v, g, b, w, initial_state, precision):
    """q (scaled), k, g, b (N, B*H, C, K); v, w (N, B*H, C, V).
    initial_state (B*H, K, V).

    Returns: o (N, B*H, C, V), final state (B*H, K, V), `Residuals`.
    """
    N = q.shape[0]
    q, k, v, g, b, w = map(_all_chunks, (q, k, v, g, b, w))
    # What does not need the state, for all chunks at once.
    bk = b * k
    factors, P, Q = decay_factors(jnp.exp(g))
    Aqk, X = forward_tree(q, k, bk, factors, precision)
    W, U = matmul(X, bk * P, precision), matmul(X, w * v, precision)

    def chunk(S, x):
        W, U, kg, decay = x
        vn = U - matmul(W, S, precision)
        return decay[:, :, None] * S + matmul(kg.mT, vn, precision), (S, vn)

    by_chunk = [_by_chunk(x, N) for x in (W, U, k * Q, P[:, -1])]
    final_state, S_and_vn = lax.scan(chunk, initial_state, by_chunk)
    S, vn = map(_all_chunks, S_and_vn)
    o = matmul(q * P, S, precision) + matmul(Aqk, vn, precision)
    return _by_chunk(o, N), final_state, Residuals(X, Aqk, vn, S)


def backward_segment(q, k, v, g, b, w, residuals, do, d_final_state, precision):
    """Gradients of the inputs of `forward_segment` and of its initial state, given the
    cotangents of its results.

    Not a mirror image: dA = -dz vn^T takes one product where differentiating
    X = (I + A)^-1 takes two more and a gradient of X (chapter `wy`).
    """
    N = q.shape[0]
    q, k, v, g, b, w, do = map(_all_chunks, (q, k, v, g, b, w, do))
    X, Aqk, vn, S = residuals
    bk = b * k
    factors, P, Q = decay_factors(jnp.exp(g))
    qg, kb, kg, decay = q * P, bk * P, k * Q, P[:, -1]

    # What a chunk owes to its own outputs, then the gradient of the state from the last
    # chunk to the first.
    dvn_inside = matmul(Aqk.mT, do, precision)
    dS_inside = matmul(qg.mT, do, precision)

    def chunk(dS_out, x):
        W, kg, decay, dvn_inside, dS_inside = x
        dvn = dvn_inside + matmul(kg, dS_out, precision)
        dS = dS_inside - matmul(W.mT, dvn, precision) + decay[:, :, None] * dS_out
        return dS, (dS_out, dvn)

    W = matmul(X, kb, precision)
    by_chunk = [_by_chunk(x, N) for x in (W, kg, decay, dvn_inside, dS_inside)]
    d_initial_state, by_chunk = lax.scan(chunk, d_final_state, by_chunk, reverse=True)
    dS_out, dvn = map(_all_chunks, by_chunk)

    dz = matmul(X.mT, dvn, precision)  # gradient of z = w*v - kb S
    dAqk = matmul(do, vn.mT, precision)
    dA = -matmul(dz, vn.mT, precision)
    dqg, dkb = matmul(do, S.mT, precision), -matmul(dz, S.mT, precision)
    dkg = matmul(vn, dS_out.mT, precision)
    dq, dk, d_bk, dg = backward_tree(q, k, bk, factors, dAqk, dA, precision)
    dg += sum_from(qg * dqg + kb * dkb, precision)
    dg += sum_before(kg * dkg, precision)
    # The state passes every token of the chunk; a token's own write passes none.
    dg += (decay * (dS_out * S).sum(-1))[:, None]
    own = jnp.diagonal(dAqk, axis1=1, axis2=2)[:, :, None]
    dq += P * dqg + own * k
    dk += Q * dkg + own * q
    d_bk += P * dkb
    gradients = (dq, dk + b * d_bk, w * dz, dg, k * d_bk, v * dz)
    return *(_by_chunk(x, N) for x in gradients), d_initial_state


# ------------------------------------------------------ the stage


def forward(q, k, v, g, b, w, initial_state, precision):
    """Segments one after another, the state handed on. Inputs as of `forward_segment`
    with one more axis in front.

    Returns: (o, final state), `Residuals` of every segment.
    """

    def segment(S, x):
        o, S, residuals = forward_segment(*x, S, precision)
        return S, (o, residuals)

    final_state, (o, residuals) = lax.scan(segment, initial_state, (q, k, v, g, b, w))
    return (o, final_state), residuals


def backward(inputs, residuals, do, d_final_state, precision):
    """Segments from the last to the first, the gradient of the state handed back."""

    def segment(dS, x):
        inputs, residuals, do = x
        *gradients, dS = backward_segment(*inputs, residuals, do, dS, precision)
        return dS, gradients

    kept = (inputs, residuals, do)
    d_initial_state, gradients = lax.scan(segment, d_final_state, kept, reverse=True)
    return *gradients, d_initial_state


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def with_backward(q, k, v, g, b, w, initial_state, precision):
    """`forward` without its residuals, differentiated by `backward`."""
    return forward(q, k, v, g, b, w, initial_state, precision)[0]


def _with_backward_fwd(q, k, v, g, b, w, initial_state, precision):
    results, residuals = forward(q, k, v, g, b, w, initial_state, precision)
    return results, ((q, k, v, g, b, w), residuals)


def _with_backward_bwd(precision, kept, cotangents):
    return backward(*kept, *cotangents, precision)


with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)


def by_autodiff(q, k, v, g, b, w, initial_state, precision):
    """The same forward left to JAX: what `backward` is checked against."""
    return forward(q, k, v, g, b, w, initial_state, precision)[0]


def wy(
    q, k, v, g, b, w, scale, initial_state, *,
    precision, chunk_size, interpret, run=with_backward,
):  # fmt: skip
    """Chunked form in plain JAX. Shapes and contract as `gdn2`; `interpret` changes
    nothing.

    `run` is `with_backward` or `by_autodiff`. Memory for the backward pass: the inputs,
    in float32 and filled up to whole segments, and `Residuals`.
    """
    del interpret
    B, L, H, V = v.shape
    # No longer than the sequence, filled up to a power of two.
    C = min(chunk_size or CHUNK_SIZE, 1 << (L - 1).bit_length())
    N = -(-L // C)
    segments = -(-N // SEGMENT)
    N = segments * -(-N // segments)  # segments of equal length
    dtype = compute_dtype(q, k, v, g, b, w)

    def segmented(x):
        x = to_chunks(x.astype(dtype), C, N)
        return x.reshape(segments, -1, *x.shape[1:])

    inputs = [segmented(x) for x in (q.astype(dtype) * scale, k, v, g, b, w)]
    # The barrier changes nothing: jaxlib 0.7.2 folds inputs that are constants of the
    # program through the transposes, and gets them wrong.
    inputs = lax.optimization_barrier(inputs)
    o, final_state = run(*inputs, initial_state.reshape(B * H, -1, V), precision)
    o = from_chunks(o.reshape(N, *o.shape[2:]), B, L)
    return o.astype(v.dtype), final_state.reshape(initial_state.shape)
