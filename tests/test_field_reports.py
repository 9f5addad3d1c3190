"""Inputs that broke other kernels of this family, each with the answer that is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from helpers import TOLERANCE, assert_close, make, once, relative_error, results, truth

pytestmark = once
stages = pytest.mark.parametrize("stage", gk.STAGES)
EXACT = TOLERANCE["float32", "highest"]
L = 64


def one_shape(gate="per channel"):
    """One shape for most of these tests: a program is compiled once for each stage."""
    return make(L, 16, 16, B=1, H=2, gate=gate)


def outputs(stage, *inputs, state=None):
    """o and the final state, by the same program."""
    _, some, do, d_state = one_shape()
    found = results(stage, [np.float32(x) for x in inputs], 0 * some if state is None else state, do, d_state)
    return found["o"], found["final_state"]


@stages
def test_a_reset_isolates(stage):
    """g = -1000 in two tokens: nothing before the second is seen after it, forward or backward, to the last bit."""
    inputs, state, do, d_state = one_shape("resets")
    reset = 2 * L // 3
    assert_close(results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state), EXACT)
    other = [x.copy() for x in inputs]
    other[2][:, :reset] *= -2
    one, two = (results(stage, x, s, do, d_state) for x, s in ((inputs, state), (other, 3 * state)))
    assert np.array_equal(one["o"][:, reset:], two["o"][:, reset:])
    assert np.array_equal(one["final_state"], two["final_state"])
    do = do.copy()
    do[:, :reset] = 0
    blind = results(stage, inputs, state, do, d_state)
    for name in ("dv", "dk", "dw", "db", "dg"):
        assert not blind[name][:, :reset].any(), name
    assert not blind["d_initial_state"].any()


@stages
def test_identical_keys(stage):
    """64 times the same unit key with b = w = 1, g = 0: the last write wins. An inverse by powers of A returns noise."""
    (q, _, v, g, _, _), *_ = one_shape("-0")
    key = np.zeros(16, np.float32)
    key[3], key[7] = 0.6, 0.8
    k = np.broadcast_to(key, q.shape)
    ones = np.ones_like(q)
    o, state = outputs(stage, q, k, v, g, ones, ones)
    assert relative_error(o, 0.25 * (q @ key)[..., None] * v) < 5e-6
    assert relative_error(state[0, 0], np.outer(key, v[0, -1, 0])) < 5e-6


@stages
def test_recall_is_exact(stage):
    """Sixteen orthogonal associations, written four times over: what is read is what was written."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(16, 16)))
    k = np.tile(basis, (4, 1))[None, :, None].repeat(2, 2)
    v = np.tile(np.random.default_rng(1).normal(size=(16, 2, 16)), (4, 1, 1))[None]
    ones = np.ones_like(k)
    o, _ = outputs(stage, k, k, v, 0 * k, ones, ones)
    assert relative_error(o, v / 4) < 2e-6


@stages
def test_zero_keys_only_decay(stage):
    inputs, state, do, d_state = one_shape("-0.1")
    inputs[1][:, 5:9] = inputs[1][:, 20:, 1] = 0
    inputs[0][:, 7, 0] = inputs[2][:, 20:, 1] = 0
    assert_close(results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state), EXACT)


@stages
def test_a_decay_that_bfloat16_rounds_to_one(stage):
    """g = -1e-4 for 512 tokens: a decay kept in bfloat16 would never forget."""
    inputs, state, do, d_state = make(512, 8, 8, B=1, H=1, gate="-0")
    inputs[3][:] = -1e-4
    inputs[4] *= 0.02
    found, expected = results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state)
    assert_close(found, expected, 5e-5)
    inputs[3][:] = 0
    assert relative_error(truth(inputs, state, do, d_state)["o"], expected["o"]) > 1e-3  # it does matter


@pytest.mark.parametrize("precision", ["default", "high"])
@stages
def test_no_precision_rounds_a_decay(stage, precision):
    """Nothing is written, everything forgets slowly: one bfloat16 pass over exp(g) would keep the state for ever."""
    (q, k, v, g, b, w), state, _, _ = make(512, 8, 8, B=1, H=1, gate="-0")
    g[:] = -1e-3
    _, final_state = gk.gdn2(q, 0 * k, v, g, b, w, initial_state=state, stage=stage, precision=precision)
    assert relative_error(final_state, np.exp(-0.512) * state) < 2e-5


@stages
def test_alternating_extremes(stage):
    """-1e4 in one token and 0 in the next is ordinary input."""
    inputs, state, do, d_state = one_shape()
    inputs[3][:, 0::2], inputs[3][:, 1::2] = -1e4, 0
    assert_close(results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state), EXACT)


@stages
def test_flat_decay_after_one_drop(stage):
    """One -4, then -1e-8: the running sum no longer moves in float32, the gradient of g still must be right."""
    inputs, state, do, d_state = one_shape()
    inputs[3][:, 0], inputs[3][:, 1:] = -4, -1e-8
    assert_close(results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state), EXACT)


@stages
def test_tied_gates_sum_to_the_older_rule(stage):
    """b = w = beta, scalar g: the gates' gradients add up to those of an independent gated delta rule."""
    random = np.random.default_rng(5)
    inputs, state, do, d_state = one_shape()
    D = 16
    beta, decay = random.uniform(0.1, 0.9, L), -random.uniform(0, 1, L)
    for position, value in ((3, decay), (4, beta), (5, beta)):
        inputs[position] = np.broadcast_to(value[None, :, None, None], inputs[position].shape).astype(np.float32)
    found = results(stage, inputs, 0 * state, do, d_state)

    def gated_delta_rule(beta, decay):
        q, k, v = (x[0, :, 0].astype(np.float64) for x in inputs[:3])
        S, loss = np.zeros((D, D)), 0.0
        for t in range(L):
            S = np.exp(decay[t]) * S
            S = S + beta[t] * np.outer(k[t], v[t] - k[t] @ S)
            loss += D**-0.5 * (q[t] @ S) @ do[0, t, 0]
        return loss + (S * d_state[0, 0]).sum()

    d_beta, d_decay = (found["db"] + found["dw"])[0, :, 0].sum(-1), found["dg"][0, :, 0].sum(-1)
    for t in (0, 22, 63):
        for gradient, at in ((d_beta, 0), (d_decay, 1)):
            ends = []
            for sign in (1e-5, -1e-5):
                moved = [beta.copy(), decay.copy()]
                moved[at][t] += sign
                ends.append(gated_delta_rule(*moved))
            assert gradient[t] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-4)


@stages
def test_what_lies_behind_the_last_token_is_not_read(stage):
    """The arrays are slices of buffers that hold NaN after the last token."""
    (*inputs,), state, do, d_state = one_shape()
    clean = results(stage, inputs, state, do, d_state)

    def in_buffer(x):
        return jnp.full((x.shape[0], 100, *x.shape[2:]), jnp.nan, jnp.float32).at[:, :L].set(x)[:, :L]

    dirty = results(stage, [in_buffer(x) for x in inputs], state, in_buffer(do), d_state)
    for name in clean:
        assert np.array_equal(clean[name], dirty[name]), name


@stages
def test_rejected_draft_leaves_no_trace(stage):
    """Draft tokens run from a saved state and are thrown away: the state is as before and so is what follows."""
    inputs, *_ = one_shape()
    draft, *_ = one_shape("-1")
    half = L // 2
    run = jax.jit(functools.partial(gk.gdn2, stage=stage, precision="highest"))
    o, _ = outputs(stage, *inputs)
    _, saved = run(*[x[:, :half] for x in inputs], initial_state=np.zeros((1, 2, 16, 16), np.float32))
    before = np.array(saved)
    run(*[x[:, :half] for x in draft], initial_state=saved)
    assert np.array_equal(saved, before)
    rest, _ = run(*[x[:, half:] for x in inputs], initial_state=saved)
    assert relative_error(rest, o[:, half:]) < EXACT


@stages
def test_gates_of_released_models(stage):
    """g = -exp(A_log) * softplus(x + bias) with A up to 16: realistic values reach -20 per token."""
    inputs, state, do, d_state = one_shape()
    random = np.random.default_rng(7)
    A = np.array([[1], [16]])
    bias = np.log(np.expm1(random.uniform(0.01, 0.1, 16)))
    inputs[3] = (-A * np.log1p(np.exp(random.normal(size=inputs[3].shape) + bias))).astype(np.float32)
    assert inputs[3].min() < -3
    assert_close(results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state), EXACT)


@stages
def test_erasing_can_make_the_state_grow(stage):
    """Two keys in turn, each erased through one channel only: nothing is written, and every other token multiplies the state
    by 1.156. A kernel that clips or damps shows here."""
    inputs, state, do, d_state = one_shape("-0")
    even = np.arange(L) % 2 == 0
    inputs[1][:], inputs[4][:], inputs[5][:] = 0, 0, 0
    inputs[1][:, even, :, :2], inputs[1][:, ~even, :, :2] = (0.6, 0.8), (0.8, 0.6)
    inputs[4][:, even, :, 0] = inputs[4][:, ~even, :, 1] = 1
    found, expected = results(stage, inputs, state, do, d_state), truth(inputs, state, do, d_state)
    assert np.linalg.norm(expected["final_state"]) > 20 * np.linalg.norm(state)
    # Each token's rounding grows with the state: float32 itself is at 3e-6 here.
    assert_close(found, expected, 3 * EXACT)
