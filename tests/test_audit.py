"""The audit at reduced size: nine parts, each planted error caught by its gate, each gate tripped by some control."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from gdn2_kernels import __main__ as commands
from gdn2_kernels import audit as package
from gdn2_kernels.audit import cases, controls, inverse, measure, passes, report
from gdn2_kernels.audit.certificate import certify, float64_error
from gdn2_kernels.audit.integers import EXACT_AT, OPERANDS, integers

RECORDED = Path(__file__).parent.parent / "book" / "data" / "audit.json"
# Programs of some size, the same arithmetic at every version of JAX.
once = pytest.mark.once
STAGES = pytest.mark.parametrize(
    "stage, precision", [("recurrence", "highest"), pytest.param("wy", "high", marks=once)]
)
ROW_PARTS = {"certificate", "integers", "decay", "signs", "histograms", "structure", "inverse", "passes"}


@functools.cache
def planted():
    """Rows and the matrix of controls against gates."""
    return controls.controls(report.all_gates)


@functools.cache
def audited(stage, precision):
    return report.audit(stage, precision, size=package.REDUCED, with_controls=False)


# ------------------------------------------------------ planted errors


@once
def test_nothing_planted_nothing_caught():
    assert planted()[1]["nothing planted"] == []


@once
@pytest.mark.parametrize("name", [*controls.CONTROLS, *controls.SPOILED])
def test_a_planted_error_is_caught_by_its_gate(name):
    rows, matrix = planted()
    gate = next(x["result"] for x in rows if x["case"] == name)
    assert gate in matrix[name]


@once
@STAGES
def test_every_gate_is_tripped_by_some_control(stage, precision):
    assert controls.never_tripped(audited(stage, precision)["rows"], planted()[1]) == []


@once
def test_a_gate_without_a_control_is_named():
    rows = [measure.row("decay", "new", "somewhere", 0, 0)]
    assert controls.never_tripped(rows, planted()[1]) == ["new"]


# ------------------------------------------------------ the nine parts


@STAGES
def test_a_stage_passes_every_gate(stage, precision):
    found = audited(stage, precision)
    assert package.failures(found) == []
    assert {x["part"] for x in found["rows"]} == ROW_PARTS
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {"jax", "date", "device", "how"} <= set(found["provenance"])


def test_the_certificate_and_the_oracle_agree():
    error, _ = float64_error(32, 8)
    assert error < 1e-14
    *_, apart, slope = certify(32, 8)
    assert apart < 1e-35 and slope < 1e-45  # far within the gates


@once
def test_integers_tell_the_passes():
    """Three passes are exact up to 16 bits by 8, and not beyond; one pass only at 8 by 8."""
    by_gate = {}
    for x in audited("wy", "high")["rows"]:
        if x["part"] == "integers":
            by_gate.setdefault(x["gate"], []).append(x["value"])
    assert list(by_gate) == list(OPERANDS) == list(EXACT_AT)
    assert not any(by_gate["8 bit"]) and not any(by_gate["8 x 16 bit"]) and all(by_gate["16 x 16 bit"])
    one_pass = controls.Planted("one pass", controls.CONTROLS["one pass instead of six"])
    wrong = {(x["gate"], x["case"]): x["value"] for x in integers(one_pass)}
    assert all((n > 0) == (gate != "8 bit") for (gate, _), n in wrong.items())


def test_decay_covers_the_range():
    table = audited("recurrence", "highest")["tables"]["decay"]
    strengths = {x["strength"] for x in table if x["family"] == "bursts"}
    assert min(strengths) == 0.01 and max(strengths) == 1000
    assert {"every token", "channels", "bursts", "no decay", "one drop"} <= {x["family"] for x in table}
    assert all(set(x["errors"]) == set(cases.NAMES) for x in table)


def test_a_wrong_sign_counts_where_it_is_known():
    """The same flip fails where the element is well determined and is only counted where it is not."""
    case, expected = cases.decay_case(package.REDUCED, "every token", 1.0)
    condition = measure.condition_numbers(case, expected, samples=4)
    known = [np.isfinite(condition[name]) & (condition[name] < 1e3) for name in ("dg", "dq")]
    assert all(0.9 < x.mean() <= 1 for x in known)
    found = expected["dg"].copy()
    at = np.unravel_index(np.argmin(condition["dg"]), found.shape)
    found[at] *= -1
    assert measure.wrong_signs(found, expected["dg"]).sum() == 1 and condition["dg"][at] < 100
    # 1 - x at x close to one: the condition number is what cancels, x / (1 - x)
    assert np.isinf(measure.condition_numbers(case, {k: 0 * x for k, x in expected.items()}, samples=1)["o"]).all()


def test_condition_numbers_see_cancellation():
    """A token that writes nothing new: its value gate cancels against what it erases."""
    nothing = np.zeros((1, 1, 1, 1), np.float32)
    one = np.ones_like(nothing)
    # o = S - S*b + w*v with S = 1, b = 1, w*v = 1e-3: determined to a thousandth of the inputs' digits
    case = cases.Case([one, one, 1e-3 * one, 0 * one, one, one], one, one, nothing, 1.0)
    expected = cases.truth(case)
    condition = measure.condition_numbers(case, expected, samples=64)
    assert 1e3 < condition["o"][0, 0, 0, 0] < 3e3


def test_the_output_is_the_inverse():
    for name in inverse.KEYS:
        case, n = inverse.inverse_case(package.REDUCED, name)
        A, X = inverse.exact(case, n)  # compares the oracle's output with the inverse
        assert np.abs(A).max() > 0.3 and np.allclose((np.eye(n) + A) @ X, np.eye(n), atol=1e-9)


@once
def test_the_bound_of_three_passes_is_near():
    """The worst operands come to a fifth of the bound; without it the gate would say little."""
    shares = {x["case"]: x["value"] / x["bar"] for x in audited("wy", "high")["rows"] if x["part"] == "passes"}
    assert all(x < 1 for x in shares.values()) and max(shares.values()) > 0.1
    assert passes.BOUNDS["high"](0) == 4 * 2.0**-16


# ------------------------------------------------------ command and record


def test_command(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["audit", "--stage", "recurrence", "--precision", "highest", "--reduced", "--no-controls", "--json"]
    assert commands.main([*arguments, str(path)]) == 0
    out = capsys.readouterr().out
    assert "every gate is held" in out and "causal backward" in out
    assert commands.main([*arguments, str(path)]) == 0  # in the place of the first
    (kept,) = json.loads(path.read_text())["audits"]
    assert kept["stage"] == "recurrence" and kept["rows"]


def test_command_names_what_it_has(capsys):
    assert commands.main([]) == 0 and "audit" in capsys.readouterr().out
    assert commands.main(["nonsense"]) == 2
    with pytest.raises(SystemExit):
        commands.main(["audit", "--stage", "nonsense"])


def test_a_package_that_is_not_there_is_skipped_with_a_word(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert commands.main(["audit", "--stage", "deltanet-tpu", "--no-controls"]) == 0
    assert "deltanet-tpu: not installed here, so not audited" in capsys.readouterr().out


def test_bad_words_are_named():
    with pytest.raises(ValueError, match="stage: expected one of recurrence, .* got 'wi'"):
        report.audit("wi", "high")
    with pytest.raises(ValueError, match="precision: expected one of default, .* got 'low'"):
        report.audit("wy", "low")


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("stage", ["wy", "mxu"])
def test_the_recorded_audit_holds_every_gate(stage, precision):
    recorded = json.loads(RECORDED.read_text())["audits"]
    (found,) = [x for x in recorded if (x["stage"], x["precision"]) == (stage, precision)]
    assert package.failures(found) == [] and found["size"] == package.FULL._asdict()
    assert any(len(x["controls"]) == 1 + len(controls.CONTROLS) + len(controls.SPOILED) for x in recorded)
