"""The law: what the formula says, in examples that can be checked by hand."""

import jax
import numpy as np
import pytest

import gdn2_kernels as gk
from helpers import make


def row(*tokens):
    """(1, L, 1, 8) with two channels in use: kernels want a multiple of 8."""
    return np.pad(np.array(tokens, np.float32), ((0, 0), (0, 6)))[None, :, None, :]


@pytest.mark.parametrize("stage", gk.STAGES)
def test_erase_acts_on_keys_and_write_on_values(stage):
    """Gates of 0 and 1 over two channels. The third token may erase nothing of key channel 0 and write only value 0."""
    o, state = gk.gdn2(
        q=row([1, 0], [1, 0], [1, 1]), k=row([1, 0], [1, 0], [0, 1]), v=row([2, 3], [5, 7], [1, 1]),
        g=np.zeros((1, 3, 1, 8), np.float32), b=row([1, 1], [0, 1], [1, 0]), w=row([1, 1], [0, 1], [1, 0]),
        scale=1.0, stage=stage,
    )  # fmt: skip
    assert np.array_equal(o[0, :, 0, :2], [[2, 3], [2, 10], [3, 10]]) and not o[..., 2:].any()
    assert np.array_equal(state[0, 0, :2, :2], [[2, 10], [1, 0]]) and np.count_nonzero(state) == 3


@pytest.mark.parametrize("stage", gk.STAGES)
def test_rows_of_the_state_are_key_channels(stage):
    """With as many keys as values a transposed state would go unnoticed."""
    (q, k, v, g, b, w), state, _, _ = make(1, 8, 8, B=1, H=1)
    _, written = gk.gdn2(q, k, v, g, b, w, stage=stage, precision="highest")
    np.testing.assert_allclose(written[0, 0], np.outer(k, w * v), rtol=1e-6, atol=1e-7)
    _, decayed = gk.gdn2(q, 0 * k, v, g, b, w, initial_state=state, stage=stage, precision="highest")
    np.testing.assert_allclose(decayed[0, 0], np.exp(g[0, 0, 0])[:, None] * state[0, 0], rtol=2e-6)


def test_second_derivatives():
    inputs, state, _, _ = make(2, 2, 2, B=1, H=1)

    def loss(v):
        o, final_state = gk.gdn2(inputs[0], inputs[1], v, *inputs[3:], stage="recurrence")
        return (o**2).sum() + (final_state**2).sum()

    hessian = np.asarray(jax.hessian(loss)(inputs[2])).reshape(4, 4)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-5)
    assert np.linalg.eigvalsh(hessian).min() > -1e-4 and np.abs(hessian).max() > 0.01
