"""float64 truth: the recurrence and its adjoint, token by token, in numpy.

Imports nothing of the package and shares no formula with it: no chunks, no scans, no
running sums of g. The gradients are written by hand and checked by finite differences
(`tests/test_oracle.py`).

Arrays of Python numbers (dtype object, `decimal.Decimal` say) stay what they are: the
same recurrence in as many digits as they have. Their `exp` method is called.
"""

import numpy as np

GRADIENTS = ("dq", "dk", "dv", "dg", "db", "dw", "d_initial_state")


def _float64(*arrays):
    arrays = [np.asarray(x) for x in arrays]
    return [x if x.dtype == object else x.astype(np.float64) for x in arrays]


def _scale(scale, q):
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return type(q.flat[0])(scale) if q.dtype == object else scale


def _states(q, k, v, g, b, w, scale, initial_state):
    """Per token: the decayed state that the erase reads, the net write, the state the
    output reads.
    """
    B, L, H, K = q.shape
    S = np.zeros((B, H, K, v.shape[-1]), q.dtype) if initial_state is None else _float64(initial_state)[0].copy()
    decayed, writes, states, outputs = [], [], [], []
    for t in range(L):
        D = np.exp(g[:, t])[..., None] * S
        write = w[:, t] * v[:, t] - ((b[:, t] * k[:, t])[..., None] * D).sum(-2)
        S = D + k[:, t][..., None] * write[..., None, :]
        decayed.append(D), writes.append(write), states.append(S)
        outputs.append(scale * (q[:, t][..., None] * S).sum(-2))
    return decayed, writes, states, np.stack(outputs, axis=1)


def forward(q, k, v, g, b, w, *, scale=None, initial_state=None):
    """Outputs and final state of the recurrence in float64.

    Arguments:
      q, k, g, b: (B, L, H, K); v, w: (B, L, H, V); initial_state: (B, H, K, V) or None
        for zeros. Any real dtype.
      scale: number, default K^-1/2.
    Returns:
      o (B, L, H, V) and final state (B, H, K, V), float64.
    """
    q, k, v, g, b, w = _float64(q, k, v, g, b, w)
    _, _, states, o = _states(q, k, v, g, b, w, _scale(scale, q), initial_state)
    return o, states[-1]


def backward(q, k, v, g, b, w, do=None, d_final_state=None, *, scale=None, initial_state=None):
    """Gradients of sum(o*do) + sum(final_state*d_final_state) in float64; a missing
    cotangent counts as zero.

    Arguments: as `forward`; do (B, L, H, V), d_final_state (B, H, K, V).
    Returns: dict with the names of `GRADIENTS`.
    """
    q, k, v, g, b, w = _float64(q, k, v, g, b, w)
    B, L, H, K = q.shape
    V = v.shape[-1]
    scale = _scale(scale, q)
    decayed, writes, states, _ = _states(q, k, v, g, b, w, scale, initial_state)
    do = np.zeros((B, L, H, V), q.dtype) if do is None else _float64(do)[0]
    dS = np.zeros((B, H, K, V), q.dtype) if d_final_state is None else _float64(d_final_state)[0].copy()
    grads = {name: np.zeros_like(x) for name, x in zip(GRADIENTS, (q, k, v, g, b, w))}
    for t in reversed(range(L)):
        D, write, S = decayed[t], writes[t], states[t]
        kt, bt = k[:, t], b[:, t]
        # read: o = scale * S^T q
        grads["dq"][:, t] = scale * (S * do[:, t][..., None, :]).sum(-1)
        dS = dS + scale * q[:, t][..., None] * do[:, t][..., None, :]
        # write: S = D + k write^T,  write = w*v - D^T (b*k)
        d_write = (dS * kt[..., None]).sum(-2)
        d_bk = -(D * d_write[..., None, :]).sum(-1)
        grads["dk"][:, t] = (dS * write[..., None, :]).sum(-1) + bt * d_bk
        grads["db"][:, t] = kt * d_bk
        grads["dv"][:, t] = w[:, t] * d_write
        grads["dw"][:, t] = v[:, t] * d_write
        # decay: D = exp(g) * (state before)
        dD = dS - (bt * kt)[..., None] * d_write[..., None, :]
        grads["dg"][:, t] = (dD * D).sum(-1)
        dS = np.exp(g[:, t])[..., None] * dD
    grads["d_initial_state"] = dS
    return grads
