"""A function under test: the results of a stage and its gradients, at few shapes."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from gdn2_kernels.api import STAGES, gdn2
from gdn2_kernels.audit.cases import NAMES, decay_case, enlarged, reduced
from gdn2_kernels.environment import on_tpu
from gdn2_kernels.tile import PRECISIONS

WITHOUT_CHUNKS = ("recurrence", "associative_scan")


def _results(inputs, state, do, d_state, scale, *, stage, precision, chunk_size):
    def run(*x):
        options = {"stage": stage, "precision": precision, "chunk_size": chunk_size}
        return gdn2(*x[:6], scale=scale, initial_state=x[6], **options)

    outputs, pull_back = jax.vjp(run, *inputs, state)
    return *outputs, *pull_back((do, d_state))


@functools.cache
def program(stage, precision):
    # Elsewhere than on a TPU these are large programs that run for moments: half the
    # time would go into optimising them.
    quick = {} if on_tpu() else {"xla_backend_optimization_level": 0}
    function = functools.partial(_results, stage=stage, precision=precision)
    return jax.jit(function, static_argnames="chunk_size", compiler_options=quick)


class Subject:
    """A stage at a precision, as the audit sees it.

    `run(case)` gives a dict of o, final_state and the seven gradients, numpy arrays of
    the shapes that the case asks for. Anything with these attributes can be audited.
    """

    def __init__(self, stage, precision, size):
        if stage not in STAGES:
            raise ValueError(
                f"stage: expected one of {', '.join(STAGES)}, got {stage!r}"
            )
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}"
            )
        self.name, self.precision, self.size = stage, precision, size
        self.has_chunks = stage not in WITHOUT_CHUNKS
        self._program = program(stage, precision)

    def run(self, case, chunk_size=None):
        """chunk_size: None leaves it to the stage."""
        inputs = [jnp.asarray(x, jnp.float32) for x in case.inputs]
        rest = [
            jnp.asarray(x, jnp.float32)
            for x in (case.state, case.do, case.d_state, case.scale)
        ]
        found = self._program(inputs, *rest, chunk_size=chunk_size)
        return dict(zip(NAMES, map(np.asarray, found)))

    def compile(self):
        """Compile all programs, side by side."""
        jobs = [(decay_case(self.size, "no decay")[0], None)]
        jobs.append((ragged_case(self.size), None))
        if self.has_chunks:
            jobs.append((jobs[0][0], self.size.chunk_size))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda job: self.run(*job), jobs))


def ragged_case(size):
    """Two batch rows of two heads, and a length that is no whole number of chunks."""
    return decay_case(size._replace(L=size.ragged), "bursts", 3.0, B=2, H=2)[0]


def run_small(subject, case, expected):
    """The results of a case that is smaller than the subject's program, cut to the
    shapes of the dict `expected`.
    """
    return reduced(
        subject.run(enlarged(case, subject.size.L, subject.size.D)), expected
    )
