"""Spread over eight simulated devices, the op and its gradients are what one device computes; and what the compiled
programs say to each other is what the chapter says.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gdn2_kernels as gk
from gdn2_kernels import collectives, sharding
from helpers import NAMES, assert_close, make

PLAIN = ["recurrence", "associative_scan", "wy"]  # plain JAX: what a mesh does to kernels is the same, and slow to compile


def mesh(**axes):
    devices = np.array(jax.devices()[: np.prod([*axes.values()])])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


@functools.cache
def problem(gate, L=16):
    inputs, state, do, d_state = make(L, 8, 16, B=8, H=8, gate=gate)
    return [*map(jnp.asarray, inputs), jnp.float32(0.3), jnp.asarray(state)], (jnp.asarray(do), jnp.asarray(d_state))


def found(run, gate, L=16):
    """Dict of both results and the gradients of the inputs, the initial state and the scale."""

    @jax.jit
    def both(arrays, cotangents):
        results, pull = jax.vjp(lambda *x: run(*x[:6], scale=x[6], initial_state=x[7]), *arrays)
        return results, pull(cotangents)

    results, gradients = both(*problem(gate, L))
    *six, scale, state = map(np.asarray, gradients)
    return dict(zip((*NAMES, "scale"), (*map(np.asarray, results), *six, state, scale.reshape(1))))


@functools.cache
def one_device(gate, L=16):
    return found(functools.partial(gk.gdn2, stage="wy", precision="highest"), gate, L)


def check(run, gate, L=16, tolerance=5e-6):
    assert_close(found(run, gate, L), one_device(gate, L), tolerance, (*NAMES, "scale"))


MESHES = [dict(batch=8, head=1), dict(batch=4, head=2), dict(batch=2, head=4), dict(batch=1, head=8), dict(head=4), dict(batch=2)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_mesh_is_one_device(axes):
    check(functools.partial(sharding.gdn2_sharded, mesh(**axes), stage="wy", precision="highest"), "per channel")


@pytest.mark.parametrize("stage", ["recurrence", "associative_scan", "atomic_gdn2"])
def test_every_kind_of_stage(stage):
    run = functools.partial(sharding.gdn2_sharded, mesh(batch=8, head=8 // 8), stage=stage, precision="highest")
    check(run, "per channel")


@pytest.mark.parametrize("gate", ["bursts", "-20"])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_sequence_parallel_is_serial(n, gate):
    """Carried state, strong decay, gradients of everything."""
    check(functools.partial(sharding.sequence_parallel, mesh(sequence=n), stage="wy", precision="highest"), gate)
