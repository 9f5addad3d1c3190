"""Every stage is accepted by the v5e compiler, and the baseline takes the memory that it says."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import gdn2_kernels as gk
from gdn2_kernels import v5e
from gdn2_kernels.stages import associative_scan
from helpers import KERNELS, once, x64

# Asked for memory only, and asked again by every run.
accepted = functools.partial(v5e.compile, count=False, cache=False)

try:
    accepted(lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), jnp.float32))
except v5e.Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


def shapes(B, L, H, K, V, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((B, L, H, D), dtype) for D in (K, K, V, K, K, V)]


def gradients(stage, **options):
    def loss(*inputs):
        o, state = gk.gdn2(*inputs, stage=stage, **options)
        return jnp.square(o.astype(jnp.float32)).sum() + jnp.square(state).sum()

    return jax.grad(loss, argnums=range(6))


@pytest.mark.parametrize("dtype, precision", [(jnp.float32, "high"), (jnp.bfloat16, "default")])
@pytest.mark.parametrize("stage", gk.STAGES)
def test_compiles(stage, dtype, precision):
    """Kernels at a published shape, B=8, H=6, L=4096, K=V=128 with gradients, on a chip of 16 GiB."""
    # The baseline is unrolled in log L steps; at its published shape it has a test of its own.
    shape = (8, 4096, 6, 128, 128) if stage in KERNELS else (1, 20 if stage == "associative_scan" else 100, 2, 128, 64)
    report = accepted(gradients(stage, precision=precision, interpret=False), *shapes(*shape, dtype))
    assert 0 < report.total_bytes < associative_scan.HBM_BYTES and "bytes" in str(report)


def test_any_container_goes_in_and_out():
    class Pair(NamedTuple):
        one: jax.Array
        two: jax.Array

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    report = accepted(lambda pair, more: Pair(pair.two, more["x"] + 1), Pair(x, x), {"x": x})
    assert report.output_bytes >= 2 * 8 * 128 * 4


def test_too_slow_a_compiler_is_told_by_its_limit():
    with pytest.raises(v5e.CompileError, match="timeout=0.1"):
        accepted(lambda x: x, jax.ShapeDtypeStruct((8, 128), jnp.float32), timeout=0.1)


def test_a_kernel_refused_is_no_trouble_with_libtpu():
    """The error of Mosaic is another than JAX's. A product of bfloat16 without a precision takes that of the program."""

    def product(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32)

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32))(x)

    with jax.default_matmul_precision("highest"), pytest.raises(v5e.CompileError, match="Bad lhs type"):
        accepted(product, jax.ShapeDtypeStruct((128, 128), jnp.bfloat16))


@once
@pytest.mark.parametrize("setting", ["highest"])
@pytest.mark.parametrize("stage", ["wy", *KERNELS])
def test_compiles_under_the_programs_own_precision(stage, setting):
    with jax.default_matmul_precision(setting):
        accepted(gradients(stage, interpret=False), *shapes(1, 64, 1, 64, 64, jnp.bfloat16))


# Channels that fill no register of 128 lanes, that fill two, one of each.
KERNEL_SHAPES = [(8, 256, 16, jnp.float32, "high"), (256, 256, 64, jnp.bfloat16, "default"), (48, 96, 128, jnp.float32, "highest")]


@once
@pytest.mark.parametrize("K, V, chunk_size, dtype, precision", KERNEL_SHAPES)
@pytest.mark.parametrize("stage", KERNELS)
def test_kernels_of_every_shape_compile(stage, K, V, chunk_size, dtype, precision):
    options = dict(chunk_size=chunk_size, precision=precision, interpret=False)
    accepted(gradients(stage, **options), *shapes(1, 100, 2, K, V, dtype))


@once
@pytest.mark.parametrize("H", [5, 11])
def test_heads_that_fill_no_group_compile(H):
    accepted(gradients("atomic_gdn2", interpret=False), *shapes(1, 100, H, 128, 128))


@pytest.mark.parametrize("stage", KERNELS)
def test_kernels_compile_under_x64(stage):
    with x64():
        accepted(gradients(stage, interpret=False), *shapes(1, 100, 2, 128, 64))


@once  # two to three minutes of the compiler
def test_one_head_of_the_baseline_takes_what_it_says():
    # Shorter ones stay partly in VMEM, which the report does not count.
    report = accepted(gradients("associative_scan"), *shapes(1, 2048, 1, 128, 128))
    stated = associative_scan.head_bytes(2048, 128, 128)
    assert 0.7 * stated < report.temporary_bytes < 1.05 * stated


@once  # two to three minutes of the compiler
def test_the_baseline_fits_the_published_shape():
    """B=4, H=6, L=2048, K=V=128 with gradients on a chip of 16 GiB: heads one after another."""
    report = accepted(gradients("associative_scan"), *shapes(4, 2048, 6, 128, 128))
    assert report.total_bytes < associative_scan.HBM_BYTES
    head, array = associative_scan.head_bytes(2048, 128, 128), 4 * 4 * 2048 * 6 * 128
    # Beside the one head inputs, results and gradients lie there, heads first.
    assert 0.7 * head < report.temporary_bytes < 1.05 * head + 16 * array


def test_a_program_that_does_not_fit_is_refused():
    with pytest.raises(v5e.CompileError, match="(?i)memory|exceed"):
        big = jax.ShapeDtypeStruct((40_000, 200_000), jnp.float32)
        accepted(lambda x: x * 2, big)


def test_missing_compiler_says_what_to_install(monkeypatch):
    def missing(name):
        raise v5e.compile.__globals__["importlib"].metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(v5e.Unavailable, match=r"jax\[tpu\]"):
        accepted(lambda x: x, jax.ShapeDtypeStruct((8, 128), jnp.float32))
