"""Every launch once more in plain JAX: same name, same arguments, same results, no
tile, no scratch, float32 products. What the launches are tested against, one by one.

Shapes inside: (B, H, N, C, D). Decays are formed pair by pair, a (C, C, K) array per
chunk: for small shapes.
"""

import functools

import jax
import jax.numpy as jnp

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def chunks(x, dims, D):
    """(B, N*C, H*D) -> (B, H, N, C, D), float32."""
    x = x.astype(jnp.float32).reshape(dims.B, dims.N, dims.C, dims.H, D)
    return x.transpose(0, 3, 1, 2, 4)


def tokens(x, dims):
    """Inverse of `chunks`."""
    return x.transpose(0, 2, 3, 1, 4).reshape(dims.B, dims.N * dims.C, -1)


def ones(dims, relation):
    """(C, C) of 0 and 1: whether relation(row, column)."""
    row, column = jnp.indices((dims.C, dims.C))
    return relation(row, column).astype(jnp.float32)


def spans(dims):
    """(C, C, C) of 0 and 1: whether token t is one of j+1 .. i."""
    i, j, t = jnp.indices((dims.C,) * 3)
    return ((j < t) & (t <= i)).astype(jnp.float32)


def pair_decays(g, dims):
    """E_ij = exp(sum of g over j+1 .. i), (B, H, N, C, C, K)."""
    return jnp.exp(einsum("ijt,...td->...ijd", spans(dims), g))


def scores(q, k, g, b, options):
    dims = options.dims
    q, k, g, b = (chunks(x, dims, dims.K) for x in (q, k, g, b))
    E = pair_decays(g, dims)
    Aqk = einsum("...id,...jd,...ijd->...ij", q, k, E)
    Akk = einsum("...id,...jd,...ijd->...ij", b * k, k, E)
    return Aqk * ones(dims, jnp.greater_equal), Akk * ones(dims, jnp.greater)


def inverse(Akk, options):
    eye = jnp.eye(options.dims.C)
    return jax.scipy.linalg.solve_triangular(
        eye + Akk, jnp.broadcast_to(eye, Akk.shape), lower=True, unit_diagonal=True
    )


def boundary_decays(g, dims):
    """exp(G) and exp(G_C - G)."""
    up_to = einsum("tu,...ud->...td", ones(dims, jnp.greater_equal), g)
    after = einsum("tu,...ud->...td", ones(dims, jnp.less), g)
    return jnp.exp(up_to), jnp.exp(after)


def prepare(q, k, v, g, b, w, X, options):
    dims = options.dims
    q, k, g, b = (chunks(x, dims, dims.K) for x in (q, k, g, b))
    v, w = (chunks(x, dims, dims.V) for x in (v, w))
    P, Q = boundary_decays(g, dims)
    W, U = (einsum("...ij,...jd->...id", X, x) for x in (b * k * P, w * v))
    return *(tokens(x, dims) for x in (W, U, k * Q, q * P)), P[..., -1:, :]


def scan(Aqk, W, U, kg, qg, decay, initial, dtype, options):
    dims = options.dims
    W, kg, qg = (chunks(x, dims, dims.K) for x in (W, kg, qg))
    U = chunks(U, dims, dims.V)
    S, entering, vn = initial.mT, [], []
    for n in range(dims.N):
        entering.append(S)
        vn.append(U[:, :, n] - einsum("...cd,...vd->...cv", W[:, :, n], S))
        S = decay[:, :, n] * S + einsum("...cv,...cd->...vd", vn[n], kg[:, :, n])
    entering, vn = jnp.stack(entering, 2), jnp.stack(vn, 2)
    o = einsum("...cd,...vd->...cv", qg, entering)
    o += einsum("...ij,...jv->...iv", Aqk, vn)
    return tokens(o, dims).astype(dtype), tokens(vn, dims), entering, S.mT


def own_outputs(do, Aqk, vn, options):
    dims = options.dims
    do, vn = (chunks(x, dims, dims.V) for x in (do, vn))
    dAqk = einsum("...iv,...jv->...ij", do, vn) * ones(dims, jnp.greater_equal)
    return dAqk, tokens(einsum("...ij,...iv->...jv", Aqk, do), dims)


def scan_back(do, dvn, W, kg, qg, decay, d_final, options):
    dims = options.dims
    do, dvn = (chunks(x, dims, dims.V) for x in (do, dvn))
    W, kg, qg = (chunks(x, dims, dims.K) for x in (W, kg, qg))
    dS, leaving, d_writes = d_final.mT, [], []
    for n in reversed(range(dims.N)):
        leaving.insert(0, dS)
        d_writes.insert(0, dvn[:, :, n] + einsum("...cd,...vd->...cv", kg[:, :, n], dS))
        read = einsum("...cv,...cd->...vd", do[:, :, n], qg[:, :, n])
        erased = einsum("...cv,...cd->...vd", d_writes[0], W[:, :, n])
        dS = read - erased + decay[:, :, n] * dS
    return tokens(jnp.stack(d_writes, 2), dims), jnp.stack(leaving, 2), dS.mT


def prepare_back(k, v, g, b, w, X, kg, qg, decay, vn, S, do, dvn, dS, options):
    dims = options.dims
    dtypes = v.dtype, w.dtype
    k, g, b, kg, qg = (chunks(x, dims, dims.K) for x in (k, g, b, kg, qg))
    v, w, vn, do, dvn = (chunks(x, dims, dims.V) for x in (v, w, vn, do, dvn))
    P, Q = boundary_decays(g, dims)
    kb = b * k * P
    dqg, dkg = (einsum("...cv,...vd->...cd", *x) for x in ((do, S), (vn, dS)))
    dW = -einsum("...cv,...vd->...cd", dvn, S)
    dX = einsum("...id,...jd->...ij", dW, kb) + einsum("...iv,...jv->...ij", dvn, w * v)
    dAkk = -einsum("...ki,...kl,...jl->...ij", X, dX, X) * ones(dims, jnp.greater)
    dkb, dz = (einsum("...ij,...id->...jd", X, x) for x in (dW, dvn))
    keys = [tokens(x, dims) for x in (P * dqg, Q * dkg, P * dkb)]
    values = [tokens(x, dims).astype(t) for x, t in zip((w * dz, v * dz), dtypes)]
    owed = tokens(qg * dqg + kb * dkb, dims), tokens(kg * dkg, dims)
    return *keys, *values, dAkk, *owed, decay * (dS * S).sum(-2, keepdims=True)


def scores_back(q, k, g, b, dAqk, dAkk, dq, dk, dbk, options):
    dims = options.dims
    dtypes = jnp.float32, k.dtype, b.dtype, jnp.float32
    keys = q, k, g, b, dq, dk, dbk
    q, k, g, b, dq, dk, dbk = (chunks(x, dims, dims.K) for x in keys)
    E = pair_decays(g, dims)
    dq += einsum("...ij,...ijd,...jd->...id", dAqk, E, k)
    dbk += einsum("...ij,...ijd,...jd->...id", dAkk, E, k)
    # What row i reads of row j, per channel.
    reads = dAqk[..., None] * q[..., None, :] + dAkk[..., None] * (b * k)[..., None, :]
    dk += einsum("...ijd,...ijd->...jd", E, reads) + b * dbk
    pairs = einsum("ijt,...ijd,...ijd,...jd->...td", spans(dims), E, reads, k)
    results = zip((dq, dk, k * dbk, pairs), dtypes)
    return [tokens(x, dims).astype(dtype) for x, dtype in results]


def log_decay_back(reads, writes, passing, pairs, dtype, options):
    dims = options.dims
    reads, writes, pairs = (chunks(x, dims, dims.K) for x in (reads, writes, pairs))
    dg = pairs + einsum("tu,...ud->...td", ones(dims, jnp.less_equal), reads)
    dg += einsum("tu,...ud->...td", ones(dims, jnp.greater), writes) + passing
    return tokens(dg, dims).astype(dtype)
