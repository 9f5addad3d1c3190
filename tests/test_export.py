"""A stage as one file: nothing but JAX and the standard library, nothing unused, and the same numbers."""

import ast
import builtins
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels import export, v5e
from helpers import NAMES, TOLERANCE, assert_close, make, once, rest_once, truth

stages = pytest.mark.parametrize("stage", gk.STAGES)


def load(stage):
    """The exported file as a module, as somebody's own file would be."""
    module = types.ModuleType(f"exported_{stage}")
    exec(compile(export.export(stage), f"gdn2_{stage}.py", "exec"), module.__dict__)
    return module


@once
@stages
def test_only_jax_is_imported(stage):
    for node in ast.walk(ast.parse(export.export(stage))):
        names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            assert top == "jax" or top in sys.stdlib_module_names, name


@once
@stages
def test_everything_is_defined_and_used(stage):
    text = export.export(stage)
    tree = ast.parse(text)
    defined = {x.name for x in tree.body if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    defined |= {name.id for x in tree.body if isinstance(x, ast.Assign) for t in x.targets for name in ast.walk(t)
                if isinstance(name, ast.Name)}  # fmt: skip
    loaded = [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]
    assert defined - set(loaded) == {"gdn2"}
    bound = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load)}
    bound |= {x.name for x in ast.walk(tree) if isinstance(x, ast.ExceptHandler)}
    bound |= {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)}
    bound |= {x.name for x in ast.walk(tree) if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    bound |= {(x.asname or x.name).partition(".")[0] for node in ast.walk(tree)
              if isinstance(node, (ast.Import, ast.ImportFrom)) for x in node.names}  # fmt: skip
    assert set(loaded) - bound - set(dir(builtins)) == set()
    assert "gdn2_kernels" not in re.sub(r"^#.*|https://\S+", "", text, flags=re.M).replace("gdn2-kernels", "")


# Somebody else's program: numbers in, numbers out. What is not JAX, NumPy or Python cannot be imported.
ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gdn2_kernels", "matplotlib", "ipywidgets", "tqdm", "optax"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
folder, stage = sys.argv[1:]
sys.path.insert(0, folder)
import importlib
import jax, numpy as np

gdn2 = importlib.import_module(f"gdn2_{stage}").gdn2
given = np.load(f"{folder}/given.npz")
*inputs, do, d_state = (given[name] for name in given.files)

def run(*x):
    return gdn2(*x[:6], initial_state=x[6], precision="highest", chunk_size=16)

def results(inputs, do, d_state):
    outputs, pull_back = jax.vjp(run, *inputs)
    return *outputs, *pull_back((do, d_state))

quickly = {"xla_backend_optimization_level": 0}
found = jax.jit(results, compiler_options=quickly)(inputs, do, d_state)
np.savez(f"{folder}/found.npz", *found)
"""


@stages
def test_alone_against_the_oracle(stage, tmp_path):
    """Written by the command, imported from a folder by a Python that is told nothing of this one (-I) and cannot import
    the package: outputs and gradients. With chunks of 16 quick ones; test_install.py runs the fast kernels of mxu.
    """
    inputs, state, do, d_state = x = make(40, 16, 24, B=1, H=2, gate="bursts")
    export.main([stage, "-o", str(tmp_path / f"gdn2_{stage}.py")])
    np.savez(tmp_path / "given.npz", *inputs, state, do, d_state)
    command = [sys.executable, "-I", "-c", ALONE, tmp_path, stage]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz") as found:
        found = dict(zip(NAMES, (found[name] for name in found.files), strict=True))
    assert_close(found, truth(*x), TOLERANCE["float32", "highest"])


@pytest.mark.parametrize("stage", rest_once(gk.STAGES, *(stage for stage in gk.STAGES if stage != "associative_scan")))
def test_compiles_as_a_file(stage):
    """The compiler of the chip takes what is in the file, with gradients. The scan takes it long, even at a few tokens."""
    gdn2 = load(stage).gdn2

    def loss(*inputs):
        return gdn2(*inputs, interpret=False)[0].sum()

    tokens = jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.float32)
    try:
        report = v5e.compile(jax.grad(loss, argnums=range(6)), *[tokens] * 6, count=False, cache=False)
    except v5e.Unavailable as reason:
        pytest.skip(str(reason))
    assert report.total_bytes > 0


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="^stage: .*'wy'.*'triton'"):
        export.export("triton")
    inputs, *_ = make(4, 8, 8, B=1, H=1)
    with pytest.raises(ValueError, match="^stage: expected one of 'auto', 'wy', got 'mxu'"):
        load("wy").gdn2(*inputs, stage="mxu")
