"""The page of symptoms quotes messages. Those of this package are provoked here and compared word for word."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn2_kernels as gk
from gdn2_kernels import environment, export, oracle, sharding, suites, v5e
from helpers import make, once, setup_cell, x64

compiling = importlib.import_module("gdn2_kernels.v5e.compile")  # v5e.compile is its function

pytestmark = once
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "troubleshooting.md").read_text()
BLOCK = re.compile(r"^```text\n(.*?)^```", re.M | re.S)
# Who speaks stands in the line above the box.
SPOKEN = re.compile(r"\b([Tt]his package|The compiler|\w+) says(?:, [^\n]*)?:\n\n```text\n(.*?)^```", re.M | re.S)
OTHERS = {"JAX", "libtpu", "The compiler", "Python"}

(Q, K, V, G, B, W), STATE, _, _ = make(16, 16, 8, B=1, H=2, gate="-1")


def call(**changes):
    return gk.gdn2(**{**dict(q=Q, k=K, v=V, g=G, b=B, w=W), **changes})


def in_float64(**changes):
    with x64():
        return gk.gdn2(*(np.float64(x) for x in (Q, K, V, G, B, W)), **changes)


def with_channels(D, **options):
    return gk.gdn2(*make(4, D, D, B=1, H=1, gate="-1")[0], **options)


def exported_file(of, stage):
    module = types.ModuleType("exported")
    exec(export.export(of), module.__dict__)
    return module.gdn2(Q, K, V, G, B, W, stage=stage)


def setup_cell_without_network():
    failed = types.SimpleNamespace(returncode=1, stderr="")
    with mock.patch("importlib.util.find_spec", return_value=None), mock.patch("subprocess.run", return_value=failed):
        exec(setup_cell(), {})


def banner(devices=None, **patches):
    """The line that it prints where JAX finds such devices."""
    found = [types.SimpleNamespace(device_kind=kind) for kind in devices or ()]
    asked = mock.patch.object(jax, "devices", **(patches or {"return_value": found}))
    on_tpu = mock.patch.object(environment, "on_tpu", return_value="TPU" in (devices or [""])[0])
    with asked, on_tpu, mock.patch("builtins.print") as printed:
        try:
            gk.banner()
        except RuntimeError:
            pass
    return printed.call_args.args[0]


def banner_of_a_tpu_not_found():
    with mock.patch.dict("os.environ", TPU_ACCELERATOR_TYPE="v5litepod-1"):
        with mock.patch.object(environment.jax, "config", types.SimpleNamespace(jax_platforms=None)):
            return banner(["cpu"])


def banner_without_device():
    said = "Unable to initialize backend 'tpu': .. (set JAX_PLATFORMS='' to automatically choose an available backend)"
    return banner(side_effect=RuntimeError(said))


def training_without_optax():
    with mock.patch.dict(sys.modules, {"optax": None}):
        sys.modules.pop("gdn2_kernels.train", None)
        importlib.import_module("gdn2_kernels.train")


def without_libtpu():
    missing = importlib.metadata.PackageNotFoundError
    with mock.patch("importlib.util.find_spec"), mock.patch("importlib.metadata.version", side_effect=missing):
        compiling.libtpu_version()


def without_flatbuffers():
    with mock.patch("importlib.util.find_spec", return_value=None):
        compiling.libtpu_version()


def compiled_where(**what_becomes_of_it):
    def f(x):
        return x + 1

    with mock.patch.object(compiling.subprocess, "run", **what_becomes_of_it):
        with mock.patch.object(compiling, "libtpu_version", return_value="0.0.17"):
            v5e.compile(f, jax.ShapeDtypeStruct((8, 128), jnp.float32), cache=False)


def bench_without_tpu():
    with mock.patch("builtins.print") as printed:
        suites.main([])
    return printed.call_args.args[0]


def bench_of_a_wrong_kernel():
    row = next(row for row in suites.SUITES["quick"] if (row.stage, row.direction) == ("mxu", "forward"))

    def zeros(row):
        return lambda *x: [jnp.zeros_like(y) for y in map(jnp.asarray, oracle.forward(*x[:6]))]

    with mock.patch.object(suites, "function_of", zeros), mock.patch.object(jax, "jit", lambda f: f):
        suites.self_test(row)


def make_without_python():
    return subprocess.run(["make", "-s", "python", "PYTHON="], cwd=ROOT, capture_output=True, text=True).stdout


def site_without_scripts():
    with mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):
        assets = importlib.import_module("web_assets")
    with mock.patch.object(assets, "available", return_value=False), mock.patch.object(assets, "shutil"):
        with mock.patch.object(assets, "FOLDER"), mock.patch.object(assets, "find_npm", side_effect=OSError):
            with mock.patch("builtins.print") as printed:
                assets.fetch()
    return printed.call_args.args[0]


# Each raises, or returns what it printed.
MESSAGES = {
    "not installed": setup_cell_without_network,
    "banner, TPU not found": banner_of_a_tpu_not_found,
    "banner, no device": banner_without_device,
    "old jax": lambda: environment.check_jax("0.6.2"),
    "training": training_without_optax,
    "positive g": lambda: call(g=np.exp(0 * G)),
    "NaN in g": lambda: call(g=np.nan * G),
    "gate per head": lambda: call(g=G[..., 0]),
    "gate of one channel": lambda: call(b=B[..., :1]),
    "grouped values": lambda: call(v=np.repeat(V, 2, 2), w=np.repeat(W, 2, 2)),
    "another kind of array": lambda: call(q=Q.tolist()),
    "float16": lambda: call(v=np.float16(V)),
    "float64": lambda: call(q=np.float64(Q)),
    "float64 in a kernel": lambda: in_float64(stage="mxu"),
    "channels": lambda: with_channels(100, stage="mxu"),
    "chunk size": lambda: call(chunk_size=100),
    "chunk size of a kernel": lambda: call(chunk_size=256, stage="mxu"),
    "state of another shape": lambda: call(initial_state=STATE[0]),
    "state of another type": lambda: call(initial_state=jnp.bfloat16(STATE)),
    "stage": lambda: call(stage="triton"),
    "stage of a file": lambda: exported_file("mxu", stage="wy"),
    "long associative scan": lambda: jax.eval_shape(
        lambda *x: gk.gdn2(*x, stage="associative_scan"), *[jax.ShapeDtypeStruct((1, 1_000_000, 1, 128), jnp.float32)] * 6
    ),
    "heads that do not divide": lambda: sharding.gdn2_sharded(
        jax.make_mesh((4,), ("head",)), *make(4, 8, 8, B=1, H=6, gate="-1")[0]
    ),
    "too few devices": lambda: sharding.suggest_mesh(16, 8, devices=8).mesh(jax.devices()[:1]),
    "no libtpu": without_libtpu,
    "no flatbuffers": without_flatbuffers,
    "libtpu of another JAX": lambda: compiled_where(return_value=types.SimpleNamespace(stderr="..")),
    "slow compiler": lambda: compiled_where(side_effect=subprocess.TimeoutExpired("worker", 600)),
    "bench without TPU": bench_without_tpu,
    "bench of a wrong kernel": bench_of_a_wrong_kernel,
    "make without Python": make_without_python,
    "site without scripts": site_without_scripts,
}


def message(case):
    try:
        return MESSAGES[case]()
    except (ValueError, RuntimeError, ImportError) as error:
        return str(error)


def comparable(text):
    """Without line breaks, and whatever the versions are."""
    return re.sub(r"\d+(\.\d+)+", "#", " ".join(text.split()))


BOXES = [(speaker.capitalize() if "package" in speaker else speaker, comparable(text)) for speaker, text in SPOKEN.findall(PAGE)]
OURS = [text for speaker, text in BOXES if speaker not in OTHERS]


@pytest.mark.parametrize("case", MESSAGES)
def test_the_page_quotes(case):
    assert OURS.count(comparable(message(case))) == 1, message(case)


def test_every_box_is_quoted_from_somebody():
    assert len(BOXES) == len(BLOCK.findall(PAGE)), "who says it stands above the box"
    assert {speaker for speaker, _ in BOXES} == OTHERS | {"This package", "make"}
    assert len(OURS) == len(MESSAGES), "each box of ours is provoked by a case above"


def test_the_lines_that_readers_should_see():
    """running.md shows the line of the setup cell on a TPU and without one."""
    shown = re.findall(r"^gdn2_kernels .*", (ROOT / "book" / "running.md").read_text(), re.M)
    assert [comparable(x) for x in shown] == [comparable(banner([kind])) for kind in ("TPU v5 lite", "cpu")]
