"""Products at a stated precision, and cutting into chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn2_kernels import tile


def operands(seed=0, M=40, K=64, N=24):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.normal(size=s), jnp.float32) for s in ((3, M, K), (3, K, N))]


# Bounds for one product of float32 numbers in bfloat16 passes, relative to the sum of absolute products:
# one pass 2 * 2^-9 + 2^-18; three passes 3 * 2^-18 (both remainders and the product that is dropped).
@pytest.mark.parametrize("precision, bound", [("default", 2**-7.9), ("high", 3 * 2**-17), ("highest", 2**-22)])
def test_error_is_within_the_bound_of_its_passes(precision, bound):
    a, b = operands()
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    size = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64))
    error = np.max(np.abs(np.asarray(jax.jit(tile.matmul, static_argnums=2)(a, b, precision)) - exact) / size)
    assert error < bound
    if precision != "highest":
        assert error > bound / 300  # it really is rounded


def test_split_holds_sixteen_bits():
    x, _ = operands()
    high, low = jax.jit(tile.split)(x)
    for part in (high, low):
        assert np.array_equal(part, part.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.max(np.abs(x - high - low) / np.abs(x)) <= 2.0**-17


@pytest.mark.parametrize("precision", tile.PRECISIONS)
def test_gradient_has_the_precision_of_the_product(precision):
    a, b = operands()
    d = jnp.asarray(np.random.default_rng(1).normal(size=(3, 40, 24)), jnp.float32)
    _, pull_back = jax.vjp(lambda a, b: tile.matmul(a, b, precision), a, b)
    da, db = pull_back(d)
    np.testing.assert_array_equal(da, tile.matmul(d, b.mT, precision))
    np.testing.assert_array_equal(db, tile.matmul(a.mT, d, precision))


def test_precision_is_ours_whatever_the_program_says():
    a, b = operands()
    plain = tile.matmul(a, b, "high")
    for setting in ("bfloat16", "tensorfloat32", "float32", "highest"):
        with jax.default_matmul_precision(setting):
            assert np.array_equal(jax.jit(lambda a, b: tile.matmul(a, b, "high"))(a, b), plain)
            text = jax.jit(lambda a, b: tile.matmul(a, b, "high")).lower(a, b).as_text()
            assert "HIGHEST" not in text and "HIGH" not in text


def test_chunks_there_and_back():
    x = jnp.arange(2 * 7 * 3 * 4, dtype=jnp.float32).reshape(2, 7, 3, 4) + 1
    chunks = tile.to_chunks(x, 4, 3)
    assert chunks.shape == (3, 6, 4, 4)
    assert np.array_equal(chunks[1, 1, :3], x[0, 4:, 1]) and not chunks[1, :, 3].any() and not chunks[2].any()
    assert np.array_equal(tile.from_chunks(chunks, 2, 7), x)
