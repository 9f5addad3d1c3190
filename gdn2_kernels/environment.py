"""Where this runs: the versions it was given and the device it found."""

import inspect
import platform

import jax
import numpy as np

__version__ = "0.1.0"
MINIMUM_JAX = "0.7.2"


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


def banner() -> None:
    """Print one line: versions, device, and whether kernels are compiled or interpreted
    here.
    """
    devices = jax.devices()
    mode = "kernels compiled" if on_tpu() else "no TPU: kernels interpreted, times below are not TPU times"
    print(
        f"gdn2_kernels {__version__} | jax {jax.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()} | {len(devices)} x {devices[0].device_kind} | {mode}"
    )


def show(*functions):
    """Source of functions or classes of this package, as a notebook displays Python:
    chapters show, they never retype.
    """
    from IPython.display import Code  # only notebooks call this, and they have IPython

    return Code("\n\n".join(inspect.getsource(inspect.unwrap(f)) for f in functions).rstrip(), language="python")
