"""Run the notebooks, each at most once for one state of the code.

The site generator's own cache looks at a notebook's cells only. What a cell prints also depends on the package
and on the versions installed, so each state of those has a cache folder of its own.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
CACHES = ROOT / ".cache" / "notebooks"
TIMEOUT = 600  # seconds for one cell


def notebooks() -> list[Path]:
    """The notebooks of the book, in reading order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [ROOT / f"{file}.ipynb" for file in files if file.startswith("notebooks/")]


def cache_path() -> Path:
    """The folder for the package and versions as they are now."""
    state = hashlib.sha256(f"{sys.version} {os.environ.get('JAX_PLATFORMS')}".encode())
    files = [ROOT / "requirements.txt", *(ROOT / "gdn2_kernels").rglob("*")]
    for file in sorted(file for file in files if file.is_file() and file.suffix != ".pyc"):
        state.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return CACHES / state.hexdigest()[:16]


def run(path: Path) -> tuple[float, bool]:
    """Run one notebook where it lies; returns seconds and whether that came from the cache. A failing cell raises."""
    from jupyter_cache import get_cache
    from jupyter_cache.base import CacheBundleIn
    from jupyter_cache.executors.utils import single_nb_execution

    folder = cache_path()
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.iterdir():
        if old != folder:
            shutil.rmtree(old)
    cache = get_cache(str(folder))
    notebook = nbformat.read(path, as_version=4)
    try:
        return cache.match_cache_notebook(notebook).data["execution_seconds"], True
    except KeyError:
        pass
    result = single_nb_execution(notebook, cwd=str(path.parent), timeout=TIMEOUT, allow_errors=False)
    if result.err is not None:
        raise result.err
    bundle = CacheBundleIn(notebook, str(path), data={"execution_seconds": result.time})
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return result.time, False
