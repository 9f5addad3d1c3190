"""Gated DeltaNet-2 on more than one device.

Batch and heads are independent, so splitting them (`gdn2_sharded`) takes no
communication at all, forward or backward. Tokens are not: the state passes from each to
the next. But what a piece of the sequence does to the state is one affine map,

    S_out = M S_in + Z        M (K, K), Z (K, V)

and maps compose. So with the sequence split (`sequence_parallel`) every device makes
the map of its own piece, all maps are gathered once, and each device works out the
state that enters its piece. Backward is the mirror image: with dS_out the gradient of
the state that leaves a piece and D what its own outputs owe to the state that enters,

    dS_in = M^T dS_out + D

Mesh axes are named "batch", "head" and "sequence".
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gdn2_kernels import api
from gdn2_kernels.api import gdn2
from gdn2_kernels.tile import compute_dtype, matmul

WIDEST = 256  # channels that a kernel takes


def gdn2_sharded(
    mesh: Mesh, q, k, v, g, b, w, *, scale=None, initial_state=None, **options
):
    """`gdn2` with batch and heads spread over devices. No collectives in the op,
    forward or backward, whatever the stage.

    Arguments:
      mesh: axes named "batch" and "head"; either may be missing. Their sizes divide
        B and H.
      q, k, v, g, b, w, scale, initial_state: as of `gdn2`, whole arrays: (B, L, H, D),
        state (B, H, K, V). Wherever they lie, they are moved to B over "batch" and H
        over "head"; no move if they are there.
      options: stage, precision, chunk_size, interpret, as of `gdn2`.
    Returns: o (B, L, H, V), final_state (B, H, K, V), spread in the same way.
    Raises:
      ValueError: a mesh of other axes, B or H that does not divide, and all that
        `gdn2` says, of the shapes of one device.
    """
    _check_mesh(mesh, ("batch", "head"))
    arrays = _checked(q, k, v, g, b, w, scale, initial_state)
    _check_divides(mesh, arrays[0], batch=0, head=2)
    tokens, state = _specs(mesh)

    def local(*x):
        *inputs, scale, initial_state = x
        return gdn2(*inputs, scale=scale, initial_state=initial_state, **options)

    specs = (*[tokens] * 6, P(), state)
    return _shard_map(local, mesh, specs, (tokens, state))(*arrays)


def sequence_parallel(
    mesh: Mesh, q, k, v, g, b, w, *, scale=None, initial_state=None, **options
):
    """`gdn2` with the tokens spread over devices, equal to it up to rounding.

    One all-gather of (K, K+V) float32 numbers per head, batch entry and device forward,
    one of (K, 2V) backward. Each device runs its piece twice forward: once for its map,
    with K+V value channels, once for its outputs when it knows the state that enters.

    Arguments:
      mesh: an axis "sequence" whose size divides L, so that device r has the r-th
        piece, and, if you like, "batch" and "head" as of `gdn2_sharded`.
      The rest as of `gdn2_sharded`.
    Returns: o (B, L, H, V), spread like the inputs; final_state (B, H, K, V), the state
      after the last token, the same on all devices of "sequence".
    Raises: ValueError, as `gdn2_sharded`.
    """
    _check_mesh(mesh, ("batch", "sequence", "head"), needed="sequence")
    arrays = _checked(q, k, v, g, b, w, scale, initial_state)
    _check_divides(mesh, arrays[0], batch=0, sequence=1, head=2)
    tokens, state = _specs(mesh)
    run = functools.partial(_piece, tuple(sorted(options.items())))
    specs = (*[tokens] * 6, P(), state)
    return _shard_map(run, mesh, specs, (tokens, state))(*arrays)


def _shard_map(f, mesh, in_specs, out_specs):
    # JAX's own check of what varies over the mesh is off: it cannot know that all
    # devices work out one final state, nor does its interpreter of kernels take part.
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


# ------------------------------------------------------ one piece of the sequence


def affine_map(q, k, v, g, b, w, **options):
    """What these tokens do to a state: [M | Z] (B, H, K, K+V) with
    S_out = M S_in + Z.

    No new formula: the columns of the state do not see each other, so the final state
    that starts from the identity and writes nothing is M, and from zero with the true
    values it is Z. Side by side they are one call.
    """
    B, _, H, K = q.shape
    V, dtype = v.shape[-1], compute_dtype(q, k, v, g, b, w)
    nothing = jnp.zeros(k.shape, v.dtype)
    eye = jnp.broadcast_to(jnp.eye(K, dtype=dtype), (B, H, K, K))
    zero = jnp.zeros((B, H, K, V), dtype)

    def final_state(v, w, state):
        return gdn2(q, k, v, g, b, w.astype(v.dtype), initial_state=state, **options)[1]

    if K + V > WIDEST:
        parts = [final_state(nothing, nothing, eye), final_state(v, w, zero)]
        return jnp.concatenate(parts, -1)
    wide_v, wide_w = (jnp.concatenate([nothing, x.astype(v.dtype)], -1) for x in (v, w))
    return final_state(wide_v, wide_w, jnp.concatenate([eye, zero], -1))


def entering_states(maps, initial_state):
    """maps [M | Z] (n, B, H, K, K+V), in order. Returns: the state that enters each
    piece (n, B, H, K, V), and the one that leaves the last.
    """
    K = maps.shape[-2]

    def through(S, x):
        return _product(x[..., :K], S) + x[..., K:], S

    final_state, entering = lax.scan(through, initial_state, maps)
    return entering, final_state


def leaving_cotangents(M, D, d_final_state):
    """The mirror image. M (n, B, H, K, K), D (n, B, H, K, V). Returns: the cotangent of
    the state that leaves each piece, and that of the initial state.
    """

    def back(dS, x):
        M, D = x
        return _product(M.mT, dS) + D, dS

    d_initial_state, leaving = lax.scan(back, d_final_state, (M, D), reverse=True)
    return leaving, d_initial_state


def _product(a, b):
    return matmul(a, b, "highest")  # K x K once per device: exact costs nothing


def _mine(x):
    return x[lax.axis_index("sequence")]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _piece(options, q, k, v, g, b, w, scale, initial_state):
    return _piece_fwd(options, q, k, v, g, b, w, scale, initial_state)[0]


def _piece_fwd(options, q, k, v, g, b, w, scale, initial_state):
    options = dict(options)
    maps = lax.all_gather(affine_map(q, k, v, g, b, w, **options), "sequence")
    entering, final_state = entering_states(maps, initial_state)

    def outputs(*x):
        *inputs, scale, state = x
        return gdn2(*inputs, scale=scale, initial_state=state, **options)

    (o, _), pull = jax.vjp(outputs, q, k, v, g, b, w, scale, _mine(entering))
    return (o, final_state), (pull, maps[..., : q.shape[-1]])


def _piece_bwd(options, kept, cotangents):
    pull, M = kept
    do, d_final_state = cotangents
    # What the own outputs owe to the entering state, later pieces left out.
    D = pull((do, jnp.zeros_like(d_final_state)))[-1]
    # Every device holds a part of d_final_state: their sum is the whole.
    gathered = lax.all_gather(jnp.concatenate([D, d_final_state], -1), "sequence")
    D, d_final_state = jnp.split(gathered, 2, -1)
    leaving, d_initial_state = leaving_cotangents(M, D, d_final_state.sum(0))
    *gradients, _ = pull((do, _mine(leaving)))
    # All devices know it; shard_map adds up what they return.
    first = lax.axis_index("sequence") == 0
    return *gradients, jnp.where(first, d_initial_state, 0)


_piece.defvjp(_piece_fwd, _piece_bwd)


# ------------------------------------------------------ which mesh


class Suggestion(NamedTuple):
    """Devices over batch and over heads, (B, H) that each of them gets, and why."""

    batch: int
    head: int
    share: tuple[int, int]
    reasons: tuple[str, ...]

    def mesh(self, devices=None) -> Mesh:
        """A mesh of the first batch * head `devices` (default: `jax.devices()`)."""
        devices = jax.devices() if devices is None else devices
        wanted = self.batch * self.head
        if len(devices) < wanted:
            raise ValueError(f"devices: expected at least {wanted}, got {len(devices)}")
        return Mesh(
            np.array(devices[:wanted]).reshape(self.batch, self.head), ("batch", "head")
        )


def suggest_mesh(B: int, H: int, devices: int) -> Suggestion:
    """How to spread a batch of B and H heads over that many devices.

    Every device gets the same number of (batch, head) pairs: the cycles of a stage
    depend on that number alone, so an even split is all that counts. Among even splits
    the one with the most devices over the batch is taken: around the op, a layer split
    over heads has to sum its output projection over devices at every token, a layer
    split over the batch only its weights' gradients, once a step.

    Raises: ValueError: B, H or devices below 1.
    """
    for name, n in (("B", B), ("H", H), ("devices", devices)):
        if not isinstance(n, int) or n < 1:
            raise ValueError(
                f"{name}: expected a whole number of at least 1, got {n!r}"
            )
    even = [
        (x, y)
        for x in range(1, devices + 1)
        for y in range(1, devices // x + 1)
        if B % x == 0 and H % y == 0
    ]
    batch, head = max(even, key=lambda pair: (pair[0] * pair[1], pair[0]))
    share = B // batch, H // head
    reasons = [
        f"each device gets {share[0]} x {share[1]} of the {B} x {H} pairs of batch and head"
    ]
    if head == 1:
        reasons.append(
            "the batch alone fills the devices: nothing is summed over devices but gradients of weights"
        )
    else:
        why = (
            f"{batch} is as far as the batch goes"
            if batch > 1
            else "the batch does not divide"
        )
        reasons.append(
            f"{why}, so heads are split {head} ways; the output projection then sums over these"
        )
    idle = devices - batch * head
    if idle:
        reasons.append(
            f"{idle} of {devices} devices stay idle: no even split uses them; another B would, or `sequence_parallel`"
        )
    return Suggestion(batch, head, share, tuple(reasons))


# ------------------------------------------------------ checks


def _check_mesh(mesh, known, needed=None):
    names = tuple(mesh.axis_names)
    if not names or set(names) - set(known) or (needed and needed not in names):
        words = ", ".join(map(repr, known))
        raise ValueError(
            f"mesh: expected axes named {words}{f' ({needed!r} among them)' if needed else ''}, got {names}"
        )


def _check_divides(mesh, q, **axes):
    letters = {"batch": "batch B", "sequence": "length L", "head": "head count H"}
    for name, axis in axes.items():
        size = mesh.shape.get(name, 1)
        if q.shape[axis] % size:
            raise ValueError(
                f"q: expected a {letters[name]} that the {size} devices of mesh axis {name!r} divide, "
                f"got {q.shape[axis]}, shape {q.shape}"
            )


def _specs(mesh):
    batch, sequence, head = (
        x if x in mesh.axis_names else None for x in ("batch", "sequence", "head")
    )
    return P(batch, sequence, head), P(batch, head)


def _checked(q, k, v, g, b, w, scale, initial_state):
    """The checks of `gdn2`, of whole arrays and where g is known, and what it would
    fill in, as arrays: shard_map takes nothing else.
    """
    inputs = api._checked_inputs(q, k, v, g, b, w)
    B, _, H, K = inputs[0].shape
    dtype = compute_dtype(*inputs)
    scale = jnp.asarray(api._checked_scale(scale, K, dtype))
    shape = (B, H, K, inputs[2].shape[-1])
    return *inputs, scale, api._checked_state(initial_state, shape, dtype)
