"""The chapters: how they are stored, what their first cells say, and that every cell runs on the versions at hand."""

import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BUDGET = 90  # seconds on two cores that a chapter may take a reader
LIMIT = 3 * BUDGET  # beyond this the test fails: machines differ, but not by more

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind=None):
    return [cell for cell in nbformat.read(path, as_version=4).cells if kind in (None, cell.cell_type)]


def setup_cells(path):
    return [cell for cell in cells(path, "code") if "setup" in cell.metadata.get("tags", [])]


@by_name
def test_stored_without_outputs(path):
    for cell in cells(path, "code"):
        assert cell.outputs == [] and cell.execution_count is None, f"clear the outputs of {path.name}"
    metadata = json.loads(path.read_text())["metadata"]
    assert "widgets" not in metadata, f"clear the widget state of {path.name}"


@by_name
def test_first_cells(path):
    first, second = cells(path)[:2]
    # Only the badges, and left out of the site, which has buttons of its own and must not ask others for pictures.
    assert first.source.count("[![") == 2 and "remove-cell" in first.metadata.tags
    assert "colab.research.google.com" in first.source and "kaggle.com" in first.source
    assert second.cell_type == "markdown" and second.source.startswith("# ")
    assert len(setup_cells(path)) == 1
    assert cells(path, "code")[0] == setup_cells(path)[0], "the setup cell is the first one with code"


def test_one_setup_cell_for_all():
    assert len({setup_cells(path)[0].source for path in NOTEBOOKS}) == 1


@by_name
def test_code_is_readable_on_a_page(path):
    for cell in cells(path, "code"):
        if "setup" not in cell.metadata.get("tags", []):
            assert max(map(len, cell.source.splitlines()), default=0) <= 88, cell.source


@by_name
def test_chapters_use_public_names_only(path):
    for cell in cells(path, "code"):
        for line in re.findall(r"^(?:from|import) gdn2_kernels.*$", cell.source, re.M):
            assert not re.search(r"[ .]_", line), line


@by_name
def test_runs_from_top_to_bottom(path, capsys):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        import jupyter_cache  # noqa: F401
    except ImportError:
        seconds, how = execute(path), "run"
    else:
        # Where the book is built a run of the same state counts, and is not repeated.
        sys.path.insert(0, str(ROOT / "tools"))
        import notebook_cache

        seconds, cached = notebook_cache.run(path)
        how = "cached" if cached else "run"
    with capsys.disabled():
        print(f"\n  {path.stem}: {seconds:.1f} s of {BUDGET} s ({how})")
    assert seconds <= LIMIT, f"{path.name} took {seconds:.0f} s; the budget is {BUDGET} s"


def execute(path):
    from nbclient import NotebookClient

    start = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}}).execute()
    return time.monotonic() - start


def run_setup(monkeypatch, folder, found, returncode=0):
    """Run the setup cell where nothing but `found` is installed; returns the commands it gave to pip."""
    import importlib.util

    commands = []

    def fake_run(command, **_):
        commands.append(command)
        return types.SimpleNamespace(returncode=returncode, stderr="no route to host")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in found else None)
    monkeypatch.setattr(subprocess, "run", fake_run)
    exec(setup_cells(NOTEBOOKS[0])[0].source, {})
    return commands


def test_setup_leaves_alone_what_is_there(monkeypatch, tmp_path, capsys):
    assert run_setup(monkeypatch, tmp_path, {"gdn2_kernels", "matplotlib", "ipywidgets"}) == []
    assert len(capsys.readouterr().out.splitlines()) == 1, "the setup cell prints one line"


def test_setup_installs_the_package_without_dependencies(monkeypatch, tmp_path):
    import numpy

    package, plots, widgets = run_setup(monkeypatch, tmp_path, set())
    assert "--no-deps" in package and package[-1].startswith("git+https://")
    assert f"numpy=={numpy.__version__}" in plots, "matplotlib must not bring another numpy"
    assert widgets[-1] == "ipywidgets"
    assert not any("jax" in word for command in (package, plots, widgets) for word in command[1:])


def test_setup_says_what_to_do_when_it_fails(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="could not be installed: .* run this cell again"):
        run_setup(monkeypatch, tmp_path, {"matplotlib"}, returncode=1)


def test_setup_uses_a_clone_that_is_not_installed():
    """A notebook opened in a clone works there without an install."""
    source = setup_cells(NOTEBOOKS[0])[0].source + "\nprint(gk.__file__)"
    hide = f"""
import importlib.util, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path = [path for path in sys.path if path != {str(ROOT)!r}]
assert importlib.util.find_spec("gdn2_kernels") is None
"""
    result = subprocess.run([sys.executable, "-c", hide + source], cwd=ROOT / "notebooks", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(ROOT / "gdn2_kernels" / "__init__.py")
