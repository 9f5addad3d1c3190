"""The public function: checks its arguments, fills in defaults, calls a stage."""

import functools
import numbers

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gdn2_kernels import environment, stages, tile
from gdn2_kernels.stages.mxu import serves

STAGES = tuple(stages.STAGES)


def gdn2(
    q: jax.Array,  # (B, L, H, K)
    k: jax.Array,  # (B, L, H, K)
    v: jax.Array,  # (B, L, H, V)
    g: jax.Array,  # (B, L, H, K)
    b: jax.Array,  # (B, L, H, K)
    w: jax.Array,  # (B, L, H, V)
    *,
    scale: float | jax.Array | None = None,
    initial_state: jax.Array | None = None,  # (B, H, K, V)
    stage: str = "auto",
    precision: str = "high",
    chunk_size: int | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gated DeltaNet-2: a linear attention whose state decays, erases and writes per
    channel.

        S_t = (I - k_t (b_t*k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t*v_t)^T
        o_t = scale * S_t^T q_t

    Exactly this, for every g <= 0: nothing is clipped, damped or bounded. (As long as
    float32 holds it: keys with |k|^2 b well above 2 make the state grow by itself.)
    Differentiable (reverse mode) in the six inputs, `scale` and `initial_state`, for
    cotangents of both results; works under jit, grad, vmap, scan and jax.checkpoint.
    Forward mode (jvp, jacfwd, hessian) is promised for stage "recurrence" only; the
    others have gradients written by hand, for which JAX raises a TypeError.

    Arguments:
      q, k: (B, L, H, K) query and key, usually of unit length. Any L >= 1.
      v: (B, L, H, V) value.
      g: (B, L, H, K) log decay of each key channel, natural logarithm, g <= 0,
        unbounded below; -inf forgets the channel. Usually float32 whatever the others
        are: bfloat16 keeps 8 bits of g. (It is exp(g) that must never be rounded to
        bfloat16, where every factor above 0.998 is one; no stage does.)
      b: (B, L, H, K) erase gate on the key channels, usually in [0, 1]; up to 2 is
        meaningful.
      w: (B, L, H, V) write gate on the value channels, usually in [0, 1].
      scale: finite real scalar, Python or array, traced or not; default K^-1/2.
      initial_state: (B, H, K, V), rows are key channels; float32 (float64 with float64
        inputs); None means zeros.
      stage: one of `gdn2_kernels.STAGES`, or "auto": on a TPU "mxu" where it serves the
        shapes and dtypes, else "wy".
      precision: of matrix products: "default" one bfloat16 pass, "high" three
        (bf16x3), "highest" float32. Sums and decays are float32 always. The same on
        every platform. Stages "recurrence" and "associative_scan" always compute in
        float32.
      chunk_size: tokens per chunk, a power of two; None lets the stage choose. Stages
        without chunks ignore it.
      interpret: for stages that are kernels: None compiles on a TPU and interprets
        elsewhere; others ignore it.

    Each of the six inputs is float32 or bfloat16, mixed as you like; or all six float64
    (with jax_enable_x64), which are then computed in float64. Stages that are kernels
    ("atomic_ops" and after) take K and V multiples of 8 up to 256, and no float64.

    Returns:
      o: (B, L, H, V), dtype of v.
      final_state: (B, H, K, V), float32 (float64 with float64 inputs).

    Raises:
      ValueError: naming the argument, what was expected and what came. A positive or
        NaN g is reported where its values are known, that is outside jit, vmap and
        scan, and looking waits for them; inside, it is the caller's to avoid: exp(g) > 1
        grows the state. NaN or infinity in any input spreads to the tokens after it, in
        stages with chunks also to those before it in its chunk: mask with zeros.

    Source: Gated DeltaNet-2, arXiv 2605.22791; argument order as in
      flash-linear-attention.
    """
    inputs = _checked_inputs(q, k, v, g, b, w)
    B, _, H, K = inputs[0].shape
    V = inputs[2].shape[-1]
    scale = _checked_scale(scale, K, tile.compute_dtype(*inputs))
    initial_state = _checked_state(initial_state, (B, H, K, V), tile.compute_dtype(*inputs))
    if stage != "auto":
        _check_word("stage", stage, ("auto", *STAGES))
    _check_word("precision", precision, tile.PRECISIONS)
    _check_chunk_size(chunk_size)
    if interpret is not None and not isinstance(interpret, bool):
        raise ValueError(f"interpret: expected None, True or False, got {interpret!r}")
    run = functools.partial(
        _run,
        stage=_fastest(inputs[0], inputs[2], chunk_size) if stage == "auto" else stage,
        precision=precision,
        chunk_size=chunk_size if chunk_size is None else int(chunk_size),
        interpret=interpret,
    )
    run = _under_explicit_sharding(run, inputs[2])
    return run(*_varying_alike(*inputs, scale, initial_state))


def _fastest(q, v, chunk_size):
    return "mxu" if environment.on_tpu() and serves(q, v, chunk_size) else "wy"


@functools.partial(jax.jit, static_argnames=("stage", "precision", "chunk_size", "interpret"))
def _run(*arguments, stage, **options):
    return stages.STAGES[stage](*arguments, **options)


def _under_explicit_sharding(run, v):
    """On a mesh whose axes are part of the types: results sharded over batch and heads
    as v is, everything inside left to the compiler.
    """
    sharding = jax.typeof(v).sharding
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return run
    batch, _, heads, *_ = (*sharding.spec, None, None, None)
    o, state = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
    results = tuple(NamedSharding(sharding.mesh, spec) for spec in (o, state))
    return jax.sharding.auto_axes(run, out_sharding=results)


def _varying_alike(*arrays):
    """Under shard_map: what is replicated made to vary over the axes of the rest.

    A state or a gate made inside (zeros, say) does not vary over the mesh; loops and
    hand-written gradients want it to. Its gradient is then summed over the mesh, once.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays  # not under shard_map
    zero = sum(jnp.where(False, x.ravel()[0].astype(jnp.float32), 0) for x in arrays)
    return [jnp.where(True, x, zero.astype(x.dtype)) for x in arrays]


# ------------------------------------------------------ checks

DTYPES = ("float32", "bfloat16", "float64")


def _is_array(x):
    """JAX's, traced or not, or NumPy's."""
    numpy_like = hasattr(x, "__array__") and isinstance(getattr(x, "dtype", None), jnp.dtype)
    return isinstance(x, jax.Array) or numpy_like


def _array(name, x):
    if not _is_array(x):
        raise ValueError(
            f"{name}: expected a JAX or numpy array, got {type(x).__name__}"
        )
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        raise ValueError(
            f"{name}: expected dtype float32 or bfloat16 (or float64 under x64), got "
            f"{x.dtype.name if x.dtype.isnative else x.dtype.str}"
        )
    if x.dtype == jnp.float64 and not jax.config.jax_enable_x64:
        # JAX would take the array and silently make it float32.
        raise ValueError(f"{name}: got float64 while jax_enable_x64 is off; cast it to float32 or switch x64 on")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _checked_inputs(*arrays):
    named = dict(zip("qkvgbw", arrays))
    named = {name: _array(name, x) for name, x in named.items()}
    for name, x in named.items():
        if x.ndim != 4:
            axes = "(B, L, H, V)" if name in "vw" else "(B, L, H, K)"
            raise ValueError(f"{name}: expected 4 axes {axes}, got shape {x.shape}")
    q, v = named["q"], named["v"]
    for axis, size in zip("BLHK", q.shape):
        if size == 0:
            raise ValueError(f"q: expected at least one along every axis of (B, L, H, K), got {axis} = 0, shape {q.shape}")
    if v.shape[-1] == 0:
        raise ValueError(f"v: expected at least one value channel, got shape {v.shape}")
    if v.shape[:2] == q.shape[:2] and v.shape[2] != q.shape[2]:
        raise ValueError(
            f"v: its head count {v.shape[2]} differs from the head count {q.shape[2]} of q; expected shape "
            f"{(*q.shape[:3], v.shape[3])}, got {v.shape}. For grouped values repeat q, k, g and b to the heads of v"
        )
    expected = {"k": q.shape, "g": q.shape, "b": q.shape, "v": (*q.shape[:3], v.shape[-1])}
    expected["w"] = expected["v"]
    for name, shape in expected.items():
        if named[name].shape != shape:
            like = "(B, L, H, V) as v" if name == "w" else f"{'(B, L, H, V)' if name == 'v' else '(B, L, H, K)'} as q"
            raise ValueError(f"{name}: expected shape {shape}, {like}, got {named[name].shape}")
    wide = [name for name, x in named.items() if x.dtype == jnp.float64]
    if wide and len(wide) < 6:
        other = next(name for name in named if name not in wide)
        raise ValueError(
            f"{other}: expected float64, because {', '.join(wide)} {'is' if len(wide) == 1 else 'are'} "
            f"(float64 is all six or none), got {named[other].dtype.name}"
        )
    _check_log_decay(named["g"])
    return list(named.values())


def _check_log_decay(g):
    try:
        # stop_gradient: eager jax.grad knows the values too, but only gives them where
        # no gradient is asked for.
        worst = float(jnp.max(jax.lax.stop_gradient(g)))  # NaN if there is one
    except jax.errors.ConcretizationTypeError:
        return  # traced: no values to look at
    if not worst <= 0:
        raise ValueError(f"g: expected log decays, all <= 0 (exp(g) is the factor), got a largest value of {worst}")


def _checked_scale(scale, K, dtype):
    if scale is None:
        return jnp.dtype(dtype).type(K**-0.5)
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    real = (jnp.floating, jnp.integer)
    scalar = _is_array(scale) and scale.shape == ()
    if not (number or scalar and any(jnp.issubdtype(scale.dtype, x) for x in real)):
        has_shape = hasattr(scale, "shape")
        got = f"shape {scale.shape}, {scale.dtype}" if has_shape else repr(scale)
        raise ValueError(f"scale: expected a real scalar or None, got {got}")
    if isinstance(scale, jax.core.Tracer):
        return scale.astype(dtype)
    if not abs(scale) <= float(jnp.finfo(dtype).max):
        name = jnp.dtype(dtype).name
        raise ValueError(f"scale: expected a number that {name} holds, got {scale}")
    return jnp.dtype(dtype).type(scale)


def _checked_state(state, shape, dtype):
    if state is None:
        return jnp.zeros(shape, dtype)
    state = _array("initial_state", state)
    if state.shape != shape:
        raise ValueError(f"initial_state: expected shape (B, H, K, V) = {shape}, got {state.shape}")
    if state.dtype != dtype:
        raise ValueError(f"initial_state: expected {jnp.dtype(dtype).name} with these inputs, got {state.dtype.name}")
    return state


def _check_word(name, word, known):
    if not isinstance(word, str) or word not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {word!r}")


def _check_chunk_size(chunk_size):
    if chunk_size is None:
        return
    whole = isinstance(chunk_size, numbers.Integral) and not isinstance(chunk_size, bool)
    if not whole or chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: expected None or a power of two, got {chunk_size!r}")
