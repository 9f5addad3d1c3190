"""Inputs that an implementation is tried on, each with its float64 truth.

The tests use `make` and the decays of `GATES` as well.
"""

import functools
from typing import NamedTuple

import numpy as np

from gdn2_kernels import oracle

NAMES = ("o", "final_state", *oracle.GRADIENTS)


class Size(NamedTuple):
    """Of an audit. Everything runs at one shape, so that a kernel is compiled once."""

    L: int  # tokens
    D: int  # key channels, and as many value channels
    ragged: int  # tokens of the second program, two batch rows of two heads
    chunk_size: int  # one that is not the usual one

    @property
    def border(self):
        """Where the sequence is cut: a border between chunks of every stage."""
        return self.L // 2


FULL = Size(L=256, D=128, ragged=200, chunk_size=32)
REDUCED = Size(L=64, D=32, ragged=50, chunk_size=32)


class Case(NamedTuple):
    """What a function under test is given, as numpy arrays."""

    inputs: list  # q, k, g, b (B, L, H, K); v, w (B, L, H, V)
    state: np.ndarray  # (B, H, K, V)
    do: np.ndarray  # (B, L, H, V)
    d_state: np.ndarray  # (B, H, K, V)
    scale: float

    def changed(self, **changes):
        """Some of q, k, v, g, b, w as functions of what they were."""
        inputs = [
            changes.get(name, np.copy)(x) for name, x in zip("qkvgbw", self.inputs)
        ]
        return self._replace(inputs=[x.astype(np.float32) for x in inputs])


def truth(case):
    """Dict of o, final_state and the seven gradients, float64, by the oracle."""
    options = {"scale": case.scale, "initial_state": case.state}
    o, final_state = oracle.forward(*case.inputs, **options)
    gradients = oracle.backward(*case.inputs, case.do, case.d_state, **options)
    return {"o": o, "final_state": final_state, **gradients}


def random_case(L, D, gate, *, B=1, H=1, seed=3):
    """A case with as much in the state as one token writes, and as much cotangent of
    the final state as one token reads. With more the first and the last token would be
    all that an L2 norm sees.
    """
    inputs, state, do, d_state = make(L, D, D, B=B, H=H, gate=gate, seed=seed)
    return Case(
        inputs, np.float32(state * D**-0.5), do, np.float32(d_state / D), D**-0.5
    )


# ------------------------------------------------------ decays


def uniform(value):
    return lambda random, shape: np.full(shape, -float(value))


def per_channel(random, shape):
    """Channels that never forget beside channels that forget at once."""
    return -np.broadcast_to(
        np.exp(random.uniform(np.log(1e-3), np.log(50), shape[-1])), shape
    )


def bursts(random, shape):
    """Mostly no decay; one element in twenty drops by 50."""
    return np.where(
        random.uniform(size=shape) < 0.05, -50.0, -random.uniform(0, 0.02, shape)
    )


def resets(random, shape):
    """Two tokens that forget everything, among tokens that forget little."""
    g = -random.uniform(0, 0.1, shape)
    g[:, shape[1] // 3] = g[:, 2 * shape[1] // 3] = -1000.0
    return g


GATES = {f"-{x:g}": uniform(x) for x in (0, 0.01, 0.1, 1, 5, 20, 100, 1000)}
GATES |= {"per channel": per_channel, "bursts": bursts, "resets": resets}


def make(
    L, K=16, V=24, *, B=2, H=2, gate="per channel", seed=0, dtype=np.float32, b_max=1.0
):
    """Six inputs, initial state, cotangents of o and of the final state, as numpy
    arrays. gate: a name in `GATES`, or a function of (random generator, shape).
    """
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys, values, state = (B, L, H, K), (B, L, H, V), (B, H, K, V)
    decay = gate if callable(gate) else GATES[gate]
    inputs = [
        unit(normal(*keys)),
        unit(normal(*keys)),
        normal(*values),
        decay(random, keys),
    ]
    inputs += [b_max * random.uniform(size=keys), random.uniform(size=values)]
    inputs = [np.array(x, dtype) for x in inputs]
    state_dtype = np.float64 if dtype == np.float64 else np.float32
    return (
        inputs,
        np.array(0.5 * normal(*state), state_dtype),
        np.array(normal(*values), dtype),
        np.array(normal(*state), state_dtype),
    )


# The families of the audit, each for one strength |g|.


def every_token(strength):
    return lambda random, shape: -strength * random.uniform(0.8, 1.2, shape)


def in_channels(strength):
    """A constant of each channel, from a ten-thousandth of the strength up to it."""

    def gate(random, shape):
        spread = np.exp(random.uniform(np.log(1e-4), 0, shape[-1]))
        return -strength * np.broadcast_to(spread, shape)

    return gate


def in_bursts(strength):
    """One element in twenty drops by the strength, the others by almost nothing."""

    def gate(random, shape):
        mild = -0.02 * min(strength, 1) * random.uniform(size=shape)
        return np.where(random.uniform(size=shape) < 0.05, -strength, mild)

    return gate


def one_drop(random, shape):
    """-4, then -1e-8: the running sum no longer moves in float32."""
    g = np.full(shape, -1e-8)
    g[:, 0] = -4
    return g


STRENGTHS = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
FAMILIES = {"every token": every_token, "channels": in_channels, "bursts": in_bursts}
SINGLE = {"no decay": uniform(0), "one drop": one_drop, "one key": uniform(0.01)}


def decay_names(strengths=STRENGTHS):
    """Of the cases of `decay_case`: (family, strength), strength None for a single
    case.
    """
    names = [(family, strength) for family in FAMILIES for strength in strengths]
    return names + [(name, None) for name in SINGLE]


@functools.cache
def decay_case(size, family, strength=None, B=1, H=1):
    gate = SINGLE[family] if strength is None else FAMILIES[family](strength)
    case = random_case(size.L, size.D, gate, B=B, H=H)
    if family == "one key":
        # Every token erases what the one before it wrote.
        case = case.changed(k=lambda k: np.broadcast_to(k[:, :1], k.shape))
    return case, truth(case)


def label(family, strength):
    return family if strength is None else f"{family}, |g| {strength:g}"


# ------------------------------------------------------ small cases made larger


def enlarged(case, L, D):
    """The same problem with more tokens and channels, all of them zero: tokens that do
    nothing and channels that hold nothing.
    """

    def grow(x, *sizes):
        return np.pad(
            x, [(0, 0 if n is None else n - m) for n, m in zip(sizes, x.shape)]
        )

    tokens, state = (None, L, None, D), (None, None, D, D)
    return Case(
        [grow(x, *tokens) for x in case.inputs],
        grow(case.state, *state),
        grow(case.do, *tokens),
        grow(case.d_state, *state),
        case.scale,
    )


def reduced(results, like):
    """Results of an enlarged case cut down to the shapes of the dict `like`."""
    return {
        name: x[tuple(slice(n) for n in like[name].shape)]
        for name, x in results.items()
    }
