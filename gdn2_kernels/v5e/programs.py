"""Programs to compile: a stage at given shapes, forward or with all its gradients."""

import jax
import jax.numpy as jnp

from gdn2_kernels.stages import STAGES

DEFAULTS = dict(
    stage="mxu", direction="both", B=4, L=2048, H=6, D=128, dtype="float32",
    precision="high", chunk_size=None, axes=3,
)  # fmt: skip


def program(**options):
    """A stage as a function, and what to compile it with.

    options: over `DEFAULTS`. D = K = V. direction: "forward", or "both" for results and
      all seven gradients, the cotangents of both results given. axes: 3 for inputs of
      shape (B, L, H*D), as a projection makes them, 4 for (B, L, H, D). Others go to
      the stage.
    Returns: fn, args (shapes only): six inputs, the initial state, cotangents.
    """
    o = {**DEFAULTS, **options}
    B, L, H, D = (o[x] for x in "BLHD")
    extra = {name: value for name, value in o.items() if name not in DEFAULTS}

    def forward(q, k, v, g, b, w, state):
        inputs = [x.reshape(B, L, H, D) for x in (q, k, v, g, b, w)]
        out, final_state = STAGES[o["stage"]](
            *inputs, jnp.float32(D**-0.5), state, precision=o["precision"],
            chunk_size=o["chunk_size"], interpret=False, **extra,
        )  # fmt: skip
        return out.reshape(q.shape), final_state

    def both(*args):
        *args, do, d_state = args
        results, pull = jax.vjp(forward, *args)
        return *results, *pull((do, d_state))

    shape = (B, L, H, D) if o["axes"] == 4 else (B, L, H * D)
    tokens = jax.ShapeDtypeStruct(shape, jnp.dtype(o["dtype"]))
    state = jax.ShapeDtypeStruct((B, H, D, D), jnp.float32)
    if o["direction"] == "forward":
        return forward, (*[tokens] * 6, state)
    return both, (*[tokens] * 6, state, tokens, state)
