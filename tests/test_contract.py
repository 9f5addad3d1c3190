"""What every stage promises: the recurrence, for every decay, length, shape and dtype, with all gradients."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from helpers import (
    GATES,
    KERNELS,
    TOLERANCE,
    assert_close,
    make,
    once,
    rest_once,
    results,
    truth,
    wrong_signs,
    x64,
)

stages = pytest.mark.parametrize("stage", gk.STAGES)
# Two stages compute in float32 whatever the word.
PAIRS = [(s, "highest") for s in gk.STAGES[:2]] + [(s, p) for s in gk.STAGES[2:] for p in ("default", "high", "highest")]
PAIRS.remove(("mxu", "default"))  # in its own tests, at 128 channels
stages_and_precisions = pytest.mark.parametrize(
    "stage, precision", rest_once(PAIRS, *PAIRS[:2], *[(s, "high") for s in gk.STAGES])
)
L = 70  # one shape for most tests: it is compiled once


@pytest.mark.parametrize("gate", rest_once(GATES, "-0", "-1000", "per channel", "bursts"))
@stages_and_precisions
def test_every_decay(stage, precision, gate):
    x = make(L, gate=gate)
    found, expected = results(stage, *x, precision=precision), truth(*x)
    assert_close(found, expected, TOLERANCE["float32", precision])
    if precision != "default":
        # Far below the typical size a sign may hang on the rounding of single products.
        floor = max(1e-30, 1e-6 * np.abs(expected["dg"]).mean())
        assert wrong_signs(found["dg"], expected["dg"], floor) == 0


LENGTHS = [1, 2, 7, 16, 17, 33, 64, 65, 300]


@pytest.mark.parametrize(
    "stage, length",
    rest_once(
        [(stage, x) for stage in gk.STAGES for x in (LENGTHS if stage not in KERNELS else [1, 129])],
        *[(stage, 1) for stage in gk.STAGES],
    ),
)
def test_every_length(stage, length):
    x = make(length, 8, 16, B=1, gate="bursts")
    assert_close(results(stage, *x), truth(*x), TOLERANCE["float32", "highest"])


SIZES = [(8, 256), (256, 8), (48, 80), (128, 128), (1, 3)]
KERNEL_SIZES = [(8, 256), (256, 48)]  # 128 of both in their own tests


@once
@pytest.mark.parametrize(
    "stage, K, V", [(stage, *x) for stage in gk.STAGES for x in (KERNEL_SIZES if stage in KERNELS else SIZES)]
)
def test_every_head_size(stage, K, V):
    x = make(19, K, V, B=1, H=1)
    assert_close(results(stage, *x), truth(*x), TOLERANCE["float32", "highest"])


@once
@stages
def test_erase_gate_up_to_two(stage):
    x = make(L, gate="-0.01", b_max=2.0)
    assert_close(results(stage, *x), truth(*x), TOLERANCE["float32", "highest"])


@stages
def test_bfloat16(stage):
    inputs, state, do, d_state = make(L, gate="-1")
    narrow = [np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (*inputs, do)]
    found = results(stage, narrow[:6], state, narrow[6], d_state, precision="high")
    assert_close(found, truth(narrow[:6], state, narrow[6], d_state), TOLERANCE["bfloat16", "high"])
    for name in ("o", "dq", "dk", "dv", "dg", "db", "dw"):
        assert found[name].dtype == jnp.bfloat16, name
    assert found["final_state"].dtype == found["d_initial_state"].dtype == np.float32


@stages
def test_mixed_dtypes_keep_their_own(stage):
    inputs, state, do, d_state = make(L, gate="-0.01")
    # bfloat16 activations with float32 gates, as a layer has them: the decay must not pass through bfloat16.
    mixed = [np.asarray(jnp.asarray(x, jnp.bfloat16)) if i in (0, 1, 2) else x for i, x in enumerate(inputs)]
    found = results(stage, mixed, state, do, d_state, precision="high")
    assert [found[n].dtype for n in ("o", "dq", "dg", "dw")] == [jnp.bfloat16, jnp.bfloat16, np.float32, np.float32]
    assert_close(found, truth(mixed, state, do, d_state), TOLERANCE["bfloat16", "high"])
    exact = ("final_state", "dg", "db", "dw")  # these see no bfloat16 rounding of results, only of do
    rounded_do = np.asarray(jnp.asarray(do, jnp.bfloat16))
    assert_close(found, truth(mixed, state, rounded_do, d_state), TOLERANCE["float32", "high"], exact)


@pytest.mark.parametrize("stage", KERNELS)
def test_kernels_refuse_float64_by_name(stage):
    with x64(), pytest.raises(ValueError, match="^q: .*float64"):
        gk.gdn2(*make(9, 8, 8, dtype=np.float64)[0], stage=stage)


@pytest.mark.parametrize("stage", [stage for stage in gk.STAGES if stage not in KERNELS])
def test_float64(stage):
    with x64():
        x = make(33, gate="per channel", dtype=np.float64)
        x = (x[0], x[1].astype(np.float64), x[2], x[3].astype(np.float64))
        found = results(stage, *x, precision="default")
        assert all(value.dtype == np.float64 for value in found.values())
        assert_close(found, truth(*x), TOLERANCE["float64", "default"])


@once
@pytest.mark.parametrize("missing", ["do", "d_final_state"])
@stages
def test_one_cotangent_alone(stage, missing):
    inputs, state, do, d_state = make(L)
    do, d_state = (0 * do, d_state) if missing == "do" else (do, 0 * d_state)
    found = results(stage, inputs, state, do, d_state)
    assert_close(found, truth(inputs, state, do, d_state), TOLERANCE["float32", "highest"])
    if missing == "do":
        assert not found["dq"].any()


@once
@stages
def test_two_runs_are_equal_and_inputs_stay(stage):
    x = make(L)
    kept = [a.copy() for a in (*x[0], *x[1:])]
    first, second = results(stage, *x), results(stage, *x)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(np.array_equal(a, b) for a, b in zip(kept, (*x[0], *x[1:])))


@once
@pytest.mark.parametrize("axis", ["batch", "heads"])
@stages
def test_batch_and_heads_are_independent(stage, axis):
    def turned(x, state):
        return x[::-1] if axis == "batch" else x[:, ::-1] if state else x[:, :, ::-1]

    inputs, state, do, d_state = make(L, B=2, H=2, gate="-1")
    base = results(stage, inputs, state, do, d_state)
    swapped = results(stage, [turned(x, False) for x in inputs], turned(state, True), turned(do, False), turned(d_state, True))
    for name, value in swapped.items():
        back = turned(value, "state" in name)
        assert np.array_equal(back, base[name]), name


# Each cut compiles two programs: of kernels, that take longer, only one at a chunk's end.
@once
@pytest.mark.parametrize(
    "stage, cut", [(stage, x) for stage in gk.STAGES for x in ([1, 7, 32, 64, 69] if stage not in KERNELS else [64])]
)
def test_split_through_the_state(stage, cut):
    inputs, state, do, d_state = make(L)
    o, final_state = gk.gdn2(*inputs, initial_state=state, stage=stage, precision="highest")
    first, carried = gk.gdn2(*[x[:, :cut] for x in inputs], initial_state=state, stage=stage, precision="highest")
    second, last = gk.gdn2(*[x[:, cut:] for x in inputs], initial_state=carried, stage=stage, precision="highest")
    np.testing.assert_allclose(np.concatenate([first, second], 1), o, atol=5e-6)
    np.testing.assert_allclose(last, final_state, atol=5e-6)


@once
@pytest.mark.parametrize("stage", KERNELS)
def test_later_tokens_change_nothing_before_them(stage):
    """To the bit, in outputs and in the gradients of a loss on earlier outputs; over a chunk's end and inside one."""
    inputs, state, do, d_state = make(L, gate="-1")
    other = make(L, gate="bursts", seed=1)[0]
    base = results(stage, inputs, state, do, 0 * d_state, precision="high")
    for t in (3, 33, 64):
        mixed = [np.concatenate([x[:, :t], y[:, t:]], 1) for x, y in zip(inputs, other)]
        o = results(stage, mixed, state, do, 0 * d_state, precision="high")["o"]
        assert np.array_equal(o[:, :t], base["o"][:, :t])
        early_do = np.concatenate([do[:, :t], 0 * do[:, t:]], 1)
        first, second = (results(stage, x, state, early_do, 0 * d_state, precision="high") for x in (inputs, mixed))
        for name in ("dq", "dk", "dv", "dg", "db", "dw"):
            assert np.array_equal(first[name][:, :t], second[name][:, :t]), name
            assert not second[name][:, t:].any(), name
        assert np.array_equal(first["d_initial_state"], second["d_initial_state"])


@functools.cache
def at_full_width(gate):
    x = make(130, 128, 128, B=1, H=1, gate=gate)
    return x, truth(*x)


# A channel that decays alike at every token rounds alike at every token: in products of exp(g) such errors add up, a
# hundred tokens make 2e-6 of it. These stages take exponentials of sums.
@once
@pytest.mark.parametrize("precision, bound", [("high", 2e-5), ("highest", 2e-6)])
@pytest.mark.parametrize("stage", ["atomic_ops", "atomic_gdn2"])
def test_errors_at_128_channels(stage, precision, bound):
    for gate in GATES:
        x, wanted = at_full_width(gate)
        found = results(stage, *x, precision=precision)
        assert_close(found, wanted, bound)
        if precision == "highest":
            # Below its rounding error an element has no sign.
            floor = max(1e-30, bound * np.abs(wanted["dg"]).mean())
            assert wrong_signs(found["dg"], wanted["dg"], floor) == 0
