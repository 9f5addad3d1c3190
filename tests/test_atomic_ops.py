"""The stage atomic_ops: every launch against its twin in plain JAX, in memory full of NaN; the whole against the oracle."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import gdn2_kernels as gk
from gdn2_kernels.stages import atomic_ops, launch
from gdn2_kernels.stages.atomic_ops import backward, forward, stage, twins
from helpers import TOLERANCE, assert_close, make, once, relative_error, results, truth

# Kernels take any channels when interpreted; 128 are needed by the chip alone.
DIMS = launch.Dims(B=1, H=2, N=3, C=16, K=8, V=16)
FORWARD = ["scores", "inverse", "prepare", "scan"]
BACKWARD = ["own_outputs", "scan_back", "prepare_back", "scores_back", "log_decay_back"]


@functools.cache
def arguments(dtype="float32", gate="-1", dims=DIMS):
    """For every launch by name what the twins of the launches before it return: real arguments, and all alone."""
    L = dims.N * dims.C
    inputs, state, do, d_state = make(L, dims.K, dims.V, B=dims.B, H=dims.H, gate=gate)
    flat = [jnp.asarray(x.reshape(dims.B, L, -1), dtype) for x in (*inputs, do)]
    q, k, v, g, b, w, do = flat
    q, g = q.astype(jnp.float32), g.astype(jnp.float32)
    state, d_state = jnp.asarray(state), jnp.asarray(d_state)
    options = launch.Options(dims, "highest", None)
    found = {}

    def run(name, *values):
        found[name] = values
        return getattr(twins, name)(*values, options)

    Aqk, Akk = run("scores", q, k, g, b)
    X = run("inverse", Akk)
    W, U, kg, qg, decay = run("prepare", q, k, v, g, b, w, X)
    _, vn, S, _ = run("scan", Aqk, W, U, kg, qg, decay, state, v.dtype)
    dAqk, dvn = run("own_outputs", do, Aqk, vn)
    dvn, dS, _ = run("scan_back", do, dvn, W, kg, qg, decay, d_state)
    dq, dk, dbk, _, _, dAkk, *owed = run("prepare_back", k, v, g, b, w, X, kg, qg, decay, vn, S, do, dvn, dS)
    *_, pairs = run("scores_back", q, k, g, b, dAqk, dAkk, dq, dk, dbk)
    run("log_decay_back", *owed, pairs, g.dtype)
    return found


def launched(name, values, interpret, precision="highest", dims=DIMS):
    module = forward if name in FORWARD else backward
    found = getattr(module, name)(*values, launch.Options(dims, precision, interpret))
    return found if isinstance(found, (list, tuple)) else [found]


def expected(name, values, dims=DIMS):
    found = getattr(twins, name)(*values, launch.Options(dims, "highest", None))
    return found if isinstance(found, (list, tuple)) else [found]


def test_every_launch_has_a_twin():
    for name in FORWARD + BACKWARD:
        module = forward if name in FORWARD else backward
        assert [*inspect.signature(getattr(module, name)).parameters] == [
            *inspect.signature(getattr(twins, name)).parameters
        ]


@pytest.mark.parametrize("gate, dtype", [("-1", "float32"), ("per channel", "float32"), ("resets", "bfloat16")])
@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_launch_is_its_twin(name, gate, dtype):
    values = arguments(dtype, gate)[name]
    for found, wanted in zip(launched(name, values, True), expected(name, values), strict=True):
        assert found.dtype == wanted.dtype
        assert relative_error(found, wanted) < (1e-6 if found.dtype == jnp.float32 else 5e-3)


@pytest.mark.parametrize("gate", ["per channel"])
@pytest.mark.parametrize("name", ["scores", "scores_back"])
def test_walk_as_compiled_for_the_chip(name, gate, monkeypatch):
    """Tiles of eight columns, unrolled: interpreted kernels otherwise take wider ones."""
    monkeypatch.setattr(forward.Walk, "of", lambda options: forward.Walk(forward.TILE, True))
    dims = DIMS._replace(C=32, N=1, H=1)
    values = arguments("float32", gate, dims)[name]
    for found, wanted in zip(launched(name, values, True, dims=dims), expected(name, values, dims), strict=True):
        assert relative_error(found, wanted) < 1e-6


def test_unwritten_memory_is_nan_here():
    """The next test has teeth: what no kernel wrote comes out as NaN."""

    def kernel(x, out, scratch):
        out[...] = x[...] + scratch[...]

    x = jnp.ones((8, 128))
    strict = pltpu.InterpretParams(uninitialized_memory="nan")
    scratch = [pltpu.VMEM(x.shape, jnp.float32)]
    assert np.isnan(pl.pallas_call(kernel, out_shape=x, scratch_shapes=scratch, interpret=strict)(x)).all()


@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_launch_in_memory_full_of_nan(name, capfd):
    """What nothing has written is NaN, and reads that race with writes are reported."""
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    values = arguments()[name]
    found = [np.asarray(x) for x in launched(name, values, strict)]
    for x, wanted in zip(found, launched(name, values, True), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@once
@pytest.mark.parametrize("precision, bound", [("default", 2e-2), ("high", 2e-5)])
@pytest.mark.parametrize("name", [n for n in FORWARD + BACKWARD if n not in ("scores", "scores_back", "log_decay_back")])
def test_precision_reaches_the_products(name, precision, bound):
    values = arguments()[name]
    found = launched(name, values, True, precision)
    errors = [relative_error(x, y) for x, y in zip(found, expected(name, values))]
    assert bound / 1000 < max(errors) < bound


@once
@pytest.mark.parametrize("name", ["scores", "scores_back", "log_decay_back"])
def test_vector_unit_launches_know_no_precision(name):
    values = arguments()[name]
    plain = launched(name, values, True, "highest")
    assert all(np.array_equal(x, y) for x, y in zip(plain, launched(name, values, True, "default")))


# ------------------------------------------------------ the stage

GATE_L = 70  # one shape, compiled once for each precision


@functools.cache
def case(gate):
    x = make(GATE_L, 16, 24, B=1, H=2, gate=gate)
    return x, truth(*x)


@once
@pytest.mark.parametrize("chunk_size", [8, 128])
def test_every_chunk_size(chunk_size):
    x, wanted = case("bursts")
    assert_close(results("atomic_ops", *x, chunk_size=chunk_size), wanted, TOLERANCE["float32", "highest"])


@once
def test_repeated_keys_with_b_up_to_two():
    (q, k, v, g, b, w), *rest = make(GATE_L, 16, 24, B=1, H=2, gate="-0", b_max=2.0)
    x = ((q, np.broadcast_to(k[:, :1], k.shape), v, g, b, w), *rest)
    assert_close(results("atomic_ops", *x), truth(*x), TOLERANCE["float32", "highest"])


def test_residuals_take_the_bytes_that_are_stated():
    for B, L, H, K, V, C in [(1, 100, 2, 128, 64, 64), (2, 65, 3, 48, 256, 32), (1, 256, 1, 128, 128, 128)]:
        dims = launch.Dims(B, H, -(-L // C), C, stage.padded(K), stage.padded(V))
        rows = dims.N * C
        keys, values = ((B, rows, H * D) for D in (dims.K, dims.V))
        inputs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (keys, keys, values, keys, keys, values)]
        inputs.append(jax.ShapeDtypeStruct((B, H, dims.K, dims.V), jnp.float32))
        run = functools.partial(stage.forward, options=launch.Options(dims, "high", True))
        _, residuals = jax.eval_shape(run, *inputs)
        stated = atomic_ops.residual_bytes(B, L, H, K, V, C)
        assert stated == sum(x.size * x.dtype.itemsize for x in residuals)
        assert set(residuals._fields) == {"Aqk", "X", "W", "kg", "qg", "decay", "vn", "S"}


REFUSED = {
    "q of 12 channels": ("q", dict(K=12), "multiple of 8 up to 256.*12"),
    "q of 264 channels": ("q", dict(K=264), "264"),
    "v of 4 channels": ("v", dict(V=4), "multiple of 8 up to 256.*4"),
    "chunk of 4": ("chunk_size", dict(chunk_size=4), "8 to 256.*4"),
    "chunk of 512": ("chunk_size", dict(chunk_size=512), "512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    name, changes, words = REFUSED[case]
    sizes = {"K": 8, "V": 8, "chunk_size": None, **changes}
    inputs, *_ = make(4, sizes["K"], sizes["V"], B=1, H=1)
    with pytest.raises(ValueError, match=words) as error:
        gk.gdn2(*inputs, stage="atomic_ops", chunk_size=sizes["chunk_size"])
    assert str(error.value).startswith(f"{name}:")
