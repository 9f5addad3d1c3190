"""jit, grad, vmap, scan, checkpoint, shard_map, x64 and the program's own matmul precision leave the answer alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gdn2_kernels as gk
from helpers import KERNELS, make, once, rest_once, x64

INPUTS, STATE, DO, D_STATE = make(20, 8, 16, gate="-1")
stages = pytest.mark.parametrize("stage", gk.STAGES)


def run(stage, *inputs, **options):
    return gk.gdn2(*inputs, stage=stage, precision="high", chunk_size=16, **options)


def shard_map(stage, f, **options):
    # JAX's interpreter of kernels does not know which values vary over a mesh; compiled kernels do (see the last test).
    return jax.shard_map(f, **options, check_vma=stage not in KERNELS)


def loss(stage, inputs, state=None):
    o, final_state = run(stage, *inputs, initial_state=state)
    return (o * DO[: o.shape[0]]).sum() + (final_state * D_STATE[: o.shape[0]]).sum()


@functools.cache
def plain(stage):
    return run(stage, *INPUTS), jax.grad(lambda x: loss(stage, x))(INPUTS)


def same(found, expected, tolerance=2e-5):
    # Another program may sum in another order: equal to rounding.
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y).max())


@stages
def test_jit(stage):
    same(jax.jit(lambda x: run(stage, *x))(INPUTS), plain(stage)[0])
    same(jax.jit(jax.grad(lambda x: loss(stage, x)))(INPUTS), plain(stage)[1])


@stages
def test_vmap(stage):
    stacked = [np.stack([x, x[::-1]]) for x in INPUTS]
    o, state = jax.vmap(lambda *x: run(stage, *x))(*stacked)
    same((o[0], state[0]), plain(stage)[0])
    same((o[1, ::-1], state[1, ::-1]), plain(stage)[0])
    gradients = jax.vmap(jax.grad(lambda x: loss(stage, x)))(stacked)
    same([x[0] for x in gradients], plain(stage)[1])


@stages
def test_scan_over_pieces(stage):
    pieces = [np.moveaxis(x.reshape(2, 4, 5, 2, -1), 1, 0) for x in INPUTS]

    def step(state, x):
        o, state = run(stage, *x, initial_state=state)
        return state, o

    state, o = jax.lax.scan(step, jnp.zeros_like(STATE), pieces)
    same((jnp.moveaxis(o, 0, 1).reshape(2, 20, 2, 16), state), plain(stage)[0])


@once
@stages
def test_checkpoint(stage):
    same(jax.grad(jax.checkpoint(lambda x: loss(stage, x)))(INPUTS), plain(stage)[1])


@stages
def test_state_of_none_in_a_pytree(stage):
    def from_dict(x):
        return loss(stage, x["inputs"], x["state"])

    gradients = jax.jit(jax.grad(from_dict))({"inputs": INPUTS, "state": None})
    assert gradients["state"] is None
    same(gradients["inputs"], plain(stage)[1])


@stages
def test_x64_on_gives_the_same_float32_numbers(stage):
    expected = plain(stage)
    with x64():
        o, state = run(stage, *INPUTS)
        gradients = jax.grad(lambda x: loss(stage, x))(INPUTS)
    assert o.dtype == state.dtype == np.float32 and all(x.dtype == np.float32 for x in gradients)
    same(((o, state), gradients), expected)


SETTINGS = ["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]


@pytest.mark.parametrize(
    "stage, setting",
    rest_once(
        [(stage, x) for stage in gk.STAGES for x in (SETTINGS if stage not in KERNELS else ["highest"])],
        *[(stage, "highest") for stage in gk.STAGES],
    ),
)
def test_matmul_precision_of_the_program(stage, setting):
    expected = plain(stage)
    with jax.default_matmul_precision(setting):
        found = jax.jit(lambda x: (run(stage, *x), jax.grad(lambda x: loss(stage, x))(x)))(INPUTS)
    same(found, expected)


@once
@stages
def test_strict_dtype_promotion(stage):
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in INPUTS]
    expected = run(stage, *narrow)
    with jax.numpy_dtype_promotion("strict"):
        same(run(stage, *narrow), expected)


@stages
def test_shard_map_over_batch_and_heads(stage):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "head"))
    data, state = PartitionSpec("batch", None, "head"), PartitionSpec("batch", "head")

    @functools.partial(shard_map, stage, mesh=mesh, in_specs=(data,) * 6, out_specs=(data, state))
    def sharded(*x):
        return run(stage, *x)

    same(jax.jit(sharded)(*INPUTS), plain(stage)[0])

    def sharded_loss(x):
        o, final_state = sharded(*x)
        return (o * DO).sum() + (final_state * D_STATE).sum()

    same(jax.jit(jax.grad(sharded_loss))(tuple(INPUTS)), tuple(plain(stage)[1]))


@stages
def test_arrays_whose_types_carry_their_sharding(stage):
    """A mesh of explicit axes, what jax.make_mesh makes by default in newer JAX."""
    mesh = jax.make_mesh((2, 2), ("batch", "head"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("batch", None, "head"))
    sharded = [jax.device_put(x, sharding) for x in INPUTS]
    o, state = run(stage, *sharded)
    assert jax.typeof(o).sharding.spec[0] == jax.typeof(state).sharding.spec[0] == "batch"
    same((o, state), plain(stage)[0])

    def loss_of(x):
        o, final_state = run(stage, *x)
        return jnp.square(o).sum() + jnp.square(final_state).sum()

    same(jax.jit(jax.grad(loss_of))(sharded), jax.jit(jax.grad(loss_of))(INPUTS))


@stages
def test_replicated_state_and_gate_under_shard_map(stage):
    """One state for all of the batch, and a gate made inside: the state's gradient is the sum over shards, once."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    batch, everywhere = PartitionSpec("batch"), PartitionSpec()

    def without_decay(q, k, v, b, w, state):
        state = jnp.broadcast_to(state, (q.shape[0], *state.shape[1:]))
        return run(stage, q, k, v, jnp.zeros(k.shape), b, w, initial_state=state)

    specs = dict(in_specs=(batch,) * 5 + (everywhere,), out_specs=(batch, batch))
    sharded = shard_map(stage, without_decay, mesh=mesh, **specs)

    def gradient(f):
        def of_state(state):
            o, final_state = f(*[x for i, x in enumerate(INPUTS) if i != 3], state)
            return (o * DO).sum() + (final_state * D_STATE).sum()

        return jax.jit(jax.grad(of_state))(STATE[:1])

    same(gradient(sharded), gradient(without_decay))


@pytest.mark.parametrize("stage", KERNELS)
def test_compiled_kernels_say_what_varies_over_the_mesh(stage):
    """Lowered for a TPU with JAX's own check of shard_map on, forward and backward, a replicated state among the inputs."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    batch, everywhere = PartitionSpec("batch"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(batch,) * 6 + (everywhere,), out_specs=(batch, batch))
    def sharded(*x):
        return run(stage, *x[:6], initial_state=jnp.broadcast_to(x[6], STATE[:1].shape), interpret=False)

    def loss(*x):
        o, state = sharded(*x)
        return o.sum() + state.sum()

    traced = jax.jit(jax.grad(loss, argnums=range(7))).trace(*INPUTS, STATE[:1])
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
