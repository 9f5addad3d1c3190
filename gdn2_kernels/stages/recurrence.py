"""Stage 1, the law: Gated DeltaNet-2 token by token. Every other stage computes this
function and nothing else.

    S_t = (I - k_t (b_t*k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t*v_t)^T
    o_t = scale * S_t^T q_t

Source of the recurrence: Gated DeltaNet-2, arXiv 2605.22791, equations 8 to 12.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gdn2_kernels.tile import compute_dtype


def step(state, token):
    """One token: decay, erase, write, read.

    state (B, H, K, V); of the token q, k, g, b (B, H, K) and v, w (B, H, V).
    """
    q, k, v, g, b, w = token
    state = jnp.exp(g)[..., None] * state
    erased = jnp.einsum("bhk,bhkv->bhv", b * k, state, precision=lax.Precision.HIGHEST)
    state = state + k[..., None] * (w * v - erased)[..., None, :]
    return state, jnp.einsum("bhk,bhkv->bhv", q, state, precision=lax.Precision.HIGHEST)


def recurrence(
    q, k, v, g, b, w, scale, initial_state, *, precision, chunk_size, interpret
):  # fmt: skip
    """Scan over tokens. Shapes and contract as `gdn2`.

    Always computed in full: `precision`, `chunk_size` and `interpret` change nothing
    here. float64 inputs are computed in float64. The gradient is JAX's own. It keeps
    one (K, V) state per token, 4 * B * L * H * K * V bytes, and computes the rest of a
    step again.
    """
    del precision, chunk_size, interpret
    dtype = compute_dtype(q, k, v, g, b, w)
    inputs = (q.astype(dtype) * scale, k, v, g, b, w)
    tokens = [jnp.moveaxis(x.astype(dtype), 1, 0) for x in inputs]
    # Without checkpoint three states per token are kept: entering, decayed, leaving.
    one_step = jax.checkpoint(step, prevent_cse=False)
    final_state, o = lax.scan(one_step, initial_state, tuple(tokens))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), final_state
