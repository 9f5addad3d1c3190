"""Run the tests on up to three levels of JAX: python tools/run_tests.py main colab newest

main     the pinned versions: builds the book, then every test, the site in a browser included
colab    the oldest versions promised, those of a stock Colab or Kaggle TPU: notebooks, and the tests of all that hangs
         on the version (not those marked `once`) for the stages that "auto" picks
newest   the newest JAX that a Python found here can install: the same tests, without notebooks

Each level has a limit of time, so that a hung program fails the run instead of stopping it. On a machine slower than
two cores TEST_PATIENCE=3 makes the limits three times as long. Extra arguments for pytest can be given in PYTEST_ARGS.
Needs only the standard library.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS_SITE = ["--ignore=tests/test_site.py", "--ignore=tests/test_links.py"]
NEEDS_NOTEBOOK_KERNEL = ["--ignore=tests/test_notebooks.py", "--ignore=tests/test_install.py"]
# Of the stages those that "auto" picks; the others by the compiler of the chip, as files, and in their chapters.
SLOWER = "recurrence or associative_scan or atomic_ops or atomic_gdn2"
ALL_STAGES = "test_compiles or test_alone_against_the_oracle or test_runs_from_top_to_bottom"
HANGS_ON_THE_VERSION = ["-m", "not once", "-k", f"not ({SLOWER}) or {ALL_STAGES}"]

# The tests' own programs run once for milliseconds and compile in half the time without LLVM's optimizations. Those that
# are judged by the oracle ask for the compiler as a reader has it (tests/helpers.py), and the book is built with it.
QUICK_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

MINUTES = {"main": 70, "colab": 30, "newest": 25}
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
deadline = float("inf")  # of the level that runs


class OutOfTime(Exception):
    """The level used all of its time; what it ran is ended."""


def run(*command, **environment: str) -> bool:
    # A session of its own: workers and their compilers are ended with it.
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, start_new_session=True,
                               env={**os.environ, **environment})  # fmt: skip
    try:
        return process.wait(max(deadline - time.monotonic(), 0)) == 0
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    finally:
        # Also after Ctrl-C, which the session does not hear of, and when a crash left something running.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def pytest(venv: str, *arguments: str) -> bool:
    # Most of the time is spent compiling, one core to a program: a process for each core. A process that crashes fails
    # the run: with another in its place pytest-xdist can wait for ever.
    parallel = ["-n", "auto", "--dist", "loadscope", "--max-worker-restart=0"]
    extra = shlex.split(os.environ.get("PYTEST_ARGS", ""))
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILER}".strip()
    return run(f"{venv}/bin/python", "-m", "pytest", "tests", *parallel, *arguments, *extra, XLA_FLAGS=flags)


def jax_of(venv: str) -> str:
    query = [ROOT / venv / "bin" / "python", "-c", "from importlib.metadata import version; print(version('jax'))"]
    return "jax " + subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main_stack() -> tuple[bool, str]:
    # The book is built first: a broken site should stop the run early.
    ok = run("make", "--no-print-directory", "book", f"PYTHON={sys.executable}")
    checks = [".venv/bin/ruff", "check", "--quiet"], [".venv/bin/codespell"]
    ok = ok and all([*(run(*check) for check in checks), pytest(".venv")])  # all of them, whatever the first says
    return ok, jax_of(".venv")


def colab_stack() -> tuple[bool, str]:
    ok = run(sys.executable, "tools/make_venv.py", ".venv-colab", "requirements-colab.txt")
    return ok and pytest(".venv-colab", *NEEDS_SITE, *HANGS_ON_THE_VERSION), jax_of(".venv-colab")


def newest_stack() -> tuple[bool | None, str]:
    finder = ["sh", "tools/find_python.sh", "3.14", "3.13", "3.12"]
    python = subprocess.run(finder, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not python:
        print("No Python 3.12 or newer was found, so the newest JAX was not tested.", flush=True)
        return None, "no Python >= 3.12"
    ok = run(python, "tools/make_venv.py", ".venv-newest", "requirements-newest.in", "--upgrade")
    ok = ok and pytest(".venv-newest", *NEEDS_SITE, *NEEDS_NOTEBOOK_KERNEL, *HANGS_ON_THE_VERSION)
    return ok, jax_of(".venv-newest")


STACKS = {"main": main_stack, "colab": colab_stack, "newest": newest_stack}


def main() -> int:
    global deadline
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends this run ends what it started
    words, failed = [], False
    for name in sys.argv[1:]:
        print(f"\n=== {name} ===", flush=True)
        start = time.monotonic()
        deadline = start + 60 * PATIENCE * MINUTES[name]
        try:
            ok, what = STACKS[name]()
        except OutOfTime:
            ok, what = False, f"ended at its limit of {PATIENCE * MINUTES[name]:g} minutes"
        result = {True: "passed", False: "FAILED", None: "skipped"}[ok]
        failed = failed or ok is False
        words.append(f"{name} ({what}) {result} in {time.monotonic() - start:.0f} s")
    print("\nTests: " + "; ".join(words))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
