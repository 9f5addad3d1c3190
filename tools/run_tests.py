"""Run the tests on up to three levels of JAX: python tools/run_tests.py main colab newest

main     the pinned versions: builds the book, then every test, the site in a browser included
colab    the oldest versions promised, those of a stock Colab or Kaggle TPU: package tests and notebooks
newest   the newest JAX that a Python found here can install: package tests

Extra arguments for pytest can be given in PYTEST_ARGS. Needs only the standard library.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS_SITE = ["--ignore=tests/test_site.py", "--ignore=tests/test_links.py"]
NEEDS_NOTEBOOK_KERNEL = ["--ignore=tests/test_notebooks.py"]


def run(*command) -> bool:
    return subprocess.run([str(part) for part in command], cwd=ROOT).returncode == 0


def pytest(venv: str, *arguments: str) -> bool:
    # Most of the time is spent compiling, one core to a program: a process for each core.
    parallel = ["-n", "auto", "--dist", "loadgroup"]
    extra = shlex.split(os.environ.get("PYTEST_ARGS", ""))
    return run(f"{venv}/bin/python", "-m", "pytest", "tests", *parallel, *arguments, *extra)


def jax_of(venv: str) -> str:
    query = [ROOT / venv / "bin" / "python", "-c", "from importlib.metadata import version; print(version('jax'))"]
    return "jax " + subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main_stack() -> tuple[bool, str]:
    # The book is built first: a broken site should stop the run early.
    ok = run("make", "--no-print-directory", "book", f"PYTHON={sys.executable}")
    ok = ok and all([run(".venv/bin/ruff", "check", "--quiet"), pytest(".venv")])  # both, whatever the first says
    return ok, jax_of(".venv")


def colab_stack() -> tuple[bool, str]:
    ok = run(sys.executable, "tools/make_venv.py", ".venv-colab", "requirements-colab.txt")
    return ok and pytest(".venv-colab", *NEEDS_SITE), jax_of(".venv-colab")


def newest_stack() -> tuple[bool | None, str]:
    finder = ["sh", "tools/find_python.sh", "3.14", "3.13", "3.12"]
    python = subprocess.run(finder, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not python:
        print("No Python 3.12 or newer was found, so the newest JAX was not tested.", flush=True)
        return None, "no Python >= 3.12"
    ok = run(python, "tools/make_venv.py", ".venv-newest", "requirements-newest.in", "--upgrade")
    return ok and pytest(".venv-newest", *NEEDS_SITE, *NEEDS_NOTEBOOK_KERNEL), jax_of(".venv-newest")


STACKS = {"main": main_stack, "colab": colab_stack, "newest": newest_stack}


def main() -> int:
    words, failed = [], False
    for name in sys.argv[1:]:
        print(f"\n=== {name} ===", flush=True)
        start = time.monotonic()
        ok, what = STACKS[name]()
        result = {True: "passed", False: "FAILED", None: "skipped"}[ok]
        failed = failed or ok is False
        words.append(f"{name} ({what}) {result} in {time.monotonic() - start:.0f} s")
    print("\nTests: " + "; ".join(words))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
