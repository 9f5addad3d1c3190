"""Products at a stated precision, cutting into chunks, and the small things inside kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

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


# ------------------------------------------------------ dot, inside a kernel


def in_kernel(a, b, precision, **transposed):
    def kernel(a, b, out):
        out[...] = tile.dot(a[...], b[...], precision, **transposed)

    M, N = (a.shape[1] if transposed.get("transpose_a") else a.shape[0],
            b.shape[0] if transposed.get("transpose_b") else b.shape[1])  # fmt: skip
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32), interpret=True)(a, b)


def bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("precision", tile.PRECISIONS)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_dot_in_a_kernel_is_made_of_bfloat16_passes(precision, transpose_a, transpose_b, x64):
    a, b = [np.asarray(x[0]) for x in operands()]
    a_high, b_high = bfloat16(a), bfloat16(b)
    a_low, b_low = bfloat16(a - a_high), bfloat16(b - b_high)
    expected = {
        "default": a_high @ b_high,
        "high": a_high @ b_high + a_high @ b_low + a_low @ b_high,
        "highest": a.astype(np.float64) @ b.astype(np.float64),
    }[precision]
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        found = jax.jit(in_kernel, static_argnums=2, static_argnames=("transpose_a", "transpose_b"))(
            a.T if transpose_a else a, b.T if transpose_b else b, precision, transpose_a=transpose_a, transpose_b=transpose_b
        )
    assert found.dtype == jnp.float32
    # Only the order of a float32 sum is left open: a wrong pass would show at 2^-9 or 2^-17.
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.max(np.abs(a) @ np.abs(b)) / 8)


@pytest.mark.parametrize("precision", tile.PRECISIONS)
def test_dot_is_the_product_outside(precision):
    a, b = operands()
    outside = jax.jit(tile.matmul, static_argnums=2)(a, b, precision)[0]
    np.testing.assert_allclose(in_kernel(a[0], b[0], precision), outside, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("precision", tile.PRECISIONS)
def test_dot_has_its_own_precision_whatever_the_program_says(precision):
    a, b = [x[0] for x in operands()]
    plain = in_kernel(a, b, precision)
    for setting in ("bfloat16", "tensorfloat32", "highest"):
        with jax.default_matmul_precision(setting):
            assert np.array_equal(in_kernel(a, b, precision), plain)


def test_chunks_there_and_back():
    x = jnp.arange(2 * 7 * 3 * 4, dtype=jnp.float32).reshape(2, 7, 3, 4) + 1
    chunks = tile.to_chunks(x, 4, 3)
    assert chunks.shape == (3, 6, 4, 4)
    assert np.array_equal(chunks[1, 1, :3], x[0, 4:, 1]) and not chunks[1, :, 3].any() and not chunks[2].any()
    assert np.array_equal(tile.from_chunks(chunks, 2, 7), x)


def test_side_by_side_runs_all_to_their_ends():
    seen = []

    def head(name, steps):
        for step in range(steps):
            seen.append((step, name))
            yield
        return name.upper()

    assert tile.side_by_side([head("a", 2), head("b", 3), head("c", 0)]) == ["A", "B", "C"]
    assert seen == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "b")]


def of_kernel(fn, x):
    def kernel(x, out):
        out[...] = fn(x[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@pytest.mark.parametrize("C", [8, 32])
def test_running_sums_are_of_what_they_name(C):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (C, 4)), jnp.float32)
    up_to, from_ = np.cumsum(x, 0), np.cumsum(x[::-1], 0)[::-1]
    assert np.array_equal(of_kernel(tile.sum_up_to, x), up_to)
    assert np.array_equal(of_kernel(tile.sum_before, x), up_to - x)
    assert np.array_equal(of_kernel(tile.sum_from, x), from_)
    assert np.array_equal(of_kernel(tile.sum_after, x), from_ - x)


@pytest.mark.parametrize("C", [8, 64])
def test_inverse_by_doubling(C):
    A = np.tril(np.random.default_rng(0).normal(size=(C, C)), -1).astype(np.float32) / 4

    def whole(A):
        return tile.side_by_side([tile.inverse(A, "highest")])[0]

    exact = np.linalg.inv(np.eye(C) + A.astype(np.float64))
    assert np.linalg.norm(of_kernel(whole, jnp.asarray(A)) - exact) < 1e-6 * np.linalg.norm(exact)
