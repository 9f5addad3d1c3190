"""Times and bytes of a function on the machine that runs it, and how they were
obtained.
"""

import datetime
import os
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from gdn2_kernels.environment import __version__


def example_inputs(B, L, H, K, V, *, seed=0, dtype=jnp.float32):
    """q, k, v, g, b, w as a layer would make them: unit q and k, gates in (0, 1), g =
    -softplus of a normal.

    Returns: q, k, g, b (B, L, H, K), v, w (B, L, H, V), `dtype`, the same numbers on
      every machine.
    """
    random = np.random.default_rng(seed)

    def normal(D):
        return random.normal(size=(B, L, H, D))

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    q, k, v = unit(normal(K)), unit(normal(K)), normal(V)
    g, b, w = -np.log1p(np.exp(normal(K))), sigmoid(normal(K)), sigmoid(normal(V))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, g, b, w))


def measure(fn, *args, repeats: int = 5) -> dict:
    """Compile `fn` for these arguments, run it once to warm up, then `repeats` times,
    waiting for the result each time.

    Returns: milliseconds (median), quartiles, repeats; peak_bytes: arguments, results
      and temporaries as the compiler laid them out; compile_seconds.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - start))
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if repeats > 1 else times * 3
    return {
        "milliseconds": statistics.median(times),
        "quartiles": [quartiles[0], quartiles[2]],
        "repeats": repeats,
        "peak_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
    }


def provenance(how: str) -> dict:
    """What a recorded result has to say of itself: how it was made, with which
    versions, on what, and when.
    """
    return {
        "how": how,
        "date": datetime.date.today().isoformat(),
        "gdn2_kernels": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
