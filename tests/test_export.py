"""A stage as one file: nothing but JAX and the standard library, nothing unused, and the same numbers."""

import ast
import builtins
import json
import pathlib
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
from helpers import NAMES, TOLERANCE, assert_close, make, once, truth

ROOT = pathlib.Path(__file__).resolve().parent.parent
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


ALONE = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gdn2_kernels", "matplotlib", "ipywidgets"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import importlib.util
spec = importlib.util.spec_from_file_location("gdn2_file", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import jax
q, k, v, g, b, w = jax.random.normal(jax.random.key(0), (6, 1, 20, 1, 8))
o, state = module.gdn2(0.3 * q, 0.3 * k, v, -abs(g), jax.nn.sigmoid(b), jax.nn.sigmoid(w), precision="highest")
print(json.dumps([float(abs(o).sum()), float(abs(state).sum())]))
"""


def test_runs_where_the_package_is_not(tmp_path):
    """In a process of its own that refuses to import the package: written by the command, used from the file."""
    path = tmp_path / "gdn2_wy.py"
    export.main(["wy", "-o", str(path)])
    done = subprocess.run([sys.executable, "-c", ALONE, str(path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    q, k, v, g, b, w = jax.random.normal(jax.random.key(0), (6, 1, 20, 1, 8))
    o, state = gk.gdn2(0.3 * q, 0.3 * k, v, -abs(g), jax.nn.sigmoid(b), jax.nn.sigmoid(w), stage="recurrence")
    found = json.loads(done.stdout)
    assert found == pytest.approx([float(abs(o).sum()), float(abs(state).sum())], rel=1e-5)


@stages
def test_against_the_oracle(stage):
    inputs, state, do, d_state = x = make(40, 16, 24, B=1, H=2, gate="bursts")
    gdn2 = load(stage).gdn2
    options = dict(stage=stage, precision="highest", chunk_size=16)

    def results(inputs, state, do, d_state):
        outputs, pull_back = jax.vjp(lambda *x: gdn2(*x[:6], initial_state=x[6], **options), *inputs, state)
        return *outputs, *pull_back((do, d_state))

    run = jax.jit(results, compiler_options={"xla_backend_optimization_level": 0})
    found = dict(zip(NAMES, map(np.asarray, run([jnp.asarray(a) for a in inputs], state, do, d_state))))
    assert_close(found, truth(*x), TOLERANCE["float32", "highest"])


@pytest.mark.parametrize("stage", ["mxu"])
def test_as_a_file_it_is_accepted_by_the_compiler(stage):
    gdn2 = load(stage).gdn2

    def loss(*inputs):
        return gdn2(*inputs, interpret=False)[0].sum()

    tokens = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.float32)
    try:
        assert v5e.compile(jax.grad(loss, argnums=range(6)), *[tokens] * 6, count=False).total_bytes > 0
    except v5e.Unavailable as reason:
        pytest.skip(str(reason))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="^stage: .*'wy'.*'triton'"):
        export.export("triton")
    inputs, *_ = make(4, 8, 8, B=1, H=1)
    with pytest.raises(ValueError, match="^stage: expected one of 'auto', 'wy', got 'mxu'"):
        load("wy").gdn2(*inputs, stage="mxu")


@once
def test_the_lines_of_the_page_run(monkeypatch):
    """What the page tells readers to paste, with the quickest of the files in the place of the kernel."""
    page = (ROOT / "book" / "copy.md").read_text()
    [snippet] = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.setitem(sys.modules, "gdn2_mxu", load("wy"))
    exec(snippet, {})
