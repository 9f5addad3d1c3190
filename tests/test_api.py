"""Bad input gets an error that names the argument, says what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels import api, environment
from helpers import make

# All sizes equal, so that a missing axis would broadcast and a swapped one would fit.
(Q, K, V, G, B, W), STATE, _, _ = make(4, 4, 4, B=4, H=4, gate="-1")
GOOD = dict(q=Q, k=K, v=V, g=G, b=B, w=W)
# Sizes that every stage serves.
WIDE = dict(zip("qkvgbw", make(4, 16, 8, B=1, H=2, gate="-1")[0]))


def call(**changes):
    return gk.gdn2(**{**GOOD, **changes})


def call_wide(**changes):
    return gk.gdn2(**{**WIDE, **changes})


BAD = {
    "g per head instead of per channel": ("g", dict(g=G[..., 0]), "4 axes"),
    "b per head instead of per channel": ("b", dict(b=B[..., 0]), "4 axes"),
    "q without batch": ("q", dict(q=Q[0]), "4 axes"),
    "w broadcast": ("w", dict(w=W[..., :1]), r"\(4, 4, 4, 4\)"),
    "k with other heads": ("k", dict(k=K[:, :, :2]), r"\(4, 4, 2, 4\)"),
    "v shorter": ("v", dict(v=V[:, :3]), r"\(4, 3, 4, 4\)"),
    "grouped values": ("v", dict(v=np.repeat(V, 2, 2), w=np.repeat(W, 2, 2)), "head count 8 .* head count 4"),
    "no tokens": ("q", {n: x[:, :0] for n, x in GOOD.items()}, "L = 0"),
    "no batch": ("q", {n: x[:0] for n, x in GOOD.items()}, "B = 0"),
    "no values": ("v", dict(v=V[..., :0], w=W[..., :0]), "value channel"),
    "integers": ("k", dict(k=K.astype(np.int32)), "int32"),
    "float16": ("v", dict(v=V.astype(np.float16)), "float16"),
    "float64 without x64": ("b", dict(b=B.astype(np.float64)), "jax_enable_x64"),
    "a list": ("w", dict(w=W.tolist()), "list"),
    "positive g": ("g", dict(g=-G), "<= 0"),
    "decay instead of its logarithm": ("g", dict(g=np.exp(G)), "log decays"),
    "NaN in g": ("g", dict(g=np.where(G < -0.5, np.nan, G).astype(np.float32)), "nan"),
    "state without batch": ("initial_state", dict(initial_state=STATE[0]), r"\(4, 4, 4, 4\)"),
    "state with other heads": ("initial_state", dict(initial_state=STATE[:, :2]), r"\(4, 2, 4, 4\)"),
    "state in bfloat16": ("initial_state", dict(initial_state=jnp.asarray(STATE, jnp.bfloat16)), "bfloat16"),
    "unknown stage": ("stage", dict(stage="fastest"), "recurrence.*'fastest'"),
    "unknown precision": ("precision", dict(precision="bf16"), "'highest'.*'bf16'"),
    "chunk size not a power of two": ("chunk_size", dict(chunk_size=48), "power of two, got 48"),
    "chunk size zero": ("chunk_size", dict(chunk_size=0), "got 0"),
    "chunk size a float": ("chunk_size", dict(chunk_size=64.0), "got 64.0"),
    "chunk size true": ("chunk_size", dict(chunk_size=True), "got True"),
    "scale a vector": ("scale", dict(scale=jnp.ones(4)), r"\(4,\)"),
    "scale a word": ("scale", dict(scale="auto"), "'auto'"),
    "scale not finite": ("scale", dict(scale=float("inf")), "inf"),
    "scale beyond float32": ("scale", dict(scale=1e39), "float32 holds, got 1e"),
    "scale beyond any float": ("scale", dict(scale=10**400), "float32 holds"),
    "a shape without values": ("v", dict(v=jax.ShapeDtypeStruct(V.shape, jnp.float32)), "ShapeDtypeStruct"),
    "bytes the other way round": ("k", dict(k=K.astype(">f4")), ">f4"),
    "stage an array": ("stage", dict(stage=np.array(["wy"])), "expected one of"),
    "interpret a word": ("interpret", dict(interpret="yes"), "'yes'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_name(case):
    name, changes, words = BAD[case]
    with pytest.raises(ValueError, match=words) as error:
        call(**changes)
    assert str(error.value).startswith(f"{name}:")


@pytest.mark.parametrize("case", ["w broadcast", "integers", "unknown stage", "state without batch"])
def test_refused_under_jit_too(case):
    name, changes, words = BAD[case]
    options = {n: x for n, x in changes.items() if n in ("stage", "precision")}
    arrays = {n: x for n, x in {**GOOD, **changes}.items() if n not in options}
    with pytest.raises(ValueError, match=words):
        jax.jit(lambda x: gk.gdn2(**x, **options))(arrays)


def test_positive_g_is_seen_by_eager_grad_and_not_by_jit():
    with pytest.raises(ValueError, match="^g:"):
        jax.grad(lambda g: call(g=g)[0].sum())(jnp.asarray(-G))
    o, _ = jax.jit(lambda g: call(g=g))(-G)  # documented: no values to look at under jit
    assert o.shape == V.shape


@pytest.mark.parametrize("stage", gk.STAGES)
def test_g_of_minus_infinity_forgets(stage):
    g = WIDE["g"].copy()
    g[:, 2] = -np.inf
    o, state = call_wide(g=g, stage=stage, precision="highest")
    expected, expected_state = gk.gdn2(**{name: x[:, 2:] for name, x in WIDE.items()}, stage=stage)
    np.testing.assert_allclose(o[:, 2:], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-4, atol=1e-5)
    gradients = jax.grad(lambda x: call_wide(**x, stage=stage)[0].sum())({**WIDE, "g": g})
    assert all(np.isfinite(x).all() for x in gradients.values()) and not gradients["g"][:, 2].any()


@pytest.mark.parametrize("stage", gk.STAGES)
def test_scale_python_numpy_or_traced(stage):
    plain, _ = call_wide(scale=0.3, stage=stage)
    for scale in (np.float32(0.3), np.float64(0.3), np.array(0.3), jnp.float32(0.3)):
        assert np.array_equal(call_wide(scale=scale, stage=stage)[0], plain)
    np.testing.assert_allclose(jax.jit(lambda s: call_wide(scale=s, stage=stage)[0])(0.3), plain, rtol=1e-5, atol=1e-7)
    slope = jax.grad(lambda s: (call_wide(scale=s, stage=stage)[0] * WIDE["v"]).sum())(0.3)
    np.testing.assert_allclose(slope, (plain * WIDE["v"]).sum() / 0.3, rtol=1e-4)
    assert np.array_equal(call_wide(stage=stage)[0], call_wide(scale=0.25, stage=stage)[0])  # K = 16
    assert np.array_equal(call_wide(scale=jnp.int32(1), stage=stage)[0], call_wide(scale=1, stage=stage)[0])


@pytest.mark.parametrize("chunk_size", [np.uint8(8), np.int8(64), 2**40])
def test_chunk_size_of_any_integer_kind(chunk_size):
    np.testing.assert_allclose(call(chunk_size=chunk_size)[0], call()[0], rtol=1e-4, atol=1e-5)


def test_auto_is_a_stage():
    assert np.array_equal(call()[0], call(stage="wy")[0])
    assert gk.STAGES == ("recurrence", "associative_scan", "wy", "atomic_ops", "atomic_gdn2", "mxu")


def test_auto_is_mxu_on_a_tpu_where_it_serves(monkeypatch):
    def fastest(K, V, dtype=jnp.float32, chunk_size=None):
        q, v = (jax.ShapeDtypeStruct((1, 4, 1, D), dtype) for D in (K, V))
        return api._fastest(q, v, chunk_size)

    assert fastest(128, 128) == "wy"
    monkeypatch.setattr(environment, "on_tpu", lambda: True)
    assert fastest(128, 64) == fastest(8, 256, jnp.bfloat16, 16) == "mxu"
    assert fastest(12, 128) == fastest(128, 264) == fastest(128, 128, chunk_size=256) == "wy"
    assert fastest(128, 128, jnp.float64) == "wy"
