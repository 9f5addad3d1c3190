"""The banner's one line, the version check, the timer."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import gdn2_kernels as gk
from gdn2_kernels import bench, environment


def test_banner_is_one_line_and_says_where_kernels_run(capsys):
    gk.banner()
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    for word in (f"gdn2_kernels {gk.__version__}", f"jax {jax.__version__}", "cpu", "interpreted", "not TPU times"):
        assert word in line


@pytest.mark.parametrize("version, fine", [("0.7.1", False), ("0.6.9", False), ("0.7.2", True), ("0.12.0.1", True)])
def test_old_jax_is_refused_in_words(version, fine):
    if fine:
        environment.check_jax(version)
    else:
        with pytest.raises(ImportError, match=f"0.7.2.*{version}"):
            environment.check_jax(version)


def test_kernels_need_only_jax():
    code = "import sys, gdn2_kernels; print([m for m in ('matplotlib', 'ipywidgets', 'IPython') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=bench.__file__.rsplit("/", 2)[0])
    assert done.stdout.strip() == "[]", done.stderr


def test_the_timer_waits_for_the_result():
    def slow(x):
        return jax.pure_callback(lambda y: (time.sleep(0.05), y)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    result = bench.measure(slow, jnp.ones(8), repeats=3)
    assert result["milliseconds"] >= 50 and result["quartiles"][0] <= result["milliseconds"] <= result["quartiles"][1]
    assert result["repeats"] == 3


def test_no_repeats_is_refused():
    with pytest.raises(ValueError, match="repeats.*0"):
        bench.measure(lambda x: x, jnp.ones(8), repeats=0)


def test_peak_bytes_counts_arguments_and_results():
    result = bench.measure(lambda x: x + 1, jnp.ones((256, 256)), repeats=1)
    assert result["peak_bytes"] >= 2 * 256 * 256 * 4
