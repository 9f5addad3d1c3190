"""The stage atomic_gdn2: two launches, residuals saved or computed again, memory full of NaN, the past blind to the future."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import gdn2_kernels as gk
from gdn2_kernels import v5e
from gdn2_kernels.stages import launch
from gdn2_kernels.stages.atomic_gdn2 import stage
from helpers import GATES, NAMES, TOLERANCE, assert_close, make, once, rest_once, results, truth, wrong_signs

GATE_L = 70  # one shape, compiled once for each precision
EXACT = TOLERANCE["float32", "highest"]


@functools.cache
def case(gate):
    x = make(GATE_L, 16, 24, B=1, H=2, gate=gate)
    return x, truth(*x)


def with_options(x, *, precision="highest", chunk_size=None, interpret=True, residuals="save"):
    """Results of the stage itself, with the choices that `gdn2` does not offer."""
    inputs, state, do, d_state = x
    scale = jnp.float32(inputs[0].shape[-1] ** -0.5)

    def run(*inputs_and_state):
        return stage.atomic_gdn2(
            *inputs_and_state[:6], scale, inputs_and_state[6], precision=precision, chunk_size=chunk_size,
            interpret=interpret, residuals=residuals,
        )  # fmt: skip

    @jax.jit
    def all_results(inputs, state, do, d_state):
        outputs, pull_back = jax.vjp(run, *inputs, state)
        return *outputs, *pull_back((do, d_state))

    found = all_results([jnp.asarray(a) for a in inputs], state, do, d_state)
    return dict(zip(NAMES, map(np.asarray, found)))


def test_one_launch_forward_and_one_backward():
    inputs, state, _, _ = case("-1")[0]

    def forward(stage_name):
        return lambda *x: gk.gdn2(*x, stage=stage_name)[0].sum()

    assert len(v5e.launches(forward("atomic_gdn2"), *inputs)) == 1
    assert len(v5e.launches(jax.grad(forward("atomic_gdn2"), argnums=range(6)), *inputs)) == 2
    assert len(v5e.launches(jax.grad(forward("atomic_ops"), argnums=range(6)), *inputs)) == 9


@pytest.mark.parametrize("precision", rest_once(["default", "high", "highest"], "high"))
def test_every_decay_at_once(precision):
    for gate in GATES:
        x, wanted = case(gate)
        found = results("atomic_gdn2", *x, precision=precision)
        assert_close(found, wanted, TOLERANCE["float32", precision])
        if precision != "default":
            floor = max(1e-30, 1e-6 * np.abs(wanted["dg"]).mean())
            assert wrong_signs(found["dg"], wanted["dg"], floor) == 0


@once
@pytest.mark.parametrize("chunk_size", [16, 128])
def test_every_chunk_size(chunk_size):
    x, wanted = case("bursts")
    assert_close(results("atomic_gdn2", *x, chunk_size=chunk_size), wanted, EXACT)


@once
def test_saved_and_recomputed_residuals_give_the_same_bits():
    x, wanted = case("per channel")
    saved, again = (with_options(x, residuals=choice) for choice in ("save", "recompute"))
    assert_close(again, wanted, EXACT)
    for name in NAMES:
        np.testing.assert_allclose(again[name], saved[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_vmem_follows_from_the_blocks():
    """Blocks twice, scratch once, in tiles of 8 x 128; the number for scale lies elsewhere."""
    inputs, state, _, _ = make(GATE_L, 16, 24, B=1, H=2)
    run = functools.partial(gk.gdn2, stage="atomic_gdn2", interpret=False)
    [forward] = v5e.launches(run, *inputs)
    tokens, square, states = 64 * 256, 2 * 64 * 128, 2 * 128 * 128
    streamed = 7 * tokens + 3 * states  # six inputs and o; initial, entering, final
    assert sum(count for _, _, count in v5e.vmem(forward)) == 4 * (2 * streamed + states)
    [forward] = v5e.launches(lambda *x: jax.vjp(run, *x)[0], *inputs)
    streamed += tokens + 2 * square  # vn; X and Aqk
    assert sum(count for _, _, count in v5e.vmem(forward)) == 4 * (2 * streamed + states)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_residuals_take_the_bytes_that_are_stated(residuals):
    B, L, H, K, V, C = 1, 100, 2, 48, 128, 64
    options = launch.Options(launch.Dims(B, H, 2, C, 128, 128), "high", True)
    keys = jax.ShapeDtypeStruct((B, 128, H * 128), jnp.float32)
    scale, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1), (B, H, 128, 128)))
    run = functools.partial(stage.forward, residuals=residuals, options=options)
    _, kept = jax.eval_shape(run, *[keys] * 6, scale, state)
    stated = stage.residual_bytes(B, L, H, K, V, C, residuals)
    assert stated == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_in_memory_full_of_nan(residuals, capfd):
    """What nothing has written is NaN, and reads that race with writes are reported."""
    x = make(40, 8, 16, B=1, H=2, gate="bursts")
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    found = with_options(x, chunk_size=16, interpret=strict, residuals=residuals)
    assert_close(found, truth(*x), EXACT)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@once
def test_gradient_of_scale_also_at_zero():
    inputs, _, do, _ = case("-1")[0]

    def loss(scale):
        return (gk.gdn2(*inputs, scale=scale, stage="atomic_gdn2", precision="highest")[0] * do).sum()

    o = gk.gdn2(*inputs, scale=1.0, stage="wy", precision="highest")[0]
    for scale in (0.3, 0.0):
        assert float(jax.grad(loss)(scale)) == pytest.approx(float((o * do).sum()), rel=1e-4)


def test_heads_share_a_step():
    """In few groups, and with few places that no head takes."""
    assert [launch.heads_per_step(H, 3) for H in range(1, 13)] == [1, 2, 3, 2, 3, 3, 2, 2, 3, 2, 3, 3]
    assert [launch.heads_per_step(H, 8) for H in (1, 6, 7, 8, 9, 11, 13, 16)] == [1, 6, 7, 8, 3, 6, 7, 8]


@once
@pytest.mark.parametrize("H", [3, 5])
def test_a_group_of_heads_may_reach_over_the_end(H, monkeypatch, capfd):
    """What lies there is NaN in this memory; no head sees it, and every head is right."""
    monkeypatch.setitem(stage.HEADS, "forward", 2)
    x = make(20, 8, 16, B=2, H=H, gate="bursts")
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    assert_close(with_options(x, chunk_size=16, interpret=strict), truth(*x), EXACT)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize("chunk_size, words", [(8, "16 to 128.*8"), (256, "16 to 128.*256")])
def test_chunk_sizes_refused_by_name(chunk_size, words):
    inputs, *_ = make(4, 8, 8, B=1, H=1)
    with pytest.raises(ValueError, match=f"^chunk_size: .*{words}"):
        gk.gdn2(*inputs, stage="atomic_gdn2", chunk_size=chunk_size)
