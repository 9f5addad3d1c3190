"""Backward launches B2, B1, B3, B4, B5, in the order they run.

Shapes inside a kernel as in `forward`: gradients have the shape of what they belong to.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from gdn2_kernels.stages.atomic_ops.forward import FLOAT, Walk, each_column
from gdn2_kernels.stages.launch import launch
from gdn2_kernels.tile import (
    columns,
    dot,
    f32,
    lower,
    only,
    rows,
    sum_after,
    sum_before,
    sum_from,
    sum_up_to,
)

# ------------------------------------------------------ B2: a chunk's own outputs


def own_outputs_kernel(do, Aqk, vn, dAqk, dvn, *, precision):
    dAqk[...] = lower(dot(f32(do), vn[...], precision, transpose_b=True))
    dvn[...] = dot(Aqk[...], f32(do), precision, transpose_a=True)


def own_outputs(do, Aqk, vn, options):
    """B2. What the outputs of a chunk owe to its own scores and writes.

        dAqk = tril(do vn^T)    dvn = Aqk^T do

    Arguments: do "values", Aqk "square", vn "values". Returns: dAqk "square", dvn
    "values".
    """
    dims = options.dims
    return launch(
        functools.partial(own_outputs_kernel, precision=options.precision),
        options,
        [("values", do), ("square", Aqk), ("values", vn)],
        [("square", FLOAT), ("values", FLOAT)],
        name="B2_own_outputs",
        flops=4 * dims.C**2 * dims.V,
    )


# ------------------------------------------------------ B1: scan over chunks, backwards


def scan_back_kernel(
    do, dvn_own, W, kg, qg, decay, d_final, dvn, dS, d_initial, d_state, *, precision
):  # fmt: skip
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        d_state[...] = d_final[...].T

    leaving = d_state[...]
    dS[...] = leaving
    d_writes = dvn_own[...] + dot(kg[...], leaving, precision, transpose_b=True)
    dvn[...] = d_writes
    read = dot(f32(do), qg[...], precision, transpose_a=True)
    erased = dot(d_writes, W[...], precision, transpose_a=True)
    d_state[...] = read - erased + decay[...] * leaving

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        d_initial[...] = d_state[...].T


def scan_back(do, dvn, W, kg, qg, decay, d_final, options):
    """B1. The gradient of the state from the last chunk to the first.

        dvn += kg dS'    dS = qg^T do + diag(exp(G_C)) dS' - W^T dvn

    Arguments: do, dvn (of B2) "values", W, kg, qg "keys", decay "row", d_final "head".
    Returns: dvn "values", dS' "state" (of the state leaving each chunk), d_initial
    "head".
    """
    dims = options.dims
    return launch(
        functools.partial(scan_back_kernel, precision=options.precision),
        options,
        [("values", do), ("values", dvn), ("keys", W), ("keys", kg), ("keys", qg),
         ("row", decay), ("head", d_final)],
        [("values", FLOAT), ("state", FLOAT), ("head", FLOAT)],
        scratch=[(dims.V, dims.K)],
        in_order=True,
        backwards=True,
        name="B1_scan_back",
        flops=6 * dims.C * dims.K * dims.V,
    )  # fmt: skip


# ------------------------------------------------------ B3: through W, U, kg, qg


def prepare_back_kernel(
    k, v, g, b, w, X, kg, qg, decay, vn, S, do, dvn, dS,
    dq, dk, dbk, dv, dw, dAkk, reads, writes, passing, *, precision,
):  # fmt: skip
    log_decay = f32(g)
    from_start, to_end = jnp.exp(sum_up_to(log_decay)), jnp.exp(sum_after(log_decay))
    kb = f32(b) * f32(k) * from_start
    inverse, dU = X[...], dvn[...]

    dqg = dot(f32(do), S[...], precision)
    dkg = dot(vn[...], dS[...], precision)
    dW = -dot(dU, S[...], precision)
    dX = dot(dW, kb, precision, transpose_b=True)
    dX += dot(dU, f32(w) * f32(v), precision, transpose_b=True)
    dkb = dot(inverse, dW, precision, transpose_a=True)
    dz = dot(inverse, dU, precision, transpose_a=True)
    dX = dot(inverse, dX, precision, transpose_a=True)
    dX = dot(dX, inverse, precision, transpose_b=True)

    dAkk[...] = -lower(dX, diagonal=False)
    dv[...] = (f32(w) * dz).astype(dv.dtype)
    dw[...] = (f32(v) * dz).astype(dw.dtype)
    dq[...], dbk[...], dk[...] = from_start * dqg, from_start * dkb, to_end * dkg
    # Three kinds of travellers whom the decay of a token meets (see B5).
    reads[...] = qg[...] * dqg + kb * dkb
    writes[...] = kg[...] * dkg
    passing[...] = decay[...] * jnp.sum(dS[...] * S[...], 0, keepdims=True)


def prepare_back(k, v, g, b, w, X, kg, qg, decay, vn, S, do, dvn, dS, options):
    """B3. From the gradients of what the scan used to those of what made it.

        dqg = do S^T     dkg = vn dS'^T    dW = -dvn S^T    dU = dvn
        dX  = dW kb^T + dU (w*v)^T         dkb = X^T dW     dz = X^T dU
        dAkk = -strict_tril(X^T dX X^T)    dv = w*dz        dw = v*dz

    Returns: dq, dk, dbk "keys" as far as they come through the state, dv, dw "values",
    dAkk "square", and for dg: reads, writes "keys", passing "row".
    """
    C, K, V = options.dims.C, options.dims.K, options.dims.V
    return launch(
        functools.partial(prepare_back_kernel, precision=options.precision),
        options,
        [("keys", k), ("values", v), ("keys", g), ("keys", b), ("values", w),
         ("square", X), ("keys", kg), ("keys", qg), ("row", decay), ("values", vn),
         ("state", S), ("values", do), ("values", dvn), ("state", dS)],
        [("keys", FLOAT)] * 3 + [("values", v.dtype), ("values", w.dtype)]
        + [("square", FLOAT)] + [("keys", FLOAT)] * 2 + [("row", FLOAT)],
        name="B3_prepare_back",
        flops=6 * C * K * V + 4 * C**2 * (K + V + C),
        exps=2 * C * K,
    )  # fmt: skip


# ------------------------------------------------------ B4: through the scores


def scores_back_kernel(
    q, k, g, b, dAqk, dAkk, dq_state, dk_state, dbk_state,
    dq, dk, db, pairs, keys, log_decay, dk_sum, dbk_sum, *, walk,
):  # fmt: skip
    C, K = q.shape
    keys[...], log_decay[...] = f32(k), f32(g)
    queries, erases = f32(q), f32(b) * keys[...]
    dq[...], dk_sum[...], dbk_sum[...] = dq_state[...], dk_state[...], dbk_state[...]
    pairs[...] = jnp.zeros((C, K), FLOAT)
    tile = walk.tile
    tile_row = rows((tile, K))

    def start(first):
        zeros = jnp.zeros((C - first, K), FLOAT)
        return zeros, zeros, zeros[:tile], zeros[:tile]

    def column(carry, first, j, decay, key):
        dq, dbk, dk, pairs = carry
        lane = columns((C - first, C))

        def of_column(scores):  # its column j, (rows, 1)
            at = only(lane == first + j, scores[first:, :])
            return jnp.sum(at, 1, keepdims=True)

        m, n = of_column(dAqk), of_column(dAkk)
        decayed = decay * key
        owed = decay * (m * queries[first:] + n * erases[first:])
        # Of what row j wrote, row t of its tile is owed what is read at t or after.
        from_row = sum_from(owed[:tile])
        if first + tile < C:
            from_row += jnp.sum(owed[tile:], 0, keepdims=True)
        dk = jnp.where(tile_row == j, from_row, dk)
        pairs = pairs + only(tile_row > j, key * from_row)
        return dq + m * decayed, dbk + n * decayed, dk, pairs

    def finish(carry, first):
        dq_tile, dbk_tile, dk_tile, pairs_tile = carry
        end = first + tile
        dq[first:, :] += dq_tile
        dbk_sum[first:, :] += dbk_tile
        dk_sum[first:end, :] += dk_tile
        pairs[first:end, :] += pairs_tile
        if end < C:
            # Of what this tile wrote, a later token lets pass what is read at it or
            # after.
            later = queries[first:] * dq_tile + erases[first:] * dbk_tile
            pairs[end:, :] += sum_from(later[tile:])

    each_column(keys, log_decay, walk, start, column, finish)
    dk[...] = (dk_sum[...] + f32(b) * dbk_sum[...]).astype(dk.dtype)
    db[...] = (keys[...] * dbk_sum[...]).astype(db.dtype)


def scores_back(q, k, g, b, dAqk, dAkk, dq, dk, dbk, options):
    """B4. What every pair i >= j owes, on the vector unit like A, added to what came
    through the state.

        dq_i += sum_j dAqk_ij E_ij k_j        E_ij = exp(G_i - G_j)
        dbk_i += sum_j dAkk_ij E_ij k_j
        dk_j += sum_i E_ij (dAqk_ij q_i + dAkk_ij b_i k_i)

    then dk += b dbk and db = k dbk. A pair owes dg the same number, to every token
    after j up to i: those are counted, so that no term has to cancel another.

    Returns: dq (of the scaled q), dk, db, and the pairs' share of dg, "keys".
    """
    dims = options.dims
    return launch(
        functools.partial(scores_back_kernel, walk=Walk.of(options)),
        options,
        [("keys", x) for x in (q, k, g, b)]
        + [("square", x) for x in (dAqk, dAkk)]
        + [("keys", x) for x in (dq, dk, dbk)],
        [("keys", FLOAT), ("keys", k.dtype), ("keys", b.dtype), ("keys", FLOAT)],
        scratch=[(dims.C, dims.K)] * 4,
        name="B4_scores_back",
        flops=14 * dims.pairs,
        exps=dims.pairs,
    )


# ------------------------------------------------------ B5: the log decay


def log_decay_back_kernel(reads, writes, passing, pairs, dg):
    # The decay of token t meets what was in the state before the chunk and is read at t
    # or after, what was written before t and leaves the chunk, and what passes through.
    through = sum_from(reads[...]) + sum_before(writes[...]) + passing[...]
    dg[...] = (pairs[...] + through).astype(dg.dtype)


def log_decay_back(reads, writes, passing, pairs, dtype, options):
    """B5. dg_t, what straddles token t, summed: sums of what is there, where the usual
    reverse running sum of q*dq + bk*dbk - k*dk is a difference of nearly equal numbers.

    Arguments: of B3 and B4; dtype of dg. Returns: dg "keys".
    """
    dims = options.dims
    return launch(
        log_decay_back_kernel,
        options,
        [("keys", reads), ("keys", writes), ("row", passing), ("keys", pairs)],
        [("keys", dtype)],
        name="B5_log_decay_back",
        flops=2 * dims.C * dims.K * dims.C.bit_length(),
    )[0]
