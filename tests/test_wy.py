"""The chunked form: its tree, its inverse, and the hand-written backward against autodiff of the same forward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels.stages import wy
from helpers import TOLERANCE, assert_close, make, once, results, truth, x64


def chunk(C, K=8, gate="-1", dtype=np.float64):
    """q, k, bk, g of one chunk, each (1, C, K)."""
    (q, k, _, g, b, _), *_ = make(C, K, K, B=1, H=1, gate=gate, dtype=dtype)
    return [x.reshape(1, C, K) for x in (q, k, b * k, g)]


@pytest.mark.parametrize("C", [1, 2, 8, 32])
def test_each_pair_of_tokens_meets_at_one_level(C):
    pairs = np.zeros((C, C), int)
    rows = np.arange(C)[None, :, None]
    for h in wy.levels(C):
        earlier, later = (np.asarray(x)[:, :, 0] for x in wy.halves(jnp.asarray(rows), h))
        for i, j in zip(later, earlier):
            pairs[np.ix_(i, j)] += 1
        assert np.array_equal(wy.join(*wy.halves(jnp.asarray(rows), h), C), rows)
    assert np.array_equal(pairs, np.tri(C, k=-1, dtype=int))


@pytest.mark.parametrize("gate", ["-0", "-1", "-1000", "bursts", "per channel"])
def test_decay_factors(gate):
    C = 16
    _, _, _, g = chunk(C, gate=gate)
    with x64():
        factors, P, Q = jax.tree.map(np.asarray, wy.decay_factors(jnp.exp(g)))
    G = np.cumsum(g[0], 0)
    np.testing.assert_allclose(P[0], np.exp(G), rtol=1e-12)
    np.testing.assert_allclose(Q[0], np.exp(G[-1] - G), rtol=1e-9)
    for h, factor in zip(wy.levels(C), factors):
        assert 0 <= np.min(factor) and np.max(factor) <= 1
        for i in range(C):
            j = i ^ h  # its partner in the other half
            if i & h:
                expected = np.exp(g[0, j + 1 : i + 1].sum(0))
                np.testing.assert_allclose(factor[0, i] * factor[0, j], expected, rtol=1e-12)


@once
@pytest.mark.parametrize("gate", ["-0", "-1", "-20", "bursts"])
def test_scores_and_inverse(gate):
    C = 32
    q, k, bk, g = chunk(C, gate=gate)
    with x64():
        factors, _, _ = wy.decay_factors(jnp.exp(g))
        tree = wy.forward_tree(*(jnp.asarray(x) for x in (q, k, bk)), factors, "highest")
        Aqk, X = map(np.asarray, tree)
    G = np.cumsum(g[0], 0)
    decay = np.exp(np.minimum(G[:, None] - G[None, :], 0))
    np.testing.assert_allclose(Aqk[0], np.tril((q[0][:, None] * k[0][None] * decay).sum(-1)), atol=1e-14)
    A = np.tril((bk[0][:, None] * k[0][None] * decay).sum(-1), -1)
    np.testing.assert_allclose(X[0] @ (np.eye(C) + A), np.eye(C), atol=1e-13)


@once
@pytest.mark.parametrize("copies, b", [(1, 1.0), (1, 2.0), (1, 0.5), (4, 1.0)])
def test_inverse_of_repeated_keys(copies, b):
    """Powers of A reach 1e18 here, while the inverse has entries of size one."""
    C = 64
    keys = np.eye(16)[np.arange(C) % copies][None].astype(np.float32)
    k = jnp.asarray(keys)
    factors, _, _ = wy.decay_factors(jnp.ones_like(k))
    _, X = wy.forward_tree(k, k, b * k, factors, "highest")
    exact = np.linalg.inv(np.eye(C) + np.tril(b * keys[0] @ keys[0].T, -1))
    assert np.abs(exact).max() <= 2
    np.testing.assert_allclose(X[0], exact, atol=1e-6)


def test_backward_is_the_gradient_of_the_forward():
    with x64():
        inputs, state, do, d_state = make(45, 8, 12, gate="per channel", dtype=np.float64, b_max=2.0)
        arguments = [jnp.asarray(x) for x in (*inputs, 0.4, state.astype(np.float64))]
        found = []
        for run in (wy.with_backward, wy.by_autodiff):
            stage = functools.partial(wy.wy, precision="highest", chunk_size=8, interpret=None, run=run)
            _, pull_back = jax.vjp(stage, *arguments)
            found.append(pull_back((jnp.asarray(do), jnp.asarray(d_state, jnp.float64))))
    for name, ours, autodiff in zip(("q", "k", "v", "g", "b", "w", "scale", "initial_state"), *found):
        np.testing.assert_allclose(ours, autodiff, atol=1e-12, err_msg=name)


@once
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 128])
def test_every_chunk_size(chunk_size):
    x = make(70, gate="bursts")
    assert_close(results("wy", *x, chunk_size=chunk_size), truth(*x), TOLERANCE["float32", "highest"])


@once
@pytest.mark.parametrize("chunk_size", [8, 64])
def test_segments_hand_the_state_on(chunk_size):
    """More chunks than a segment holds, and a last segment that is partly filling."""
    length = (2 * wy.SEGMENT + 1) * chunk_size + 3
    x = make(length, 8, 8, B=1, H=1)
    assert_close(results("wy", *x, chunk_size=chunk_size), truth(*x), TOLERANCE["float32", "highest"])


def test_residuals_are_what_the_docstring_says():
    B, L, H, K, V, C = 1, 1024, 2, 16, 24, 64
    inputs, state, *_ = make(L, K, V, B=B, H=H)
    inputs = [jnp.asarray(x) for x in inputs]

    def kept(inputs):
        stage = functools.partial(wy.wy, scale=jnp.float32(1), precision="high", chunk_size=C, interpret=None)
        return jax.vjp(lambda *x: stage(*x, initial_state=jnp.asarray(state)), *inputs)[1]

    numbers = sum(x.size for x in jax.tree.leaves(jax.eval_shape(kept, inputs)))
    own = L * H * (2 * C + V + K * V / C)
    six_inputs = sum(x.size for x in inputs)
    assert own + six_inputs <= numbers <= 1.02 * (own + 2 * six_inputs)


@once
@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_the_past_does_not_see_the_future_bit_for_bit(precision):
    length, read = 70, 33
    (q, k, v, g, b, w), state, do, d_state = make(length, gate="per channel")
    do[:, read:], d_state[:] = 0, 0
    edited = [x.copy() for x in (q, k, v, g, b, w)]
    for x in edited:
        x[:, read:] = x[:, read:][:, ::-1] * 0.5
    edited[3][:, read:, :, ::2] = -40
    one = results("wy", [q, k, v, g, b, w], state, do, d_state, precision=precision)
    two = results("wy", edited, state, do, d_state, precision=precision)
    assert np.array_equal(one["o"][:, :read], two["o"][:, :read])
    for name in ("dq", "dk", "dv", "dg", "db", "dw"):
        assert np.array_equal(one[name][:, :read], two[name][:, :read]), name
        assert not one[name][:, read:].any(), name


def test_forward_mode_is_refused_by_jax():
    inputs, *_ = make(3, 8, 8, B=1, H=1)
    with pytest.raises(TypeError):
        jax.jvp(lambda v: gk.gdn2(*inputs[:2], v, *inputs[3:], stage="wy")[0], (inputs[2],), (inputs[2],))
