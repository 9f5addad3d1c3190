"""Times on a TPU: refused elsewhere, rehearsed anywhere, and never taken of a stage that is wrong."""

import json

import jax.numpy as jnp
import pytest

import gdn2_kernels as gk
from gdn2_kernels import suites
from helpers import once

pytestmark = once


def test_without_a_tpu_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert suites.main(["--suite", "quick"]) == 2
    assert "expected a TPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_rehearsal_walks_through_every_kind_of_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(suites.SUITES, "quick", [suites.Row("wy"), suites.Row("recurrence", "forward"), suites.Row("wy")])
    assert suites.main(["--rehearse"]) == 0
    out = capsys.readouterr().out
    assert "[2/2] recurrence, forward" in out and out.count(" ms") == 2 and not list(tmp_path.iterdir())


def test_on_a_tpu_a_file_says_where_it_comes_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suites, "on_tpu", lambda: True)
    monkeypatch.setitem(suites.SUITES, "quick", [suites.rehearsal(suites.Row("wy", "forward"))])
    path = tmp_path / "measured.json"
    assert suites.main(["--repeats", "3", "-o", str(path)]) == 0
    file = json.loads(path.read_text())
    assert {"device", "date", "jax", "commit", "how"} <= set(file["provenance"])
    [row] = file["results"]
    assert row["repeats"] == 3 and 0 < row["relative_error"] < 2e-5 and row["stage"] == "wy"


def test_a_wrong_stage_is_not_timed(monkeypatch):
    def off(*x, **options):
        o, state = gk.gdn2(*x, stage="recurrence")
        return o * 1.001, state

    monkeypatch.setattr(suites, "gdn2", off)
    with pytest.raises(RuntimeError, match="^wy at precision 'high' is wrong"):
        suites.self_test(suites.rehearsal(suites.Row("wy", "forward")))


def test_a_shape_that_is_not_served_is_told_in_its_row():
    found = suites.measure(suites.Row("atomic_gdn2", B=1, L=8, H=1, D=12), 1)
    assert "multiple of 8" in found["failed"] and "milliseconds" not in found


def test_suites_name_every_published_shape():
    rows = suites.SUITES["published"]
    for stage in gk.STAGES[1:]:
        for H in (2, 4, 6):
            assert {suites.Row(stage, "both", 4, L, H) for L in (2048, 4096)} <= set(rows)
    assert len(set(rows)) == len(rows)
    assert all(jnp.dtype(row.dtype) and row.stage in gk.STAGES for row in rows)
