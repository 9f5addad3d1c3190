"""Stage 2, the slow baseline: the recurrence as a parallel prefix of affine maps.

A token maps the state by S -> A_t S + M_t with

    A_t = (I - k_t (b_t*k_t)^T) diag(exp(g_t))    (K, K)
    M_t = k_t (w_t*v_t)^T                         (K, V)

and maps compose: (A, M) after (A', M') is (A A', A M' + M). Composition is associative,
so all prefixes come in 2 log2(L) steps (Blelloch, "Prefix sums and their applications",
1990). Each step multiplies whole K x K matrices, and every token owns one: that is what
this form costs, and why the book goes on.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gdn2_kernels.tile import compute_dtype, matmul

HBM_BYTES = 16 * 2**30  # of one v5e chip
ALL_AT_ONCE_BYTES = HBM_BYTES // 2  # the other half is left to the rest of the program


# Alive at the peak of the backward pass, in units of one pair of maps per token: the
# maps, the states and the halves that the scan is working on. Read off what the v5e
# compiler reports (3.0 to 3.3 once the matrices are too large to stay in VMEM, from
# about L = 2048 at K = 128; less before that); a test holds it there.
COPIES = 3.5


def head_bytes(L: int, K: int, V: int, itemsize: int = 4) -> int:
    """Bytes of v5e memory that forward and backward of one (batch, head) pair take at
    most.

    A K x K and a K x V matrix for each of L tokens, COPIES times. The minor axis of an
    array fills whole rows of 128 lanes on a TPU, so 64 channels take the room of 128.
    (XLA on a CPU pads nothing and keeps half as many again.)
    """
    lanes = sum(-(-D // 128) * 128 for D in (K, V))
    return int(COPIES * L * K * lanes * itemsize)


def product(x, y):
    """Always in float32: the matrices hold decays, and in bfloat16 a decay above 0.998
    is one and never forgets. It costs no time where memory is the limit, as it is here.
    """
    return matmul(x, y, "highest")


def compose(later, earlier):
    """(A, M) after (A', M'): apply the earlier map, then the later one."""
    (A_earlier, M_earlier), (A, M) = earlier, later
    return product(A, A_earlier), product(A, M_earlier) + M


def prefixes(A, M, reverse=False):
    """M of every prefix: the states, if the first state is zero."""

    def after(earlier, later):
        return compose(later, earlier)

    return lax.associative_scan(after, (A, M), reverse=reverse)[1]


@jax.custom_vjp
def linear_scan(A: jax.Array, M: jax.Array) -> jax.Array:
    """All states of S_t = A_t S_{t-1} + M_t from S_{-1} = 0.

    Arguments: A (L, K, K), M (L, K, V). Returns: (L, K, V).

    The adjoint of a linear recurrence is a linear recurrence that runs the other way,
    D_t = A_{t+1}^T D_{t+1} + dS_t, so the backward pass is a second scan.
    Differentiating through the scan instead would keep the matrices of all its levels.
    """
    return prefixes(A, M)


def _linear_scan_fwd(A, M):
    S = prefixes(A, M)
    return S, (A, S)


def _linear_scan_bwd(residuals, dS):
    A, S = residuals
    A_next = jnp.concatenate([A[1:], jnp.zeros_like(A[:1])]).mT
    D = prefixes(A_next, dS, reverse=True)
    S_before = jnp.concatenate([jnp.zeros_like(S[:1]), S[:-1]])
    return product(D, S_before.mT), D


linear_scan.defvjp(_linear_scan_fwd, _linear_scan_bwd)


def one_head(q, k, v, g, b, w, initial_state):
    """One head of one sequence.

    q, k, g, b (L, K); v, w (L, V); initial_state (K, V).
    Returns: o (L, V), final state (K, V).
    """
    decay = jnp.exp(g)
    diagonal = decay[:, None, :] * jnp.eye(decay.shape[-1], dtype=decay.dtype)
    A = diagonal - k[:, :, None] * (b * k * decay)[:, None, :]
    M = k[:, :, None] * (w * v)[:, None, :]
    # The initial state enters through the first token, so that the prefix of A alone is
    # never needed.
    M = M.at[0].add(product(A[0], initial_state))
    S = linear_scan(A, M)
    return product(q[:, None, :], S)[:, 0], S[-1]


def associative_scan(
    q, k, v, g, b, w, scale, initial_state, *, precision, chunk_size, interpret
):  # fmt: skip
    """Parallel prefix over tokens. Shapes and contract as `gdn2`; `precision`,
    `chunk_size` and `interpret` change nothing.

    Memory: `head_bytes(L, K, V)` for each head worked on at once. All heads are, while
    that stays below half of a v5e's memory; above it they are mapped one after another,
    and the backward pass scans a head again instead of keeping its matrices.

    Raises:
      ValueError: not even one head fits the 16 GiB of a v5e.
    """
    del precision, chunk_size, interpret
    B, L, H, K = q.shape
    V = v.shape[-1]
    dtype = compute_dtype(q, k, v, g, b, w)
    needed = head_bytes(L, K, V, jnp.dtype(dtype).itemsize)
    if needed > HBM_BYTES:
        raise ValueError(
            f"stage='associative_scan' needs {needed:,} bytes for one head of "
            f"L={L}, K={K}, V={V}: a K x K and a K x V matrix for every token. "
            f"A v5e has {HBM_BYTES:,} bytes. Use stage='wy', or a shorter L with the "
            "state carried over."
        )

    def heads_first(x):  # (B, L, H, D) -> (B*H, L, D)
        return jnp.moveaxis(x.astype(dtype), 2, 1).reshape(B * H, L, x.shape[-1])

    q = q.astype(dtype) * scale
    inputs = [heads_first(x) for x in (q, k, v, g, b, w)]
    inputs.append(initial_state.reshape(B * H, K, V))
    if B * H * needed <= ALL_AT_ONCE_BYTES:
        o, final_state = jax.vmap(one_head)(*inputs)
    else:
        o, final_state = lax.map(lambda x: jax.checkpoint(one_head)(*x), inputs)
    o = jnp.moveaxis(o.reshape(B, H, L, V), 1, 2)
    return o.astype(v.dtype), final_state.reshape(B, H, K, V)
