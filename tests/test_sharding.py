"""Spread over eight simulated devices, the op and its gradients are what one device computes; and what the compiled
programs say to each other is what the chapter says.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gdn2_kernels as gk
from gdn2_kernels import sharding
from gdn2_kernels.v5e.collectives import collectives, summary
from helpers import NAMES, assert_close, make, once

pytestmark = once  # at the other levels the chapter of this name runs


def mesh(**axes):
    devices = np.array(jax.devices()[: np.prod([*axes.values()])])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


@functools.cache
def problem(gate, L=16):
    inputs, state, do, d_state = make(L, 8, 16, B=8, H=8, gate=gate)
    return [*map(jnp.asarray, inputs), jnp.float32(0.3), jnp.asarray(state)], (jnp.asarray(do), jnp.asarray(d_state))


def found(run, gate, L=16):
    """Dict of both results and the gradients of the inputs, the initial state and the scale."""

    # Half of the time would go into optimising a program that runs once.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(arrays, cotangents):
        results, pull = jax.vjp(lambda *x: run(*x[:6], scale=x[6], initial_state=x[7]), *arrays)
        return results, pull(cotangents)

    results, gradients = both(*problem(gate, L))
    *six, scale, state = map(np.asarray, gradients)
    return dict(zip((*NAMES, "scale"), (*map(np.asarray, results), *six, state, scale.reshape(1))))


@functools.cache
def one_device(gate, L=16):
    return found(functools.partial(gk.gdn2, stage="wy", precision="highest"), gate, L)


def check(run, gate, L=16, tolerance=5e-6):
    assert_close(found(run, gate, L), one_device(gate, L), tolerance, (*NAMES, "scale"))


MESHES = [dict(batch=8, head=1), dict(batch=4, head=2), dict(batch=2, head=4), dict(batch=1, head=8), dict(head=4), dict(batch=2)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_mesh_is_one_device(axes):
    # The law, because it compiles quickly; other stages are the same call.
    check(functools.partial(sharding.gdn2_sharded, mesh(**axes), stage="recurrence"), "per channel")


@pytest.mark.parametrize("stage", ["associative_scan", "wy"])
def test_every_kind_of_stage(stage):
    run = functools.partial(sharding.gdn2_sharded, mesh(batch=4, head=2), stage=stage, precision="highest")
    check(run, "per channel")


@pytest.mark.parametrize("n, gate", [(2, "bursts"), (4, "-20"), (8, "bursts"), (8, "-0.01")])
def test_sequence_parallel_is_serial(n, gate):
    """Carried state, strong decay and none, gradients of everything."""
    check(functools.partial(sharding.sequence_parallel, mesh(sequence=n), stage="recurrence"), gate)


def test_sequence_parallel_with_chunks_and_the_other_axes():
    run = functools.partial(sharding.sequence_parallel, mesh(batch=2, sequence=2, head=2), stage="wy", precision="highest")
    check(run, "bursts")


def test_an_affine_map_is_what_the_tokens_do():
    """For widths that fit one call and for those that take two."""
    for K, V in ((8, 16), (136, 128)):
        inputs, state, _, _ = make(5, K, V, B=1, H=1, gate="-0.1")
        maps = sharding.affine_map(*map(jnp.asarray, inputs), stage="recurrence")
        assert maps.shape == (1, 1, K, K + V)
        _, expected = gk.gdn2(*map(jnp.asarray, inputs), initial_state=jnp.asarray(state), stage="recurrence")
        np.testing.assert_allclose(maps[..., :K] @ state + maps[..., K:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", ["atomic_ops"])  # mxu is the same call, and slow to trace
def test_kernels_lower_for_a_tpu_on_every_axis(stage):
    """Forward and backward; a kernel that is not inside shard_map would be refused."""
    inputs = problem("per channel")[0][:6]
    for run in (
        functools.partial(sharding.gdn2_sharded, mesh(batch=2, head=4)),
        functools.partial(sharding.sequence_parallel, mesh(sequence=2)),
    ):

        def loss(*x):
            o, state = run(*x, stage=stage, interpret=False)
            return o.sum() + state.sum()

        traced = jax.jit(jax.grad(loss, argnums=range(6))).trace(*inputs)
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_plain_jit_cannot_cut_a_kernel():
    where = NamedSharding(mesh(head=8), PartitionSpec(None, None, "head"))
    x = [jax.ShapeDtypeStruct((1, 128, 8, 128), jnp.float32, sharding=where)] * 6
    traced = jax.jit(lambda *x: gk.gdn2(*x, stage="mxu", interpret=False)).trace(*x)
    with pytest.raises(NotImplementedError, match="shard_map"):
        traced.lower(lowering_platforms=("tpu",))


# ------------------------------------------------------ what is said between devices


def talk(run, axes, gradient=True):
    m = mesh(**axes)
    arrays, cotangents = problem("per channel")
    spec = PartitionSpec(*(x if x in axes else None for x in ("batch", "sequence", "head")))
    inputs = [jax.device_put(x, NamedSharding(m, spec)) for x in arrays[:6]]

    def both(*x):
        results, pull = jax.vjp(run, *x)
        return results, pull(cotangents)

    text = jax.jit(both if gradient else run).lower(*inputs).compile().as_text()
    return collectives(text, 8)


@pytest.mark.parametrize("axes", [dict(head=8), dict(batch=2, head=4)], ids=str)
def test_batch_and_heads_need_no_word(axes):
    m = mesh(**axes)
    assert talk(functools.partial(sharding.gdn2_sharded, m, stage="associative_scan"), axes) == []


def test_tokens_need_one_gather_each_way():
    axes = dict(sequence=8)
    found = talk(functools.partial(sharding.sequence_parallel, mesh(**axes), stage="recurrence"), axes)
    B, H, K, V = 8, 8, 8, 16
    gathers = [x for x in found if x.kind == "all-gather"]
    assert sorted(x.bytes for x in gathers) == sorted(4 * 8 * B * H * K * x for x in (K + V, 2 * V))
    assert all(x.devices == 8 and x.times == 1 for x in gathers)
    # This program also hands out the cotangents of the final state; nothing else is said.
    assert all(x.bytes <= 4 * B * H * K * V for x in found if x not in gathers)


TEXT = """
HloModule example
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
}
%cond (p: (s32[], f32[8])) -> pred[] {
  %n = s32[] constant(5)
}
%part (p: bf16[4]) -> bf16[16] {
  %g = bf16[16]{0} all-gather(%p), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  %f1 = bf16[16]{0} fusion(%b), kind=kCustom, calls=%part
  %f2 = bf16[16]{0} fusion(%b), kind=kCustom, calls=%part
  %s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%a), channel_id=3, source_target_pairs={{0,1}}
  %d = f32[8]{0} collective-permute-done(%s)
  %q = f32[2]{0} reduce-scatter(%a), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""


def test_reading_a_program():
    found = {x.kind: x for x in collectives(TEXT, 4)}
    assert (found["all-reduce"].bytes, found["all-reduce"].times, found["all-reduce"].devices) == (32, 5, 2)
    assert (found["all-gather"].bytes, found["all-gather"].times, found["all-gather"].devices) == (32, 1, 4)
    assert (found["collective-permute"].bytes, found["reduce-scatter"].bytes) == (32, 32)
    total = summary(list(found.values()))
    assert total["all-reduce"] == 5 and total["bytes"] == 5 * 32 + 3 * 32
    # 3/4 of the bytes pass, two links at once, two hops to the far side
    assert found["all-gather"].microseconds == pytest.approx(2 + 1e6 * 0.75 * 32 / 9e10)


# ------------------------------------------------------ which mesh


def test_suggestions_are_even_and_the_largest():
    for B in range(1, 20):
        for H in range(1, 20):
            found = sharding.suggest_mesh(B, H, 8)
            assert found.share == (B // found.batch, H // found.head) and B % found.batch == H % found.head == 0
            used = max(x * y for x in range(1, 9) for y in range(1, 9) if x * y <= 8 and B % x == H % y == 0)
            assert found.batch * found.head == used and found.reasons


@pytest.mark.parametrize("B, H, expected", [(8, 6, (8, 1)), (4, 6, (4, 2)), (16, 8, (8, 1)), (2, 8, (2, 4)), (1, 6, (1, 6)), (3, 5, (1, 5))])
def test_suggestions(B, H, expected):
    found = sharding.suggest_mesh(B, H, 8)
    assert (found.batch, found.head) == expected
    assert any("idle" in x for x in found.reasons) == (expected[0] * expected[1] < 8)
    assert found.mesh().shape == dict(zip(("batch", "head"), expected))


# ------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "run, axes, said",
    [
        (sharding.gdn2_sharded, dict(head=3), "a head count H that the 3 devices of mesh axis 'head' divide, got 8"),
        (sharding.gdn2_sharded, dict(batch=5), "a batch B that the 5 devices of mesh axis 'batch' divide, got 8"),
        (sharding.gdn2_sharded, dict(x=2), "mesh: expected axes named 'batch', 'head', got ('x',)"),
        (sharding.sequence_parallel, dict(batch=2), "'sequence' among them"),
        (sharding.sequence_parallel, dict(sequence=3), "a length L that the 3 devices of mesh axis 'sequence' divide, got 16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(run, axes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        run(mesh(**axes), *problem("per channel")[0][:6])


def test_inputs_are_checked_as_one_device_would():
    inputs = problem("per channel")[0][:6]
    with pytest.raises(ValueError, match="g: expected log decays"):
        sharding.gdn2_sharded(mesh(head=2), *inputs[:3], -inputs[3], *inputs[4:])
    with pytest.raises(ValueError, match="B: expected a whole number"):
        sharding.suggest_mesh(0, 1, 8)
