"""Part 7. The inverse (I + A)^-1 of a chunk under stress, seen from outside.

Each key has two parts: one that is erased by, the same in many tokens, and one of its
own, a unit vector on which the gate b is zero. The first alone makes A. Queries read
the second: token i reads its own net write and nothing else. With unit vectors as
values the output *is* the inverse, whatever the implementation.
"""

import functools

import numpy as np

from gdn2_kernels.audit.cases import Case, truth
from gdn2_kernels.audit.measure import BARS, row

ROOM = {32: 4, 128: 16}  # channels for the part that is erased by, of all


def repeated(random, n, channels):
    """Half in each of four channels: its square is one to the last bit."""
    key = np.zeros(channels)
    key[:4] = 0.5
    return np.tile(key, (n, 1))


def cycled(random, n, channels):
    """Four keys at right angles, one after another, ones and halves throughout."""
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    keys = np.zeros((4, channels))
    keys[:, :4] = 0.5 * signs
    return keys[np.arange(n) % 4]


def correlated(random, n, channels):
    """Unit keys at a cosine of about 0.9."""
    x = random.normal(size=channels) / np.sqrt(channels) + 0.33 * random.normal(
        size=(n, channels)
    ) / np.sqrt(channels)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


KEYS = {
    "one key, b = 0.5": (repeated, 0.5),
    "one key, b = 1": (repeated, 1.0),
    "one key, b = 2": (repeated, 2.0),
    "four keys in turn, b = 1": (cycled, 1.0),
    "four keys in turn, b = 2": (cycled, 2.0),
    "correlated keys, b = 0.9": (correlated, 0.9),
}


@functools.cache
def inverse_case(size, name):
    """(case, n): the inverse is the first n rows and columns of o."""
    keys, gate = KEYS[name]
    room = ROOM[size.D]
    n = size.D - room
    k, q, b = (np.zeros((1, size.L, 1, size.D)) for _ in range(3))
    k[0, :n, 0, :room] = keys(np.random.default_rng(41), n, room)
    k[0, :n, 0, room:] = q[0, :n, 0, room:] = np.eye(n)
    b[0, :n, 0, :room] = gate
    v, nothing = np.zeros_like(k), np.zeros((1, 1, size.D, size.D))
    v[0, :n, 0, :n] = np.eye(n)
    inputs = [np.float32(x) for x in (q, k, v, 0 * k, b, np.ones_like(v))]
    return Case(
        inputs, np.float32(nothing), np.zeros_like(inputs[2]), np.float32(nothing), 1.0
    ), n


def exact(case, n):
    """A and the inverse in float64; the oracle's output is the inverse, too."""
    k, b = (np.float64(case.inputs[i][0, :n, 0]) for i in (1, 4))
    A = np.tril((b * k) @ k.T, -1)
    X = np.linalg.inv(np.eye(n) + A)
    assert np.abs(truth(case)["o"][0, :n, 0, :n] - X).max() < 1e-9 * np.abs(X).max()
    return A, X


def inverse(subject):
    """Rows: largest error over the largest element, and largest element of
    (I + A) X - I over the largest sum of |terms|.
    """
    rows, bar = [], BARS[subject.precision]
    for name in KEYS:
        case, n = inverse_case(subject.size, name)
        A, X = exact(case, n)
        found = subject.run(case)["o"][0, :n, 0, :n].astype(np.float64)
        finite = bool(np.isfinite(found).all())
        error = np.abs(found - X).max() / np.abs(X).max() if finite else np.inf
        left_over = (
            np.abs((np.eye(n) + A) @ found - np.eye(n)).max() if finite else np.inf
        )
        terms = ((np.eye(n) + np.abs(A)) @ np.abs(X)).max()
        rows.append(row("inverse", "inverse", name, float(error), bar))
        rows.append(row("inverse", "residual", name, float(left_over / terms), bar))
    return rows
