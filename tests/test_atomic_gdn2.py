"""The stage atomic_gdn2: two launches, residuals saved or computed again, memory full of NaN, the past blind to the future."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import gdn2_kernels as gk
from gdn2_kernels.stages.atomic_gdn2 import chunk, stage
from helpers import GATES, NAMES, TOLERANCE, assert_close, make, relative_error, results, truth, wrong_signs

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


def launches(fn, *args):
    """How many pallas_call equations a function holds, in all its nested programs."""

    def count(jaxpr):
        inner = [x for eqn in jaxpr.eqns if eqn.primitive.name != "pallas_call" for x in jax.tree.leaves(
            [*eqn.params.values()], is_leaf=lambda y: hasattr(y, "eqns") or hasattr(y, "jaxpr"))]  # fmt: skip
        inner = [getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        return sum(e.primitive.name == "pallas_call" for e in jaxpr.eqns) + sum(map(count, inner))

    return count(jax.make_jaxpr(fn)(*args).jaxpr)


def test_one_launch_forward_and_one_backward():
    inputs, state, _, _ = case("-1")[0]

    def forward(stage_name):
        return lambda *x: gk.gdn2(*x, stage=stage_name)[0].sum()

    assert launches(forward("atomic_gdn2"), *inputs) == 1
    assert launches(jax.grad(forward("atomic_gdn2"), argnums=range(6)), *inputs) == 2
    assert launches(jax.grad(forward("atomic_ops"), argnums=range(6)), *inputs) == 9


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_every_decay_at_once(precision):
    for gate in GATES:
        x, wanted = case(gate)
        found = results("atomic_gdn2", *x, precision=precision)
        assert_close(found, wanted, TOLERANCE["float32", precision])
        if precision != "default":
            floor = max(1e-30, 1e-6 * np.abs(wanted["dg"]).mean())
            assert wrong_signs(found["dg"], wanted["dg"], floor) == 0


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_every_chunk_size(chunk_size):
    x, wanted = case("bursts")
    assert_close(results("atomic_gdn2", *x, chunk_size=chunk_size), wanted, EXACT)


def test_saved_and_recomputed_residuals_give_the_same_bits():
    x, wanted = case("per channel")
    saved, again = (with_options(x, residuals=choice) for choice in ("save", "recompute"))
    assert_close(again, wanted, EXACT)
    for name in NAMES:
        np.testing.assert_allclose(again[name], saved[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_residuals_take_the_bytes_that_are_stated(residuals):
    B, L, H, K, V, C = 1, 100, 2, 48, 128, 64
    options = stage.Options(B, H, 2, C, 128, 128, "high", residuals, True)
    keys = jax.ShapeDtypeStruct((B, 128, H * 128), jnp.float32)
    scale, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1), (B, H, 128, 128)))
    _, kept = jax.eval_shape(functools.partial(stage.forward, options=options), *[keys] * 6, scale, state)
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


def test_later_tokens_change_nothing_before_them():
    """To the bit, in outputs and in the gradients of a loss on earlier outputs; over a chunk's end and inside one."""
    inputs, state, do, d_state = case("-1")[0]
    other = make(GATE_L, 16, 24, B=1, H=2, gate="bursts", seed=1)[0]
    base = results("atomic_gdn2", inputs, state, do, 0 * d_state, precision="high")
    for t in (3, 33, 64):
        mixed = [np.concatenate([x[:, :t], y[:, t:]], 1) for x, y in zip(inputs, other)]
        o = results("atomic_gdn2", mixed, state, do, 0 * d_state, precision="high")["o"]
        assert np.array_equal(o[:, :t], base["o"][:, :t])
        early_do = np.concatenate([do[:, :t], 0 * do[:, t:]], 1)
        first, second = (results("atomic_gdn2", x, state, early_do, 0 * d_state, precision="high") for x in (inputs, mixed))
        for name in ("dq", "dk", "dv", "dg", "db", "dw"):
            assert np.array_equal(first[name][:, :t], second[name][:, :t]), name
            assert not second[name][:, t:].any(), name


def test_gradient_of_scale_also_at_zero():
    inputs, _, do, _ = case("-1")[0]

    def loss(scale):
        return (gk.gdn2(*inputs, scale=scale, stage="atomic_gdn2", precision="highest")[0] * do).sum()

    o = gk.gdn2(*inputs, scale=1.0, stage="wy", precision="highest")[0]
    for scale in (0.3, 0.0):
        assert float(jax.grad(loss)(scale)) == pytest.approx(float((o * do).sum()), rel=1e-4)


@pytest.mark.parametrize("precision, bound", [("default", 2e-2), ("high", 2e-5), ("highest", 2e-6)])
def test_errors_at_128_channels(precision, bound):
    for gate in ("-0.01", "-1", "-20", "per channel", "bursts"):
        x = make(130, 128, 128, B=1, H=1, gate=gate)
        found, wanted = results("atomic_gdn2", *x, precision=precision), truth(*x)
        # Where a channel decays alike at every token, the rounding of exp(g) repeats in every factor and adds up.
        limit = max(bound, 3e-6) if gate == "per channel" else bound
        for name in NAMES:
            assert relative_error(found[name], wanted[name]) < limit, (gate, name)


def test_heads_share_a_step_as_far_as_they_divide():
    assert [stage.heads_per_step(H, 4) for H in (1, 2, 3, 4, 5, 6, 7, 8, 12)] == [1, 2, 3, 4, 1, 3, 1, 4, 4]


def test_side_by_side_runs_all_to_their_ends():
    seen = []

    def head(name, steps):
        for step in range(steps):
            seen.append((step, name))
            yield

    chunk.side_by_side([head("a", 2), head("b", 3), head("c", 0)])
    assert seen == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "b")]


@pytest.mark.parametrize("chunk_size, words", [(8, "16 to 128.*8"), (256, "16 to 128.*256")])
def test_chunk_sizes_refused_by_name(chunk_size, words):
    inputs, *_ = make(4, 8, 8, B=1, H=1)
    with pytest.raises(ValueError, match=f"^chunk_size: .*{words}"):
        gk.gdn2(*inputs, stage="atomic_gdn2", chunk_size=chunk_size)
