"""Compile a function for a TPU v5e that is not there, in a process of its own, and
report what comes out.

libtpu, the compiler, comes from PyPI and needs no TPU. It takes a lock, reads its
options once per process and would be in the way of a TPU that is there: so the program
is exported here and compiled elsewhere (`worker`).
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import jax.export

from gdn2_kernels.v5e.report import Report

# What libtpu asks of the machine it thinks it is on; without these it looks for a
# metadata server, slowly.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The listings that the cycles are counted in.
DUMP = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_html=false --xla_jf_dump_llo_pass_label_regex=final"
)
# The files of this folder that the numbers in a report depend on.
MODEL = "collectives machine parse scalar pipes walk hlo program worker".split()
CHIPS = {"v5e:1x1": 1, "v5e:2x2": 4, "v5e:2x4": 8}


class Unavailable(RuntimeError):
    """No usable libtpu on this machine; the message says what to install."""


class CompileError(RuntimeError):
    """The v5e compiler refused the program; the message is its own."""


def libtpu_version() -> str:
    """Raises: Unavailable."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise Unavailable(
            "handing a program to the v5e compiler needs flatbuffers: "
            "pip install flatbuffers"
        )
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            f"compiling for a v5e needs libtpu, which is not installed here: {_install()}"
        ) from None


def _install():
    return f"pip install 'jax[tpu]=={jax.__version__}' (Linux on x86-64 only)"


def compile(
    fn,
    *args,
    topology: str = "v5e:1x1",
    count: bool = True,
    cache: bool = True,
    timeout: float = 600,
    dumps: str | os.PathLike | None = None,
) -> Report:
    """Compile `fn` for TPU v5e, in a subprocess, and count the cycles of the result.

    Arguments:
      fn: a function of arrays; gradients, custom_vjp and Pallas kernels included.
        Options that are not arrays are closed over: `lambda *x: fn(*x, stage="wy")`.
      *args: arrays or jax.ShapeDtypeStruct, or pytrees of them.
      topology: "v5e:1x1" for one chip; "v5e:2x2" or "v5e:2x4" for a program over all
        chips of it, whose arguments say by their shardings (of a mesh, or of a
        jax.sharding.AbstractMesh) how they lie. The report is of one chip then.
      count: also count cycles. False takes less time: the report has memory only.
      cache: answer from a report of the same program by the same versions, if one was
        kept; ~/.cache/gdn2_kernels holds them (environment: GDN2_KERNELS_CACHE).
      timeout: seconds.
      dumps: an empty folder for what the compiler writes, kept; default: thrown away.
    Returns: `Report`.
    Raises:
      Unavailable: libtpu is missing or does not agree with JAX.
      CompileError: the compiler refused the program, for instance because it does not
        fit into HBM, or took longer than `timeout`.
      ValueError: an unknown topology.
    """
    if topology not in CHIPS:
        known = ", ".join(map(repr, CHIPS))
        raise ValueError(f"topology: expected one of {known}, got {topology!r}")
    libtpu = libtpu_version()
    start = time.perf_counter()
    exported = _exported(fn, args, topology)
    traced = time.perf_counter() - start
    kept = _kept(exported, libtpu, topology, count)
    if cache and dumps is None and kept.exists():
        return Report.from_json(kept.read_text())
    program = bytes(exported.serialize())
    with tempfile.TemporaryDirectory(prefix="v5e_") as folder:
        result = _in_subprocess(
            program,
            _axes(args, topology),
            folder,
            topology,
            count,
            timeout,
            dumps,
            libtpu,
        )
    if "refused" in result:
        raise CompileError(result["refused"])
    found = dict(trace_seconds=traced, jax=jax.__version__, libtpu=libtpu)
    report = Report.from_json(json.dumps({**result, **found, "topology": topology}))
    if cache:
        _keep(kept, report)
    return report


def _exported(fn, args, topology):
    # Leaves only: a serialised program knows no containers but JAX's own.
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves):
        return jax.tree.leaves(fn(*tree.unflatten(leaves)))

    with _a_v5e():
        exported = jax.export.export(jax.jit(flat), platforms=["tpu"])(*leaves)
    if exported.nr_devices not in (1, CHIPS[topology]):
        raise ValueError(
            f"topology: expected one of {exported.nr_devices} chips, which the arguments "
            f"are spread over, got {topology!r} of {CHIPS[topology]}"
        )
    return exported


def _axes(args, topology):
    """Names, sizes and types of the axes of the mesh that the arguments are spread over.
    """
    for leaf in jax.tree.leaves(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None and mesh.size == CHIPS[topology]:
            types = [x.name for x in mesh.axis_types]
            return list(mesh.axis_names), list(mesh.shape.values()), types
    return ["chip"], [CHIPS[topology]], ["Auto"]


def _a_v5e():
    """A context in which JAX knows for which chip it lowers: newer ones ask, in the
    sign of a number for instance.
    """
    known = dict(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    kind = jax.sharding.AbstractDevice
    names = {field.name for field in dataclasses.fields(kind)}
    device = kind(**{name: x for name, x in known.items() if name in names})
    if not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()  # the caller's own mesh
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _in_subprocess(
    program, mesh, folder, topology, count, timeout, dumps, libtpu
) -> dict:
    folder = pathlib.Path(folder)
    (folder / "program").write_bytes(program)
    dumps = pathlib.Path(dumps or folder / "dumps").absolute()
    dumps.mkdir(parents=True, exist_ok=True)
    root = str(pathlib.Path(__file__).parents[2])
    options = [os.environ.get("LIBTPU_INIT_ARGS", "")]
    options += [DUMP.format(folder=dumps)] if count else []
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [root, os.environ.get("PYTHONPATH")])
        ),
        "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64)),
        "LIBTPU_INIT_ARGS": " ".join(options).strip(),
    }
    answer = folder / "answer"
    command = [
        sys.executable,
        "-m",
        "gdn2_kernels.v5e.worker",
        folder / "program",
        answer,
    ]
    command += [topology, json.dumps(mesh), dumps if count else ""]
    with _progress():
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"not compiled within timeout={timeout} seconds"
            ) from None
    if answer.exists():
        return json.loads(answer.read_text())
    raise Unavailable(
        f"libtpu {libtpu} did not work with jax {jax.__version__}. A libtpu that agrees "
        f"with this JAX: {_install()}. What it said:\n{done.stderr[-2000:]}"
    )


class _progress:
    """One line for whoever is watching: a terminal, a notebook."""

    def __enter__(self):
        self.start = time.perf_counter()
        self.seen = sys.stdout.isatty() or "ipykernel" in sys.modules
        if self.seen:
            print("compiling for TPU v5e ..", end="", flush=True)

    def __exit__(self, *_):
        if self.seen:
            print(f" {time.perf_counter() - self.start:.1f} s", flush=True)


def _kept(exported, libtpu, topology, count) -> pathlib.Path:
    """Where the report of a program is kept, by everything that it depends on."""
    # As text, without the lines that say where in which file it was called.
    text = re.sub(r"^#loc.*$", "", exported.mlir_module(), flags=re.M)
    key = hashlib.sha256(text.encode())
    for name in MODEL:
        key.update(pathlib.Path(__file__).with_name(f"{name}.py").read_bytes())
    options = os.environ.get("LIBTPU_INIT_ARGS", ""), topology, count
    key.update(repr((jax.__version__, libtpu, *options)).encode())
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = os.environ.get("GDN2_KERNELS_CACHE") or pathlib.Path(home, "gdn2_kernels")
    return pathlib.Path(folder, "v5e", f"{key.hexdigest()[:32]}.json")


def _keep(path, report):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(report.to_json())
        unfinished.replace(path)
    except OSError:
        pass  # a home that cannot be written: the next time takes as long again
