"""Text to train on, as bytes: the Python standard library, which every machine has, and
enwik8. And associative recall, which is made up.
"""

import hashlib
import pathlib
import sysconfig
import urllib.request
import zipfile

import numpy as np

ENWIK8 = "https://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SHA256 = (
    "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"  # unpacked
)
SKIPPED = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "encodings",
)
CACHE = pathlib.Path("~/.cache/gdn2_kernels").expanduser()


def load(name: str) -> np.ndarray:
    """uint8 array. name: "stdlib", "enwik8" (36 MB, downloaded once), or a path.

    Raises: ValueError: a name that is neither, a text below 10,000 bytes, or a download
      that is not what it should be.
    """
    if name == "stdlib":
        data = stdlib()
    elif name == "enwik8":
        data = enwik8()
    elif pathlib.Path(name).is_file():
        data = pathlib.Path(name).read_bytes()
    else:
        raise ValueError(f"data: expected 'stdlib', 'enwik8' or a file, got {name!r}")
    if len(data) < 10_000:
        raise ValueError(f"data: expected at least 10,000 bytes, got {len(data)}")
    return np.frombuffer(data, np.uint8)


def stdlib() -> bytes:
    """The sources of the standard library, documentation strings included, in a fixed
    order: about 10 MB, the same for the same Python.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [
        x
        for x in root.rglob("*.py")
        if not set(x.relative_to(root).parts) & set(SKIPPED)
    ]
    # By a hash of the name: neighbours in a folder are alike, held-out text should not be
    # all of one folder.
    files.sort(key=lambda x: hashlib.sha256(str(x.relative_to(root)).encode()).digest())
    return b"\n".join(x.read_bytes() for x in files)


def enwik8(
    folder: pathlib.Path = CACHE, url: str = ENWIK8, sha256: str = ENWIK8_SHA256
) -> bytes:
    """The first 10^8 bytes of an English Wikipedia, downloaded once; a download that
    broke off goes on where it stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive, partial = folder / "enwik8.zip", folder / "enwik8.zip.part"
    if not archive.exists():
        have = partial.stat().st_size if partial.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
        with urllib.request.urlopen(request) as reply:
            # A server that knows no ranges begins again.
            mode = "ab" if have and getattr(reply, "status", None) == 206 else "wb"
            with open(partial, mode) as out:
                while block := reply.read(1 << 20):
                    out.write(block)
        partial.rename(archive)
    try:
        data = zipfile.ZipFile(archive).read("enwik8")
    except (zipfile.BadZipFile, KeyError) as error:
        archive.unlink()
        raise ValueError(
            f"data: the download of enwik8 is damaged ({error}) and was removed; run again"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        archive.unlink()
        raise ValueError(
            f"data: expected enwik8 with SHA-256 {sha256}, got {found}; the file was removed"
        )
    return data


def batches(data: np.ndarray, B: int, L: int, seed: int = 0):
    """Function of a step number to (inputs, targets), both (B, L) int32, targets one
    byte on. It depends on nothing else, so training goes on where it stopped.
    """

    def batch(step):
        starts = np.random.default_rng((seed, step)).integers(0, len(data) - L, B)
        text = np.stack([data[i : i + L + 1] for i in starts]).astype(np.int32)
        return text[:, :-1], text[:, 1:]

    return batch


def recall_batches(B: int, pairs: int, L: int, vocabulary: int, seed: int = 0):
    """Multi-query associative recall: `pairs` of a key and its value, then the keys again
    at random places, each to be answered with its value. Nothing else counts.

    Keys are the tokens 1 .. vocabulary/2 - 1, values the upper half, 0 fills. Targets are
    -1 where there is no question. Source: Zoology, arXiv 2312.04927.
    """
    half = vocabulary // 2
    if not 0 < pairs < half or L < 3 * pairs:
        raise ValueError(
            f"pairs: expected 1 .. {min(half - 1, L // 3)} with L={L}, vocabulary={vocabulary}, got {pairs}"
        )

    def batch(step):
        random = np.random.default_rng((seed, step))
        inputs = np.zeros((B, L), np.int32)
        targets = np.full((B, L), -1, np.int32)
        for row in range(B):
            keys = random.choice(np.arange(1, half), pairs, replace=False)
            values = random.integers(half, vocabulary, pairs)
            inputs[row, 0 : 2 * pairs : 2], inputs[row, 1 : 2 * pairs : 2] = (
                keys,
                values,
            )
            at = 2 * pairs + random.choice(L - 2 * pairs, pairs, replace=False)
            inputs[row, at], targets[row, at] = keys, values
        return inputs, targets

    return batch
