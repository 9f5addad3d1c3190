"""What Pallas stages share around their launches: the arrays as kernels see them, and
what kernels do not serve.
"""

import jax
import jax.numpy as jnp

LANES = 128  # of a vector register
LARGEST_D = 256


def padded(D: int) -> int:
    """Channels as kernels see them. A block takes D of H*D lanes, and the chip wants
    whole registers of 128: the channels in between are zeros, which do nothing.
    """
    return -(-D // LANES) * LANES


def tokens_in(x: jax.Array, rows: int) -> jax.Array:
    """(B, L, H, D) -> (B, rows, H*padded(D)), filled with zeros."""
    B, L, H, D = x.shape
    x = jnp.pad(x, ((0, 0), (0, rows - L), (0, 0), (0, padded(D) - D)))
    return x.reshape(B, rows, H * padded(D))


def tokens_out(x: jax.Array, L: int, H: int, D: int) -> jax.Array:
    """Inverse of `tokens_in`, the filling cut off."""
    return x.reshape(*x.shape[:2], H, padded(D))[:, :L, :, :D]


def state_in(state: jax.Array, shape) -> jax.Array:
    """(B, H, K, V) filled with zeros up to another such shape."""
    return jnp.pad(state, [(0, to - n) for n, to in zip(state.shape, shape)])


def state_out(state: jax.Array, shape) -> jax.Array:
    """Inverse of `state_in`: the filling cut off, down to `shape`."""
    return state[:, :, : shape[2], : shape[3]]


def mesh_axes(array) -> dict:
    """Inside shard_map outputs vary over the mesh axes that the inputs (all alike) vary
    over, and have to say so in the words of the JAX at hand.
    """
    kind = jax.typeof(array)
    if hasattr(kind, "vma"):
        return {"vma": kind.vma}
    return {"manual_axis_type": kind.mat}


def check(stage, q, v, chunk_size, smallest, largest):
    """Refuse by name what kernels do not serve."""
    problem = refusal(stage, q, v, chunk_size, smallest, largest)
    if problem:
        raise ValueError(problem)


def refusal(stage, q, v, chunk_size, smallest, largest) -> str | None:
    """Why a stage of kernels cannot serve these arguments; None if it can."""
    if q.dtype == jnp.float64:
        return (
            f"q: expected float32 or bfloat16 for stage={stage!r} (a TPU kernel has no "
            "float64), got float64; stage='wy' computes in float64"
        )
    for name, x in (("q", q), ("v", v)):
        D = x.shape[-1]
        if D % 8 or D > LARGEST_D:
            return (
                f"{name}: expected channels a multiple of 8 up to {LARGEST_D} for "
                f"stage={stage!r}, got {D}"
            )
    if chunk_size is not None and not smallest <= chunk_size <= largest:
        return (
            f"chunk_size: expected {smallest} to {largest} for stage={stage!r}, got "
            f"{chunk_size}"
        )
    return None
