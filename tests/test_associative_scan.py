"""The baseline: composition, its adjoint, and the memory it says it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels import bench
from gdn2_kernels.stages import associative_scan
from helpers import TOLERANCE, assert_close, make, results, truth, x64


def maps(L, seed=0):
    """A (L, 4, 4), M (L, 4, 3) in float64; to be used under x64."""
    random = np.random.default_rng(seed)
    return jnp.asarray(0.5 * random.normal(size=(L, 4, 4))), jnp.asarray(random.normal(size=(L, 4, 3)))


def test_composition_is_that_of_maps_and_associative():
    with x64():
        one, two, three = ([x[i] for x in maps(3)] for i in range(3))
        compose = associative_scan.compose

        def apply(maps, S):
            return maps[0] @ S + maps[1]

        S = jnp.ones((4, 3))
        np.testing.assert_allclose(apply(compose(two, one), S), apply(two, apply(one, S)), atol=1e-12)
        for left, right in zip(compose(three, compose(two, one)), compose(compose(three, two), one)):
            np.testing.assert_allclose(left, right, atol=1e-12)


def test_linear_scan_and_its_adjoint():
    with x64():

        def one_by_one(A, M):
            def step(S, x):
                S = x[0] @ S + x[1]
                return S, S

            return jax.lax.scan(step, jnp.zeros((4, 3)), (A, M))[1]

        S, pull_back = jax.vjp(associative_scan.linear_scan, *maps(9))
        expected, expected_pull_back = jax.vjp(one_by_one, *maps(9))
        np.testing.assert_allclose(S, expected, atol=1e-12)
        dS = jnp.asarray(np.random.default_rng(1).normal(size=S.shape))
        for found, wanted in zip(pull_back(dS), expected_pull_back(dS)):
            np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_heads_one_after_another(monkeypatch):
    """What happens when all heads at once would not fit: the same numbers."""
    x = make(21, 8, 16, seed=3)
    monkeypatch.setattr(associative_scan, "ALL_AT_ONCE_BYTES", 0)
    assert_close(results("associative_scan", *x), truth(*x), TOLERANCE["float32", "highest"])


def test_refuses_what_one_head_cannot_fit():
    too_long = 200_000
    shapes = [jax.ShapeDtypeStruct((1, too_long, 1, 128), jnp.float32)] * 6
    needed = associative_scan.head_bytes(too_long, 128, 128)
    assert needed > associative_scan.HBM_BYTES
    with pytest.raises(ValueError, match=f"associative_scan.*{needed:,} bytes.*L=200000"):
        jax.eval_shape(lambda *x: gk.gdn2(*x, stage="associative_scan"), *shapes)


def test_memory_on_this_machine_is_near_the_stated_one():
    L, D = 1024, 64
    inputs = bench.example_inputs(1, L, 1, D, D)

    def loss(*x):
        return jnp.square(gk.gdn2(*x, stage="associative_scan")[0]).sum()

    memory = jax.jit(jax.grad(loss, argnums=range(6))).lower(*inputs).compile().memory_analysis()
    stated = associative_scan.head_bytes(L, D, D)
    assert 0.5 * stated < memory.temp_size_in_bytes < 1.5 * stated
