"""The oracle's adjoint against finite differences of its own forward."""

import numpy as np
import pytest

from gdn2_kernels import oracle
from helpers import make, relative_error


@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 2, 3), (4, 4, 2)])
def test_adjoint_is_the_slope(shape):
    L, K, V = shape
    inputs, state, do, d_state = make(L, K, V, B=1, H=2, gate="-1", dtype=np.float64, b_max=2.0)

    def loss(*x):
        o, final_state = oracle.forward(*x[:6], scale=0.61, initial_state=x[6])
        return (o * do).sum() + (final_state * d_state).sum()

    arguments = [*inputs, state.astype(np.float64)]
    gradients = oracle.backward(*inputs, do, d_state, scale=0.61, initial_state=arguments[6])
    for position, name in enumerate(oracle.GRADIENTS):
        slope = np.zeros_like(arguments[position])
        for index in np.ndindex(slope.shape):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in arguments]
                moved[position][index] += sign * 1e-6
                ends.append(loss(*moved))
            slope[index] = (ends[0] - ends[1]) / 2e-6
        assert relative_error(gradients[name], slope) < 1e-8, name


def test_a_missing_cotangent_is_zero():
    inputs, state, do, d_state = make(6, 3, 4, B=1, H=1, dtype=np.float64)
    both = oracle.backward(*inputs, do, d_state, initial_state=state)
    first = oracle.backward(*inputs, do, None, initial_state=state)
    second = oracle.backward(*inputs, None, d_state, initial_state=state)
    for name in oracle.GRADIENTS:
        np.testing.assert_allclose(both[name], first[name] + second[name], atol=1e-12)


def test_does_not_change_its_arguments():
    inputs, state, do, d_state = make(4, 3, 3, B=1, H=1)
    before = [x.copy() for x in (*inputs, state, do, d_state)]
    oracle.backward(*inputs, do, d_state, initial_state=state)
    assert all(np.array_equal(x, y) for x, y in zip(before, (*inputs, state, do, d_state)))
