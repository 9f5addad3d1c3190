"""What the tests share: the one table of tolerances, and a stage with its gradients. Inputs, decays that hurt and errors
are those of the audit.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels.audit import cases, measure
from gdn2_kernels.audit.cases import GATES as GATES
from gdn2_kernels.audit.cases import NAMES
from gdn2_kernels.audit.cases import make as make
from gdn2_kernels.audit.measure import relative_error, worst_row


def setup_cell() -> str:
    """The code of the first cell, the same in all chapters (tests/test_notebooks.py)."""
    path = Path(__file__).resolve().parent.parent / "notebooks" / "recurrence.ipynb"
    cells = json.loads(path.read_text())["cells"]
    return next("".join(cell["source"]) for cell in cells if "setup" in cell["metadata"].get("tags", []))


# Stages made of Pallas kernels: interpreted here, so a program takes longer to compile; they refuse float64 and channels
# that are no multiple of 8.
KERNELS = [stage for stage in gk.STAGES if stage in ("atomic_ops", "atomic_gdn2", "mxu")]

# Arithmetic is the same at every version of JAX, and interpreted kernels take long to compile: most of it is tested with
# the pinned versions only (tools/run_tests.py).
once = pytest.mark.once


def rest_once(values, *always):
    """Values of a parameter, all but a few of them tested once; tuples are values of several parameters."""
    return [x if x in always else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=once) for x in values]


# Relative L2 error against the float64 oracle, the same for outputs and gradients and for every decay. bfloat16 is what
# rounding the results costs; the oracle is given the rounded inputs.
TOLERANCE = {
    ("float32", "highest"): 1e-5,
    ("float32", "high"): 2e-5,
    ("float32", "default"): 2e-2,
    ("bfloat16", "highest"): 5e-3,
    ("bfloat16", "high"): 5e-3,
    ("bfloat16", "default"): 2e-2,
    ("float64", "highest"): 1e-12,
    ("float64", "high"): 1e-12,
    ("float64", "default"): 1e-12,
}


def x64():
    """Context with jax_enable_x64 on; the name moved in JAX 0.8."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def _results(inputs, initial_state, do, d_final_state, scale, **options):
    def run(*x):
        return gk.gdn2(*x[:6], scale=scale, initial_state=x[6], **options)

    outputs, pull_back = jax.vjp(run, *inputs, initial_state)
    return *outputs, *pull_back((do.astype(outputs[0].dtype), d_final_state))


_compiled = functools.partial(jax.jit, _results, static_argnames=("stage", "precision", "chunk_size"))
# The tests' own programs are compiled in a hurry (tools/run_tests.py), save for these: here the optimised program is the
# one to be judged. Of an interpreted kernel it is not, and half the time of compiling would go into it.
_plain = _compiled(
    compiler_options={"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
)
_kernels = _compiled(compiler_options={"xla_backend_optimization_level": 0})


def results(stage, inputs, initial_state, do, d_final_state, *, scale=None, precision="highest", chunk_size=None):
    """Dict of o, final_state and the seven gradients, as numpy arrays."""
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    inputs = [jnp.asarray(x) for x in inputs]
    run = _kernels if stage in KERNELS else _plain
    found = run(
        inputs, initial_state, do, d_final_state, scale, stage=stage, precision=precision, chunk_size=chunk_size
    )
    return dict(zip(NAMES, map(np.asarray, found)))


def truth(inputs, initial_state, do, d_final_state, *, scale=None):
    """The same dict by the oracle."""
    return cases.truth(cases.Case(inputs, initial_state, do, d_final_state, scale))


def assert_close(found, expected, tolerance, names=NAMES):
    """Every named result within `tolerance`, and no single vector off by more than thirty times that."""
    for name in names:
        error, row = relative_error(found[name], expected[name]), worst_row(found[name], expected[name])
        assert error <= tolerance, f"{name}: relative L2 error {error:.2e} > {tolerance:.0e}"
        assert row <= 30 * tolerance, f"{name}: one vector is off by {row:.2e}"


def wrong_signs(found, expected, floor=1e-30):
    """Elements of a gradient that point the wrong way although their true size is not negligible."""
    return int(measure.wrong_signs(found, expected, floor).sum())
