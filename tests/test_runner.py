"""How the tests are run: groups that share programs, programs that are let go of, a limit of time."""

import functools
import pathlib
import time

import conftest
import jax
import jax.numpy as jnp
import pytest


def test_groups_share_a_process():
    group = conftest.group
    assert group("tests/test_a.py::test_x[wy-high--0.1]") == group("tests/test_a.py::test_y[high-wy]")
    assert group("tests/test_a.py::test_x[wy-highest-resets]") == group("tests/test_a.py::test_y[wy]")
    assert group("tests/test_a.py::test_x[high]") == group("tests/test_a.py::test_y") == "tests/test_a.py"
    assert group("tests/test_a.py::test_x[wy-high]") != group("tests/test_a.py::test_x[wy]")


@pytest.mark.skipif(not conftest.MAPPINGS.exists(), reason="counts memory mappings, which Linux alone tells")
def test_clearing_caches_gives_mappings_back():
    # On this rests the limit in conftest.py.
    x = jnp.ones(8)
    jax.clear_caches()
    before = conftest.mappings()
    programs = [jax.jit(functools.partial(jnp.add, i)) for i in range(20)]  # kept, as those of a module are
    for program in programs:
        program(x).block_until_ready()
    compiled = conftest.mappings()
    jax.clear_caches()
    assert compiled - before > 40
    assert conftest.mappings() - before < (compiled - before) / 4


def test_a_command_out_of_time_is_ended_with_what_it_started(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "tools")
    import run_tests

    monkeypatch.setattr(run_tests, "deadline", time.monotonic() + 2)
    with pytest.raises(run_tests.OutOfTime):
        run_tests.run("sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait")
    child = int((tmp_path / "pid").read_text())
    # It may stay a moment as a name in the table of processes.
    status = pathlib.Path(f"/proc/{child}/status")
    for _ in range(100):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")
