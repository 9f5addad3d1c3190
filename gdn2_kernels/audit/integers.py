"""Part 2. Inputs for which every intermediate of every form is a small whole number.

Decays are 1 or 0, gates 0 or 1, keys signed unit vectors: there is nothing to round as
long as each number fits the operands of a product. So the answer must be right to the
last bit, whatever the order of sums, and how large the numbers may grow before it is
not tells how many passes a kernel really makes.
"""

import functools

import numpy as np

from gdn2_kernels.audit.cases import NAMES, Case, truth
from gdn2_kernels.audit.measure import mismatches, row

# Largest value written and largest cotangent: two operands of the same products.
OPERANDS = {"8 bit": (3, 2), "8 x 16 bit": (1023, 2), "16 x 16 bit": (1023, 1023)}
EXACT_AT = {
    "8 bit": ("default", "high", "highest"),  # one pass
    "8 x 16 bit": ("high", "highest"),  # three
    "16 x 16 bit": ("highest",),  # six
}
FORGET = -1000.0  # exp of it is zero in float64 too


@functools.cache
def integer_case(L, D, operands, *, with_resets, with_state, B=1, H=1):
    random = np.random.default_rng(21)
    largest, largest_cotangent = OPERANDS[operands]
    keys, state = (B, L, H, D), (B, H, D, D)

    def units(*shape):
        """A signed unit vector in place of the last axis."""
        x = np.zeros(shape)
        signs = random.choice([-1.0, 1.0], shape[:-1])
        np.put_along_axis(
            x,
            random.integers(shape[-1], size=shape[:-1])[..., None],
            signs[..., None],
            -1,
        )
        return x

    def numbers(largest, *shape):
        """Odd, so that all bits count, one in a row."""
        return units(*shape) * (
            random.integers(0, (largest + 1) // 2, (*shape[:-1], 1)) * 2 + 1
        )

    def coin(*shape):
        return random.integers(0, 2, shape).astype(float)

    g = np.zeros(keys)
    if with_resets:
        g[random.random(keys) < 0.02] = FORGET  # channels
        g[:, random.random(L) < 0.02] = FORGET  # tokens
    inputs = [
        units(*keys),
        units(*keys),
        numbers(largest, *keys),
        g,
        coin(*keys),
        coin(*keys),
    ]
    carried = numbers(largest, *state) if with_state else np.zeros(state)
    do, d_state = numbers(largest_cotangent, *keys), numbers(largest_cotangent, *state)
    case = Case(
        [np.float32(x) for x in inputs], *map(np.float32, (carried, do, d_state)), 1.0
    )
    expected = truth(case)
    for name in NAMES:
        # What makes the gate valid: float32 can hold the answer.
        assert np.array_equal(expected[name], np.rint(expected[name])), name
        assert np.abs(expected[name]).max() < 2**24, name
    return case, expected


VARIANTS = {
    "no resets": dict(with_resets=False, with_state=False),
    "resets": dict(with_resets=True, with_state=False),
    "resets, state": dict(with_resets=True, with_state=True),
}


def integers(subject):
    """Rows: elements that differ from the truth. Where more bits are asked than the
    precision has, the line is only shown: it is the fingerprint of the passes.
    """
    size, rows = subject.size, []
    for operands in OPERANDS:
        must = subject.precision in EXACT_AT[operands]
        runs = [(size.L, name, options) for name, options in VARIANTS.items()]
        if operands == "8 bit":
            runs.append(
                (
                    size.ragged,
                    "padding, resets, state",
                    {**VARIANTS["resets, state"], "B": 2, "H": 2},
                )
            )
        for L, name, options in runs:
            case, expected = integer_case(L, size.D, operands, **options)
            wrong = mismatches(subject.run(case), expected)
            rows.append(
                row(
                    "integers",
                    operands,
                    name,
                    sum(wrong.values()),
                    0 if must else None,
                    result=", ".join(wrong),
                    note="" if must else "more bits than these passes keep",
                )
            )
    return rows
