"""The banner's one line, the version check, the timer."""

import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import gdn2_kernels as gk
from gdn2_kernels import bench, environment
from gdn2_kernels.v5e.compile import ENVIRONMENT

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_banner_is_one_line_and_says_where_kernels_run(capsys):
    gk.banner()
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    for word in (f"gdn2_kernels {gk.__version__}", f"jax {jax.__version__}", "cpu", "interpreted", "not TPU times"):
        assert word in line


def test_banner_says_so_where_a_tpu_is_announced_and_not_there():
    """First with JAX told to use nothing else, then free to fall back, as it is on a machine that nobody configured."""
    code = """
import jax, gdn2_kernels as gk
try:
    gk.banner()
except RuntimeError:
    print("raised")
jax.config.update("jax_platforms", "")
gk.banner()
"""
    announced = {**os.environ, **ENVIRONMENT, "JAX_PLATFORMS": "tpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=announced)
    if "kernels compiled" in done.stdout:
        pytest.skip("this machine has a TPU")
    assert done.returncode == 0, done.stderr
    asked, raised, fell_back = done.stdout.splitlines()
    assert "| no device: Unable to initialize backend 'tpu': " in asked and raised == "raised"
    assert fell_back.endswith(
        "| 1 x cpu | TPU_ACCELERATOR_TYPE=v5litepod-4 but JAX found no TPU: kernels interpreted, times below are not TPU times"
    )


@pytest.mark.parametrize("version, fine", [("0.7.1", False), ("0.6.9", False), ("0.7.2", True), ("0.12.0.1", True)])
def test_old_jax_is_refused_in_words(version, fine):
    if fine:
        environment.check_jax(version)
    else:
        with pytest.raises(ImportError, match=f"0.7.2.*{version}"):
            environment.check_jax(version)


def test_kernels_need_only_jax():
    code = "import sys, gdn2_kernels; print([m for m in ('matplotlib', 'ipywidgets', 'IPython') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
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
