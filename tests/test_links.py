"""Every link of the repository to itself follows from the address in pyproject.toml, and leads to something."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
OWNER, NAME = REPOSITORY.removeprefix("https://github.com/").split("/")
TAG = f"v{PROJECT['version']}"

PAGES = [ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FILES = [*PAGES, *NOTEBOOKS, ROOT / "_config.yml", ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml")),
         *sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "gdn2_kernels").rglob("*.py"))]  # fmt: skip


def names(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@names(FILES)
def test_addresses_of_this_repository(path):
    text = path.read_text()
    # Whoever else is linked to has another name; ours has to come with the right owner.
    for owner in re.findall(rf"github(?:usercontent)?\.com/(?:github/)?([\w.-]+)/{NAME}\b", text):
        assert owner == OWNER
    for owner, repository, branch, target in re.findall(
        r"(?:colab\.research\.google\.com/github|github\.com)/([\w.-]+)/([\w.-]+)/(?:blob|tree|raw)/([\w.-]+)/([\w./-]+)", text
    ):
        if (owner, repository) == (OWNER, NAME):
            assert branch == "main", "links lead to the branch that exists"
            assert (ROOT / target).exists(), f"{path.name} links to {target}, which does not exist"
    for address, tag in re.findall(r"git\+(https://[\w./-]+)@([\w.]+)", text):
        assert (address, tag) == (REPOSITORY, TAG), "an install line points at the version of this tree"
    for site in re.findall(r"https://([\w-]+)\.github\.io/" + NAME, text):
        assert site == OWNER


@names(NOTEBOOKS)
def test_badges(path):
    blob = f"{OWNER}/{NAME}/blob/main/notebooks/{path.name}"
    targets = re.findall(r"\]\((https://[^)]*)\)\s*(?=\[|$)", nbformat.read(path, as_version=4).cells[0].source)
    assert targets == [
        f"https://colab.research.google.com/github/{blob}",
        f"https://kaggle.com/kernels/welcome?src=https://github.com/{blob}",
    ]


def test_readme_names_every_chapter():
    text = (ROOT / "README.md").read_text()
    for path in NOTEBOOKS:
        assert text.count(f"{OWNER}/{NAME}/blob/main/notebooks/{path.name}") == 2, "one link to Colab, one to Kaggle"


def test_other_files_repeat_the_project_exactly():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]
    assert config == {"url": REPOSITORY, "branch": "main"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == REPOSITORY
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    import gdn2_kernels

    assert gdn2_kernels.__version__ == PROJECT["version"]


def test_toc_has_every_page_and_chapter():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]
    there = [str(path.relative_to(ROOT).with_suffix("")) for path in [*PAGES[1:], *NOTEBOOKS]]
    assert sorted(listed) == sorted(there)


@names([*PAGES, *NOTEBOOKS])
def test_links_between_files(path):
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


# These begin with an exported file: tests/test_install.py runs them.
@names([path for path in PAGES if path.name not in ("copy.md", "running.md")])
def test_code_on_the_page_runs(path):
    blocks = re.findall(r"^```(?:python|\{code-cell\}.*)\n(?::.*\n)*(.*?)^```", path.read_text(), re.M | re.S)
    if blocks:
        result = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_workflows_pin_their_actions():
    for path in (ROOT / ".github").rglob("*.yml"):
        for action, version in re.findall(r"uses: ([\w./-]+)@(\S+)", path.read_text()):
            assert re.fullmatch(r"v\d+\.\d+\.\d+|[0-9a-f]{40}", version), f"{path.name}: {action} is not pinned"


def test_requirements_are_pinned():
    text = (ROOT / "requirements.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all("==" in line.split(";")[0] for line in lines)
    assert "jupyter-book==1.0.4.post1" in lines, "jupyter-book 2 cannot build this book"
    minimum = PROJECT["dependencies"][0].removeprefix("jax>=")
    assert f"jax=={minimum}" in (ROOT / "requirements-colab.txt").read_text(), "the oldest version promised is tested"
