"""All nine parts on one subject, as one dict that JSON can hold."""

import time

from gdn2_kernels.audit.cases import FULL, REDUCED, STRENGTHS
from gdn2_kernels.audit.certificate import certificate
from gdn2_kernels.audit.controls import controls, never_tripped
from gdn2_kernels.audit.decay import decay
from gdn2_kernels.audit.integers import integers
from gdn2_kernels.audit.inverse import inverse
from gdn2_kernels.audit.measure import BARS
from gdn2_kernels.audit.passes import passes
from gdn2_kernels.audit.signs import signs
from gdn2_kernels.audit.structure import structure
from gdn2_kernels.audit.subject import Subject
from gdn2_kernels.bench import provenance

# In the order of the chapter. "signs" gives the histograms, too.
PARTS = ("certificate", "integers", "decay", "signs", "structure", "inverse", "passes")
# Gates whose bar is a multiple of `BARS`.
RELATIVE = ("error", "worst row", "certificate", "split", "inverse", "residual")
FEW_STRENGTHS = (0.01, 1.0, 30.0, 100.0)


def run_parts(subject, strengths=STRENGTHS, step=lambda part: None):
    """Returns: rows of all gates, and a dict of the tables behind them."""
    rows, tables = [], {}
    for part in PARTS:
        step(part)
        if part == "decay":
            found, tables["decay"] = decay(subject, strengths)
        elif part == "signs":
            found, tables["census"], tables["histograms"] = signs(subject)
        else:
            run = {
                "certificate": certificate,
                "integers": integers,
                "structure": structure,
                "inverse": inverse,
                "passes": passes,
            }[part]
            found = run(subject)
        rows += found
    return rows, tables


def all_gates(subject):
    return run_parts(subject, FEW_STRENGTHS)[0]


def audit(
    stage="mxu",
    precision="high",
    *,
    size=FULL,
    strengths=STRENGTHS,
    with_controls=True,
    step=None,
    subject=None,
):
    """Audit a stage.

    Arguments:
      stage, precision: as of `gdn2`.
      size: `FULL`, or `REDUCED` for stages that are not compiled kernels.
      strengths: |g| of the families of decay.
      with_controls: plant errors, and see each of them caught (part 8).
      step: a function that is told the name of each part as it begins.
      subject: something else to audit, with the attributes of `Subject`; then stage and
        precision are not used.

    Returns: dict of provenance, stage, precision, size, seconds (and of all cores,
      cpu_seconds), rows (see
      `measure.row`), tables, and controls: for each planted error the gates that trip.
    Raises: ValueError for an unknown stage or precision.
    """
    start, cpu = time.monotonic(), time.process_time()
    step = step or (lambda part: None)
    subject = subject or Subject(stage, precision, size)
    step("compile")
    if hasattr(subject, "compile"):
        subject.compile()
    rows, tables = run_parts(subject, strengths, step)
    matrix = {}
    if with_controls:
        step("controls")
        found, matrix = controls(all_gates)
        rows += found
        blind = never_tripped(rows, matrix)
        rows.append(
            {
                **found[0],
                "case": "gates that no control trips",
                "value": len(blind),
                "result": ", ".join(blind),
                "passes": not blind,
            }
        )
    for x in rows:
        # Part 9: which lines of one or three passes would float32 not accept?
        if x["bar"] is not None and x["gate"] in RELATIVE:
            x["float32 would pass"] = bool(
                x["value"] <= x["bar"] * BARS["highest"] / BARS[subject.precision]
            )
    return _plain(
        {
            "provenance": provenance(
                "python -m gdn2_kernels audit; seeds are in the code, stages compiled "
                "without LLVM's optimisations unless on a TPU"
            ),
            "stage": subject.name,
            "precision": subject.precision,
            "size": subject.size._asdict(),
            "seconds": round(time.monotonic() - start, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "rows": rows,
            "tables": tables,
            "controls": matrix,
        }
    )


def steps(with_controls=True):
    return ["compile", *PARTS, *(["controls"] if with_controls else [])]


def _plain(x):
    """Numbers to three digits, infinity and NaN as words: JSON has neither."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.3g}") if abs(x) < float("inf") else str(x)
    return x


def failures(report):
    """Rows whose gate is not held."""
    return [x for x in report["rows"] if x["passes"] is False]


def summary(report):
    """One line for each gate: (part, gate, held, of how many, the line nearest to its
    bar).
    """
    lines = {}
    for x in report["rows"]:
        if x["passes"] is not None:
            lines.setdefault((x["part"], x["gate"]), []).append(x)

    def nearness(x):
        value = float(x["value"])
        return value / x["bar"] if x["bar"] else value

    return [
        (part, gate, sum(x["passes"] for x in rows), len(rows), max(rows, key=nearness))
        for (part, gate), rows in lines.items()
    ]


__all__ = [
    "FULL",
    "REDUCED",
    "PARTS",
    "all_gates",
    "audit",
    "failures",
    "steps",
    "summary",
]
