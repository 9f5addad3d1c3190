"""What a stranger does: the first cell of a chapter where the package has never been, a wheel in a folder, one file in
a folder. Each in a Python of its own that cannot see this repository.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gdn2_kernels as gk
from gdn2_kernels import export
from helpers import setup_cell

pytest.importorskip("setuptools")  # builds the wheel; where the environment does not bring it there would be a download

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = f"git+https://github.com/gdn2-kernels/gdn2-kernels@v{gk.__version__}"
# A proxy that nobody listens at: whoever asks the network is refused at once.
NO_NETWORK = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}


class Stranger:
    """A Python that has all packages of this one but ours, and an empty folder to work in."""

    def __init__(self, folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        self.folder = folder / "work"
        others = folder / "others"
        self.folder.mkdir()
        others.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "gdn2" not in path.name:
                (others / path.name).symlink_to(path)
        [self.own] = (folder / "venv").glob("lib/python*/site-packages")
        (self.own / "others.pth").write_text(str(others))
        self.before = set(os.listdir(self.own))

    def run(self, *arguments, **environment):
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        kept |= {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
        return subprocess.run([self.python, *arguments], cwd=self.folder, env=kept, capture_output=True, text=True)

    def installed(self):
        return set(os.listdir(self.own)) - self.before


@pytest.fixture
def stranger(tmp_path):
    return Stranger(tmp_path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the tree, where it leaves nothing behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "gdn2_kernels", folder / "gdn2_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, folder, "--wheel-dir", folder / "wheels"], check=True)
    [wheel] = (folder / "wheels").iterdir()
    return wheel


PACKAGE = {"gdn2_kernels", f"gdn2_kernels-{gk.__version__}.dist-info"}


def one_banner(done):
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith(f"gdn2_kernels {gk.__version__} | jax ") and line.endswith("not TPU times")
    return line


def test_setup_installs_once_and_then_nothing(stranger, wheel):
    assert "No module named" in stranger.run("-c", "import gdn2_kernels").stderr
    here = shutil.copy(wheel, stranger.folder)
    source = setup_cell().replace(ADDRESS, str(here))
    assert source != setup_cell()
    first = one_banner(stranger.run("-c", source, **NO_NETWORK))
    assert stranger.installed() == PACKAGE, "nothing but the package"
    os.remove(here)  # so that a second install would fail
    assert one_banner(stranger.run("-c", source, **NO_NETWORK)) == first


def test_setup_without_network_says_what_to_do(stranger):
    done = stranger.run("-c", setup_cell(), **NO_NETWORK)
    assert done.returncode == 1 and stranger.installed() == set()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: gdn2_kernels could not be installed: switch the internet on")
    page, title = re.search(r"book/(\w+)\.html#([\w-]+)$", last).groups()
    headings = re.findall("^#+ (.*)", (ROOT / "book" / f"{page}.md").read_text(), re.M)
    assert title in [x.lower().replace(" ", "-") for x in headings]
    assert "github.com" in done.stdout, "what pip said is printed"


def of_the_page(pattern, folder):
    """A part of running.md that is found by a pattern, its folder of Kaggle in another place."""
    [text] = re.findall(pattern, (ROOT / "book" / "running.md").read_text(), re.M | re.S)
    changed, count = re.subn(r"/kaggle/input/[\w-]+", str(folder), text)
    assert count == 1
    return changed


def test_a_wheel_in_a_folder(stranger, wheel):
    """The line of the page for a notebook without internet; after it the setup cell has nothing to do."""
    command = of_the_page(r"^%(pip install[^\n]*)", wheel.parent).split()
    done = stranger.run("-m", *command, **NO_NETWORK)
    assert done.returncode == 0, done.stderr
    assert stranger.installed() == PACKAGE
    one_banner(stranger.run("-c", setup_cell(), **NO_NETWORK))


def test_a_file_in_a_folder(stranger, tmp_path):
    """The lines of the page, then those that test it: a stage imported from a folder with nothing else in it."""
    folder = tmp_path / "kaggle"
    folder.mkdir()
    export.main(["mxu", "-o", str(folder / "gdn2_mxu.py")])
    code = of_the_page(r"^```python\n(.*?)^```", folder)
    [test] = re.findall(r"^```python\n(.*?)^```", (ROOT / "book" / "copy.md").read_text(), re.M | re.S)
    done = stranger.run("-c", code + test)
    assert done.returncode == 0, done.stderr
