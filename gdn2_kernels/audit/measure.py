"""How far a result is from the truth, in the units that a gate is stated in."""

import numpy as np

from gdn2_kernels.audit.cases import Case, truth

UNIT = 2.0**-24  # unit roundoff of float32
SMALLEST = 2.0**-126  # normal float32
# A TPU takes what is below SMALLEST for zero, a CPU keeps few digits of it. Above this,
# a term that is lost counts no more than a rounding.
NEGLIGIBLE = SMALLEST / UNIT

BARS = {
    "default": 2e-2,
    "high": 2e-5,
    "highest": 3e-6,
}  # relative L2, every result, every decay
WORST_ROW = 30  # times the bar: no single vector may be off by more
# Unit roundoffs to one of float32: what rounding the operands of a product costs.
COARSER = {"default": 2.0**16, "high": 2.0**8, "highest": 1.0}


def float64(x):
    return np.asarray(x).astype(np.float64)


def relative_error(x, reference, floor=SMALLEST):
    """Relative L2 error; infinite where x is not finite. Elements typically smaller
    than `floor` count as that large.
    """
    x, reference = float64(x), float64(reference)
    assert x.shape == reference.shape
    if not np.isfinite(x).all():
        return np.inf
    size = max(np.linalg.norm(reference), floor * np.sqrt(reference.size))
    return np.linalg.norm(x - reference) / size


def worst_row(x, reference, floor=SMALLEST):
    """Largest error of one vector, relative to its own or the typical size: what a
    global norm would hide.
    """
    x, reference = float64(x), float64(reference)
    size, distance = (
        np.linalg.norm(reference, axis=-1),
        np.linalg.norm(x - reference, axis=-1),
    )
    typical = max(np.sqrt(np.mean(size**2)), floor)
    return float(np.max(distance / np.maximum(size, typical)))


def worst(found, expected, error=relative_error):
    """The largest error among the results of two dicts: (error, name of the result)."""
    return max(
        (float(error(found[name], expected[name], NEGLIGIBLE)), name)
        for name in expected
    )


def not_finite(found):
    return sum(int((~np.isfinite(x)).sum()) for x in found.values())


def mismatches(found, expected):
    """Elements that differ, NaN counted too, by name; names without any left out."""
    counts = {
        name: int(np.sum(np.asarray(found[name]) != expected[name]))
        for name in expected
    }
    return {name: n for name, n in counts.items() if n}


def ulps(x, reference):
    """|error| of each element in units of the last place that float32 has there."""
    reference = float64(reference)
    place = np.spacing(
        np.maximum(np.abs(reference), NEGLIGIBLE).astype(np.float32)
    ).astype(np.float64)
    return np.abs(float64(x) - reference) / place


def condition_numbers(case, expected, samples=8, step=1e-8, seed=1):
    """By name, how much larger the relative change of each element is than that of the
    inputs, all of them moved by a relative `step` up or down: to first order, rms over
    samples, in float64. Infinite where the element is negligible.

    The usual bound, from a run on absolute values, would not do: it grows without limit
    where decay is weak though nothing cancels.
    """
    random = np.random.default_rng(seed)

    def moved(x):
        return float64(x) * (1 + step * random.choice([-1.0, 1.0], x.shape))

    squares = {name: np.zeros_like(x) for name, x in expected.items()}
    for _ in range(samples):
        inputs = [moved(x) for x in case.inputs]
        other = truth(Case(inputs, *map(moved, case[1:4]), case.scale))
        for name in squares:
            squares[name] += (other[name] - expected[name]) ** 2 / samples
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            name: np.where(
                np.abs(x) > NEGLIGIBLE,
                np.sqrt(squares[name]) / (step * np.abs(x)),
                np.inf,
            )
            for name, x in expected.items()
        }


def wrong_signs(found, expected, floor=NEGLIGIBLE):
    """Where a result points the wrong way although its true size is not negligible."""
    return (np.abs(expected) > floor) & (np.sign(float64(found)) != np.sign(expected))


def row(part, gate, case, value, bar, *, result="", passes=None, note=""):
    """One line of the report. passes: whether the gate is held, by default whether
    value <= bar; where bar is None the line is only shown.
    """
    if passes is None and bar is not None:
        passes = bool(value <= bar)
    return {
        "part": part,
        "gate": gate,
        "case": case,
        "result": result,
        "value": value,
        "bar": bar,
        "passes": passes,
        "note": note,
    }
