"""What the tests share: inputs, gates that hurt, the one table of tolerances, and a stage with its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels import oracle

NAMES = ("o", "final_state", *oracle.GRADIENTS)

# Stages made of Pallas kernels: interpreted here, so a program takes longer to compile; they refuse float64 and channels
# that are no multiple of 8.
KERNELS = [stage for stage in gk.STAGES if stage in ("atomic_ops", "atomic_gdn2", "mxu")]

# Arithmetic is the same at every version of JAX, and interpreted kernels take long to compile: most of it is tested with
# the pinned versions only (tools/run_tests.py).
once = pytest.mark.once


def rest_once(values, *always):
    """Values of a parameter, all but a few of them tested once; tuples are values of several parameters."""
    return [x if x in always else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=once) for x in values]


# Relative L2 error against the float64 oracle, the same for outputs and gradients and for every decay. bfloat16 is what
# rounding the results costs; the oracle is given the rounded inputs.
TOLERANCE = {
    ("float32", "highest"): 1e-5,
    ("float32", "high"): 2e-5,
    ("float32", "default"): 2e-2,
    ("bfloat16", "highest"): 5e-3,
    ("bfloat16", "high"): 5e-3,
    ("bfloat16", "default"): 2e-2,
    ("float64", "highest"): 1e-12,
    ("float64", "high"): 1e-12,
    ("float64", "default"): 1e-12,
}


def x64():
    """Context with jax_enable_x64 on; the name moved in JAX 0.8."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def uniform(value):
    return lambda random, shape: np.full(shape, -float(value))


def per_channel(random, shape):
    """Channels that never forget beside channels that forget at once."""
    return -np.broadcast_to(np.exp(random.uniform(np.log(1e-3), np.log(50), shape[-1])), shape)


def bursts(random, shape):
    """Mostly no decay; one element in twenty drops by 50."""
    return np.where(random.uniform(size=shape) < 0.05, -50.0, -random.uniform(0, 0.02, shape))


def resets(random, shape):
    """Two tokens that forget everything, among tokens that forget little."""
    g = -random.uniform(0, 0.1, shape)
    g[:, shape[1] // 3] = g[:, 2 * shape[1] // 3] = -1000.0
    return g


GATES = {f"-{x:g}": uniform(x) for x in (0, 0.01, 0.1, 1, 5, 20, 100, 1000)}
GATES |= {"per channel": per_channel, "bursts": bursts, "resets": resets}


def make(L, K=16, V=24, *, B=2, H=2, gate="per channel", seed=0, dtype=np.float32, b_max=1.0):
    """Six inputs, initial state, cotangents of o and of the final state, as numpy arrays."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys, values, state = (B, L, H, K), (B, L, H, V), (B, H, K, V)
    inputs = [unit(normal(*keys)), unit(normal(*keys)), normal(*values), GATES[gate](random, keys)]
    inputs += [b_max * random.uniform(size=keys), random.uniform(size=values)]
    inputs = [np.array(x, dtype) for x in inputs]
    state_dtype = np.float64 if dtype == np.float64 else np.float32
    return inputs, np.array(0.5 * normal(*state), state_dtype), np.array(normal(*values), dtype), np.array(
        normal(*state), state_dtype
    )


def _results(inputs, initial_state, do, d_final_state, scale, **options):
    def run(*x):
        return gk.gdn2(*x[:6], scale=scale, initial_state=x[6], **options)

    outputs, pull_back = jax.vjp(run, *inputs, initial_state)
    return *outputs, *pull_back((do.astype(outputs[0].dtype), d_final_state))


_compiled = functools.partial(jax.jit, _results, static_argnames=("stage", "precision", "chunk_size"))
# The tests' own programs are compiled in a hurry (tools/run_tests.py), save for these: here the optimised program is the
# one to be judged. Of an interpreted kernel it is not, and half the time of compiling would go into it.
_plain = _compiled(
    compiler_options={"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
)
_kernels = _compiled(compiler_options={"xla_backend_optimization_level": 0})


def results(stage, inputs, initial_state, do, d_final_state, *, scale=None, precision="highest", chunk_size=None):
    """Dict of o, final_state and the seven gradients, as numpy arrays."""
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    inputs = [jnp.asarray(x) for x in inputs]
    run = _kernels if stage in KERNELS else _plain
    found = run(
        inputs, initial_state, do, d_final_state, scale, stage=stage, precision=precision, chunk_size=chunk_size
    )
    return dict(zip(NAMES, map(np.asarray, found)))


def truth(inputs, initial_state, do, d_final_state, *, scale=None):
    """The same dict by the oracle."""
    o, final_state = oracle.forward(*inputs, scale=scale, initial_state=initial_state)
    gradients = oracle.backward(*inputs, do, d_final_state, scale=scale, initial_state=initial_state)
    return {"o": o, "final_state": final_state, **gradients}


def relative_error(x, reference):
    """Relative L2 error; infinite where x is not finite."""
    x, reference = np.asarray(x).astype(np.float64), np.asarray(reference).astype(np.float64)
    assert x.shape == reference.shape
    if not np.isfinite(x).all():
        return np.inf
    # Below the smallest normal number float32 has nothing to be accurate with.
    size = max(np.linalg.norm(reference), 1.2e-38 * np.sqrt(reference.size))
    return np.linalg.norm(x - reference) / size


def worst_row(x, reference):
    """Largest error of one vector, relative to its own or the typical size: what a global norm would hide."""
    x, reference = np.asarray(x).astype(np.float64), np.asarray(reference).astype(np.float64)
    size, distance = np.linalg.norm(reference, axis=-1), np.linalg.norm(x - reference, axis=-1)
    typical = max(np.sqrt(np.mean(size**2)), 1.2e-38)
    return float(np.max(distance / np.maximum(size, typical)))


def assert_close(found, expected, tolerance, names=NAMES):
    """Every named result within `tolerance`, and no single vector off by more than thirty times that."""
    for name in names:
        error, row = relative_error(found[name], expected[name]), worst_row(found[name], expected[name])
        assert error <= tolerance, f"{name}: relative L2 error {error:.2e} > {tolerance:.0e}"
        assert row <= 30 * tolerance, f"{name}: one vector is off by {row:.2e}"


def wrong_signs(found, expected, floor=1e-30):
    """Elements of a gradient that point the wrong way although their true size is not negligible."""
    where = np.abs(expected) > floor
    return int(np.sum(np.sign(np.asarray(found, np.float64))[where] != np.sign(expected)[where]))
