"""Parts 4 and 5. Signs of all gradients, and every error, judged by how well the
element is determined by its inputs.

An element of condition number c moves by c roundoffs when the inputs move by one. An
error of that order is nobody's fault, even if it turns the sign; a larger one is the
implementation's.
"""

import functools

import numpy as np

from gdn2_kernels.audit.cases import NAMES, decay_case, label
from gdn2_kernels.audit.measure import (
    COARSER,
    UNIT,
    condition_numbers,
    float64,
    row,
    ulps,
    wrong_signs,
)
from gdn2_kernels.oracle import GRADIENTS

CASES = (
    ("every token", 0.01),
    ("every token", 1.0),
    ("every token", 10.0),
    ("channels", 30.0),
    ("one drop", None),
)

# Roundoffs times condition number that an error may come to. Rounded sums of L terms in
# chains of products: the square root of their number, with room.
ALLOWED = 2.0**8
# Units in the last place of o: median and 99 %. Of n elements one is, by chance, n
# times smaller than usual and has that many more, and its error need not be a usual
# one: the largest may come to n times this.
ULPS = {"median": 2.0**4, "99 %": 2.0**10}
LARGEST = 2.0**8
BINS = np.arange(-12.0, 33.0)  # of the histograms, powers of two


@functools.cache
def conditioned(size, family, strength):
    case, expected = decay_case(size, family, strength)
    return case, expected, condition_numbers(case, expected)


def ratios(found, expected, condition):
    """Error over (condition number x unit roundoff), elements that count only."""
    counts = np.isfinite(condition)
    scale = np.maximum(condition[counts], 1) * UNIT * np.abs(expected[counts])
    return np.abs(float64(found)[counts] - expected[counts]) / scale


def quantiles(x):
    return {
        "median": float(np.median(x)),
        "99 %": float(np.quantile(x, 0.99)),
        "largest": float(np.max(x)),
    }


def histogram(x):
    """Counts in `BINS`, what lies outside in the first and last one."""
    places = np.log2(
        np.maximum(np.nan_to_num(x, nan=2.0**40, posinf=2.0**40), 2.0**-40)
    )
    return np.histogram(np.clip(places, BINS[0], BINS[-1]), BINS)[0].tolist()


def signs(subject):
    """Returns: rows and the tables behind them: per case and gradient the census, per
    case the histograms.
    """
    coarser, rows, census, histograms = COARSER[subject.precision], [], [], []
    for family, strength in CASES:
        case, expected, condition = conditioned(subject.size, family, strength)
        found, name = subject.run(case), label(family, strength)
        guilty, doubtful, unsettled = {}, 0, 0
        for gradient in GRADIENTS:
            turned = wrong_signs(found[gradient], expected[gradient])
            known = condition[gradient] * UNIT * coarser * ALLOWED < 1
            guilty[gradient] = int((turned & known).sum())
            doubtful += int((turned & ~known).sum())
            # float64 gives the true sign unless it is itself in doubt.
            unsettled += int(
                (turned & (condition[gradient] * 2.0**-53 * ALLOWED >= 1)).sum()
            )
            census.append(
                {
                    "case": name,
                    "result": gradient,
                    "elements": int(np.isfinite(condition[gradient]).sum()),
                    "well conditioned": int(known.sum()),
                    "wrong": guilty[gradient],
                    "wrong, undetermined": int((turned & ~known).sum()),
                }
            )
        rows.append(
            row(
                "signs",
                "sign",
                name,
                sum(guilty.values()),
                0,
                result=", ".join(x for x in guilty if guilty[x]),
                note=f"{doubtful} wrong where these passes cannot know; "
                f"float64 is in doubt of {unsettled}",
            )
        )

        over = {x: ratios(found[x], expected[x], condition[x]) for x in NAMES}
        largest = {
            x: float(np.max(y, initial=0)) if np.isfinite(y).all() else np.inf
            for x, y in over.items()
        }
        at = max(largest, key=largest.get)
        rows.append(
            row(
                "histograms",
                "condition",
                name,
                largest[at],
                ALLOWED * coarser,
                result=at,
            )
        )
        places = ulps(found["o"], expected["o"])
        everything = np.concatenate([*over.values()])
        of_o = quantiles(places)
        for which, bound in {**ULPS, "largest": LARGEST * places.size}.items():
            rows.append(
                row(
                    "histograms",
                    "ulp",
                    f"{name}: {which}",
                    of_o[which],
                    bound * coarser,
                    result="o",
                )
            )
        histograms.append(
            {
                "case": name,
                "condition": quantiles(everything),
                "condition counts": histogram(everything),
                "ulp": of_o,
                "ulp counts": histogram(places),
            }
        )
    return rows, census, histograms
