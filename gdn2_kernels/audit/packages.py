"""Public kernels of the same layer as subjects of the same audit. Imported where they
are installed, never needed: `pip install atomic-ops deltanet-tpu`.

Each is asked for its most exact setting that still is its own function. Both take q
scaled beforehand, so that one program serves every scale.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

from gdn2_kernels.audit.cases import NAMES, decay_case, enlarged, reduced

CHUNK = 128  # of both; a length has to be filled up to whole chunks


class NotInstalled(ImportError):
    """Says which package is missing."""


def deltanet_tpu():
    from deltanet_tpu import chunk_gdn2

    def run(q, k, v, g, b, w, state):
        options = {"precision": "fp32", "scale": 1.0, "output_final_state": True}
        return chunk_gdn2(q, k, v, g, b, w, initial_state=state, **options)

    return run


def atomic_gdn2():
    """The kernels of atomic-ops 0.2, float32 products throughout and its damping of the
    solve, 1e-3 by default, switched off: with it the function is another.
    """
    from atomic_gdn2 import make_blr_trainable, make_cfg

    exact = dict.fromkeys(("dot_mode", "solve_dot_mode", "b3_dot_mode"), "highest")
    call = make_blr_trainable(make_cfg(wy_eps=0.0, **exact), 1.0)

    def run(q, k, v, g, b, w, state):
        # it wants (B, H, L, D)
        q, k, v, g, b, w = (x.swapaxes(1, 2) for x in (q, k, v, g, b, w))
        o, state = call(q, k, v, w, b, g, state)
        return o.swapaxes(1, 2), state

    return run


# name on PyPI: (module, function under test)
PACKAGES = {
    "deltanet-tpu": ("deltanet_tpu", deltanet_tpu),
    "atomic-ops": ("atomic_gdn2", atomic_gdn2),
}


@functools.cache
def _program(name):
    run = PACKAGES[name][1]()

    def results(inputs, state, do, d_state, scale):
        outputs, pull_back = jax.vjp(
            lambda q, *rest: run(q * scale, *rest), *inputs, state
        )
        return *outputs, *pull_back((do, d_state))

    return jax.jit(results)


class Package:
    """A public package, as `Subject` has a stage; for K = V = 128 only."""

    precision, has_chunks = "highest", False  # one chunk size

    def __init__(self, name, size):
        module, _ = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise NotInstalled(f"{name}: not installed here, so not audited")
        self.name, self.size = name, size
        self._program = _program(name)

    def run(self, case):
        L, (*_, D) = case.inputs[0].shape[1], case.state.shape
        whole = enlarged(case, -(-L // CHUNK) * CHUNK, D)
        arrays = [np.float32(x) for x in whole.inputs], *map(np.float32, whole[1:])
        found = self._program(*jax.tree.map(jnp.asarray, arrays))
        found = dict(zip(NAMES, map(np.asarray, found)))
        tokens = dict.fromkeys(("o", "dq", "dk", "dv", "dg", "db", "dw"), case.do)
        return reduced(found, {**found, **tokens})

    def compile(self):
        self.run(decay_case(self.size, "no decay")[0])
