"""Build the site: fetch browser scripts, run the notebooks, make the pages. Called by `make book`."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import notebook_cache
import web_assets

ROOT = notebook_cache.ROOT


@contextlib.contextmanager
def log_of_kernels():
    """What the notebooks' processes write past the notebook, into a file: start-up chatter of JAX and Jupyter."""
    log = ROOT / "_build" / "notebooks.log"
    log.parent.mkdir(exist_ok=True)
    saved = os.dup(2)
    with log.open("w") as out:
        os.dup2(out.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def run_notebooks() -> None:
    paths = notebook_cache.notebooks()
    print(f"Running {len(paths)} notebooks", flush=True)
    for path in paths:
        print(f"  {path.stem:20}", end="", flush=True)
        try:
            with log_of_kernels():
                seconds, cached = notebook_cache.run(path)
        except Exception as error:
            sys.exit(f"failed\n{error}\n{path.relative_to(ROOT)} does not run to its end; the site was not built.")
        print(f"{seconds:6.1f} s  {'cached' if cached else 'run'}", flush=True)


def make_pages() -> None:
    # From nothing each time: a page left over from an older tree must not survive.
    shutil.rmtree(ROOT / "_build" / "html", ignore_errors=True)
    shutil.rmtree(ROOT / "_build" / ".doctrees", ignore_errors=True)
    print("Making the pages", flush=True)
    log = ROOT / "_build" / "build.log"
    log.parent.mkdir(exist_ok=True)
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "-W", "--keep-going", "-n", "-q"]
    with log.open("w") as out:
        result = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    # The generator can report success after a failure, so its pages are looked for too.
    if result.returncode or not (ROOT / "_build" / "html" / "book" / "start.html").exists():
        plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
        sys.exit(f"{plain}\nThe site was not built: the first WARNING or ERROR above says why.")


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # so that the book can be built anywhere and is the same everywhere
    web_assets.fetch()
    run_notebooks()
    make_pages()
    print("The site is in _build/html. Look at it with: make serve")


if __name__ == "__main__":
    main()
