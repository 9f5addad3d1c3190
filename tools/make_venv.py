"""Make a virtual environment from a requirements file: python tools/make_venv.py FOLDER REQUIREMENTS [--upgrade]

Installs this package too, editable and without its dependencies, so that the pins decide.
Does nothing when the folder was already made from the same files. Needs only the standard library.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"  # the fast installer; plain pip takes over where it cannot be had
PIP = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"


def fetch_pip(folder: Path) -> Path:
    """Download pip itself, for a Debian Python that comes without ensurepip."""
    index = "https://pypi.org/simple/pip/"
    request = urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request) as reply:
        files = json.load(reply)["files"]
    url = next(file["url"] for file in files if file["filename"] == PIP)
    with urllib.request.urlopen(urllib.parse.urljoin(index, url)) as reply:
        data = reply.read()
    if hashlib.sha256(data).hexdigest() != PIP_SHA256:
        sys.exit(f"{PIP} does not have the checksum expected.")
    wheel = folder / PIP
    wheel.write_bytes(data)
    return wheel


def make_empty(folder: Path) -> Path:
    """A new environment with pip in it; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    full = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True)
    if full.returncode:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        wheel = fetch_pip(folder)
        subprocess.run([python, wheel / "pip", "install", "--quiet", wheel], check=True)
    return python


def install(python: Path, arguments: list[str]) -> None:
    """Install with uv where it works, else with pip, which also honours the reader's pip settings."""
    quiet = {"env": {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}}
    subprocess.run([python, "-m", "pip", "install", "--quiet", UV], capture_output=True, **quiet)
    uv = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    if subprocess.run([*uv, *arguments]).returncode:
        print("uv could not install this; trying pip.", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True, **quiet)


def main() -> None:
    folder, requirements = ROOT / sys.argv[1], ROOT / sys.argv[2]
    upgrade = "--upgrade" in sys.argv
    made_from = "\n".join([sys.version, requirements.read_text(), (ROOT / "pyproject.toml").read_text()])
    wanted = hashlib.sha256(made_from.encode()).hexdigest()
    stamp = folder / "made-from.sha256"
    up_to_date = stamp.exists() and stamp.read_text() == wanted
    if up_to_date and not upgrade:
        return
    print(f"Installing {requirements.name} into {folder.name} (a few minutes the first time) ...", flush=True)
    python = folder / "bin" / "python" if up_to_date else make_empty(folder)
    install(python, [*(["--upgrade"] if upgrade else []), "-r", str(requirements)])
    install(python, ["--no-deps", "--editable", str(ROOT)])
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
