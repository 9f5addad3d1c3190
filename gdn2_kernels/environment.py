"""Where this runs: the versions it was given and the device it found."""

import inspect
import os
import platform

import jax
import numpy as np

__version__ = "0.1.0"
MINIMUM_JAX = "0.7.2"
# Images of machines with a TPU set one of these.
ANNOUNCE_A_TPU = "TPU_ACCELERATOR_TYPE", "TPU_NAME", "COLAB_TPU_ADDR"


def _numbers(version):
    return tuple(int(x) for x in version.split(".")[:3] if x.isdigit())


def check_jax(version=None):
    """Raises: ImportError that names the version needed, where JAX is too old."""
    version = jax.__version__ if version is None else version
    if _numbers(version) < _numbers(MINIMUM_JAX):
        raise ImportError(f"gdn2_kernels needs jax {MINIMUM_JAX} or newer; this is jax {version}")


def on_tpu() -> bool:
    """True where kernels are compiled for a TPU rather than interpreted."""
    return jax.default_backend() == "tpu"


def _without_tpu() -> str:
    if not jax.config.jax_platforms:  # JAX looked for a TPU
        for name in ANNOUNCE_A_TPU:
            if os.environ.get(name):
                return f"{name}={os.environ[name]} but JAX found no TPU"
    return "no TPU"


def banner() -> None:
    """Print one line: versions, device, and whether kernels are compiled or interpreted
    here. Where JAX cannot start at all the line gives its reason, and its error follows.
    """
    versions = (
        f"gdn2_kernels {__version__} | jax {jax.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}"
    )
    try:
        devices = jax.devices()
    except RuntimeError as problem:
        print(f"{versions} | no device: {problem}")
        raise
    mode = "kernels compiled"
    if not on_tpu():
        mode = f"{_without_tpu()}: kernels interpreted, times below are not TPU times"
    print(f"{versions} | {len(devices)} x {devices[0].device_kind} | {mode}")


def show(*functions):
    """Source of functions or classes of this package, as a notebook displays Python:
    chapters show, they never retype.
    """
    from IPython.display import Code  # only notebooks call this, and they have IPython

    return Code("\n\n".join(inspect.getsource(inspect.unwrap(f)) for f in functions).rstrip(), language="python")
