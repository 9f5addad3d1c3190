"""Part 8. Errors planted on purpose, each of a kind that was published at least once
or that we made ourselves, and the gate that has to catch it.

A gate that no control trips is not a gate.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn2_kernels.audit.cases import NAMES, REDUCED
from gdn2_kernels.audit.certificate import vouching_rows
from gdn2_kernels.audit.measure import row
from gdn2_kernels.audit.reference import Faults, gdn2


class Control(NamedTuple):
    faults: Faults
    gate: str  # that has to catch it
    changes_order: bool = False  # of sums, from run to run


CONTROLS = {
    "the scale is dropped": Control(Faults(unscaled=1.0), "certificate"),
    "dg masked where the decay is one": Control(Faults(masked_dg=True), "8 bit"),
    "the solve damped by 1e-3": Control(Faults(damping=1e-3), "chunk size"),
    "exponents clipped at -20": Control(Faults(floor=-20.0), "worst row"),
    "decays from a running sum": Control(Faults(differences=True), "sign"),
    "one-sided factors": Control(Faults(one_sided=True), "finite"),
    "reference in the middle": Control(Faults(middle=True), "causal forward"),
    "inverse by powers": Control(Faults(powers=True), "inverse"),
    "gradient of the scores not masked": Control(Faults(leak=1.0), "causal backward"),
    "one pass instead of six": Control(Faults(passes=1.0), "product"),
    "final state kept in bfloat16": Control(Faults(rough_state=True), "split"),
    "decays of the first head for all": Control(
        Faults(first_head=True), "heads and batch"
    ),
    "no mask behind the last token": Control(Faults(unmasked=True), "padding"),
    "sums in an order that changes": Control(Faults(), "repeat", changes_order=True),
}


@functools.partial(
    jax.jit, static_argnames="C", compiler_options={"xla_backend_optimization_level": 0}
)
def _results(inputs, state, do, d_state, scale, faults, C):
    def run(*x):
        return gdn2(x[:6], x[6], scale, faults, C)

    outputs, pull_back = jax.vjp(run, *inputs, state)
    return *outputs, *pull_back((do, d_state))


class Planted:
    """The chunked reference with one error, as `Subject` has a stage."""

    precision, has_chunks, CHUNK_SIZE = "highest", True, 16

    def __init__(
        self, name="nothing planted", control=Control(Faults(), ""), size=REDUCED
    ):
        self.name, self.control, self.size = name, control, size
        self._order = np.random.default_rng(61)

    def run(self, case, chunk_size=None):
        K = case.inputs[0].shape[-1]
        order = (
            self._order.permutation(K) if self.control.changes_order else np.arange(K)
        )
        back = np.argsort(order)
        # Key channels may stand in any order; sums over them then run in another.
        inputs = [
            x[..., order] if name in "qkgb" else x
            for name, x in zip("qkvgbw", case.inputs)
        ]
        rest = [
            jnp.asarray(x, jnp.float32)
            for x in (case.state[..., order, :], case.do, case.d_state[..., order, :])
        ]
        found = _results(
            [jnp.asarray(x, jnp.float32) for x in inputs],
            *rest,
            np.float32(case.scale),
            self.control.faults,
            C=chunk_size or self.CHUNK_SIZE,
        )
        found = dict(zip(NAMES, map(np.asarray, found)))
        for name in ("dq", "dk", "dg", "db"):
            found[name] = found[name][..., back]
        for name in ("final_state", "d_initial_state"):
            found[name] = found[name][..., back, :]
        return found


def wrong_in_the_twentieth_digit(found):
    return {**found, "dk": found["dk"] + abs(found["dk"]).max().scaleb(-20)}


# Errors in the certificate itself: options of `certify`.
SPOILED = {
    "a certificate of 16 digits": (dict(digits=16), "digits"),
    "an adjoint wrong in the twentieth digit": (
        dict(plant=wrong_in_the_twentieth_digit),
        "slope",
    ),
}


def tripped(rows):
    return sorted({x["gate"] for x in rows if x["passes"] is False})


def controls(all_gates):
    """all_gates: a function that gives the rows of all gates for a subject of size
    `REDUCED`.

    Returns: rows and, by control, the gates that it trips.
    """
    rows, matrix = [], {}
    sound = tripped(all_gates(Planted()))
    matrix["nothing planted"] = sound
    rows.append(
        row(
            "controls",
            "control",
            "nothing planted",
            len(sound),
            0,
            result=", ".join(sound),
        )
    )
    for name, control in CONTROLS.items():
        matrix[name] = tripped(all_gates(Planted(name, control)))
        rows.append(caught(name, control.gate, matrix[name]))
    for name, (options, gate) in SPOILED.items():
        matrix[name] = tripped(
            vouching_rows(min(64, REDUCED.L), min(16, REDUCED.D), **options)
        )
        rows.append(caught(name, gate, matrix[name]))
    return rows, matrix


def caught(name, gate, gates):
    return row(
        "controls",
        "control",
        name,
        int(gate not in gates),
        0,
        result=gate,
        note=f"trips {len(gates)} gates",
    )


def never_tripped(rows, matrix):
    """Gates of a report that no control trips."""
    gates = {
        x["gate"] for x in rows if x["part"] != "controls" and x["passes"] is not None
    }
    return sorted(gates - {gate for gates in matrix.values() for gate in gates})
