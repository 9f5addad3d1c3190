"""Compile a function for a TPU v5e that is not there, in a process of its own, and
report what the compiler answers.

libtpu, the compiler, comes from PyPI and needs no TPU. It takes a lock, reads its
options once per process and would be in the way of a TPU that is there: so the program
is exported here and compiled elsewhere (`worker`).
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.export

# What libtpu asks of the machine it thinks it is on; without these it looks for a
# metadata server, slowly.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Unavailable(RuntimeError):
    """No usable libtpu on this machine; the message says what to install."""


class CompileError(RuntimeError):
    """The v5e compiler refused the program; the message is its own."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes are of one chip's HBM. Nothing here was measured on a TPU."""

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    flops: float  # as XLA counts them, loop bodies once
    compile_seconds: float
    jax: str
    libtpu: str

    @property
    def total_bytes(self) -> int:
        """Arguments, results and temporaries: what has to fit into the 16 GiB of a v5e.
        """
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    def __str__(self):
        rows = [f"{name:10s} {getattr(self, name + '_bytes'):>16,} bytes" for name in ("argument", "output", "temporary")]
        rows.append(f"{'total':10s} {self.total_bytes:>16,} bytes")
        return "\n".join([f"TPU v5e by the compiler alone (jax {self.jax}, libtpu {self.libtpu})", *rows])


def libtpu_version() -> str:
    """Raises: Unavailable."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise Unavailable("handing a program to the v5e compiler needs flatbuffers: pip install flatbuffers")
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            f"compiling for a v5e needs libtpu, which is not installed here: pip install 'jax[tpu]=={jax.__version__}' "
            "(Linux on x86-64 only)"
        ) from None


def compile(fn, *args, timeout: float = 600) -> Report:
    """Compile `fn` for one v5e chip, in a subprocess.

    Arguments:
      fn: a function of arrays; gradients, custom_vjp and Pallas kernels included.
        Options that are not arrays are closed over: `lambda *x: fn(*x, stage="wy")`.
      *args: arrays or jax.ShapeDtypeStruct, or pytrees of them.
      timeout: seconds.
    Returns: `Report`.
    Raises:
      Unavailable: libtpu is missing or does not start.
      CompileError: the compiler refused the program, for instance because it does not
        fit into HBM, or took longer than `timeout`.
    """
    libtpu = libtpu_version()
    # Leaves only: a serialised program knows no containers but JAX's own.
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves):
        return jax.tree.leaves(fn(*tree.unflatten(leaves)))

    exported = jax.export.export(jax.jit(flat), platforms=["tpu"])(*leaves)
    with tempfile.TemporaryDirectory(prefix="v5e_") as folder:
        program, answer = pathlib.Path(folder, "program"), pathlib.Path(folder, "answer")
        program.write_bytes(exported.serialize())
        root = str(pathlib.Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        x64 = str(int(jax.config.jax_enable_x64))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "gdn2_kernels.v5e.worker", program, answer],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "JAX_ENABLE_X64": x64},
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"not compiled within timeout={timeout} seconds") from None
        if not answer.exists():
            raise Unavailable(
                f"libtpu {libtpu} did not work with jax {jax.__version__}:\n"
                f"{done.stderr[-2000:]}"
            )
        result = json.loads(answer.read_text())
    if "refused" in result:
        raise CompileError(result["refused"])
    return Report(**result, jax=jax.__version__, libtpu=libtpu)
