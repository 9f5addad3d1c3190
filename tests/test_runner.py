"""How the tests are run: groups that share programs, and programs that are let go of."""

import functools

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
