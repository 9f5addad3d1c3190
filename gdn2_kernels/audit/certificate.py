"""Part 1. The recurrence and its adjoint in decimal arithmetic, 80 digits and 40, from
the very float32 numbers that a stage is given.

What vouches for the certificate: the two agree, and the slope of the function along
a random direction is what the gradients say it is, both to 1e-30.
"""

import functools
from decimal import Decimal, localcontext

import numpy as np

from gdn2_kernels import oracle
from gdn2_kernels.audit.cases import NAMES, Case, every_token, random_case
from gdn2_kernels.audit.measure import BARS, relative_error, row, worst
from gdn2_kernels.audit.subject import run_small

DIGITS = 80
AGREEMENT = 1e-30
STEP = Decimal(10) ** -25  # of the slope: its error is of order STEP squared


def exactly(x):
    """float32 numbers as decimals, every bit kept."""
    return np.array([Decimal(float(n)) for n in x.flat], object).reshape(x.shape)


def forward(case):
    return oracle.forward(*case.inputs, scale=case.scale, initial_state=case.state)


def results(case):
    gradients = oracle.backward(
        *case.inputs, case.do, case.d_state, scale=case.scale, initial_state=case.state
    )
    return dict(zip(NAMES, [*forward(case), *gradients.values()]))


def loss(case):
    o, final_state = forward(case)
    return (o * case.do).sum() + (final_state * case.d_state).sum()


def slope_error(case, gradients, seed=12):
    """How far the slope along a random direction is from what the gradients make it,
    relative to their product's size.
    """
    random = np.random.default_rng(seed)
    arrays = [*case.inputs, case.state]
    direction = [exactly(random.choice([-1.0, 1.0], x.shape)) for x in arrays]

    def moved(step):
        *inputs, state = (x + step * d for x, d in zip(arrays, direction))
        return loss(case._replace(inputs=inputs, state=state))

    slope = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    terms = [g * d for g, d in zip(gradients, direction)]
    return abs(slope - sum(x.sum() for x in terms)) / sum(abs(x).sum() for x in terms)


@functools.cache
def certify(L, D, digits=DIGITS, plant=None):
    """(case, results in float64, disagreement of `digits` with half as many, error of
    the slope). plant: a function of the results that spoils them, for a control.
    """
    case = random_case(L, D, every_token(1.0), seed=11)
    exact = Case(
        [exactly(x) for x in case.inputs], *map(exactly, case[1:4]), case.scale
    )
    with localcontext(prec=digits):
        found = results(exact)
        if plant is not None:
            found = plant(found)
    with localcontext(prec=max(digits // 2, 8)):
        fewer = results(exact)
    with localcontext(prec=DIGITS):
        apart = max(
            abs(found[name] - fewer[name]).max() / abs(found[name]).max()
            for name in NAMES
        )
        slope = slope_error(exact, [found[name] for name in oracle.GRADIENTS])
    return (
        case,
        {name: x.astype(np.float64) for name, x in found.items()},
        float(apart),
        float(slope),
    )


def vouching_rows(L, D, **options):
    """The gates that the certificate itself has to pass."""
    _, _, apart, slope = certify(L, D, **options)
    return [
        row(
            "certificate",
            "digits",
            f"{DIGITS} digits against {DIGITS // 2}",
            apart,
            AGREEMENT,
        ),
        row("certificate", "slope", "gradients against the slope", slope, AGREEMENT),
    ]


def certificate(subject):
    """Rows: every result of the subject against the certificate."""
    L, D = min(64, subject.size.L), min(16, subject.size.D)
    case, expected, _, _ = certify(L, D)
    found = run_small(subject, case, expected)
    rows = vouching_rows(L, D)
    for name in NAMES:
        error = float(relative_error(found[name], expected[name]))
        rows.append(
            row(
                "certificate",
                "certificate",
                f"L {L}, K = V = {D}",
                error,
                BARS[subject.precision],
                result=name,
            )
        )
    return rows


def float64_error(L, D):
    """How far the float64 oracle is from the certificate: (error, result)."""
    case, expected, _, _ = certify(L, D)
    return worst(results(case), expected)
