"""Part 3. Error against decay: three families of gates at |g| from 0.01 to 1000, and
three single cases, for all nine results.
"""

from gdn2_kernels.audit.cases import NAMES, STRENGTHS, decay_case, decay_names, label
from gdn2_kernels.audit.measure import (
    BARS,
    NEGLIGIBLE,
    WORST_ROW,
    not_finite,
    relative_error,
    row,
    worst,
    worst_row,
)

# Every token erases what the one before it wrote: what is left of the rounding of split
# operands is four times as large in relation to what is left of the gradients. A
# property of three passes, not of a stage.
ONE_KEY = 4


def bar(precision, family):
    split = precision != "highest"
    return BARS[precision] * (ONE_KEY if family == "one key" and split else 1)


def decay(subject, strengths=STRENGTHS):
    """Returns: rows, one for each case and gate, and the table behind them: per case
    its family, strength, NaN count and the error and worst row of every result.
    """
    rows, table = [], []
    for family, strength in decay_names(strengths):
        case, expected = decay_case(subject.size, family, strength)
        found = subject.run(case)
        limit, name = bar(subject.precision, family), label(family, strength)
        bad = not_finite(found)
        error, at = worst(found, expected)
        off, row_at = worst(found, expected, worst_row) if not bad else (error, at)
        note = (
            f"bar x {ONE_KEY}, see the chapter"
            if limit != BARS[subject.precision]
            else ""
        )
        rows += [
            row("decay", "finite", name, bad, 0),
            row("decay", "error", name, error, limit, result=at, note=note),
            row(
                "decay",
                "worst row",
                name,
                off,
                WORST_ROW * limit,
                result=row_at,
                note=note,
            ),
        ]
        table.append(
            {
                "family": family,
                "strength": strength,
                "not finite": bad,
                "errors": {
                    x: float(relative_error(found[x], expected[x], NEGLIGIBLE))
                    for x in NAMES
                },
                "worst rows": None
                if bad
                else {x: worst_row(found[x], expected[x], NEGLIGIBLE) for x in NAMES},
            }
        )
    return rows, table
