"""A language model made of Gated DeltaNet-2 layers, in one file.

    embedding, then per layer:  x + mixer(norm(x)),  x + mlp(norm(x)),  then norm, head

The mixer is a GDN-2 layer or, for a hybrid, causal attention. Parameters are a plain
pytree of float32 arrays. The layers repeat a pattern, and all repetitions of one place
in the pattern are stacked, so that `lax.scan` compiles each place once.

`forward` reads a piece of text and hands on a state, for a piece of any length: the
same function trains on thousands of tokens and generates one at a time.

Source of the layer, its gates and their initialisation: Gated DeltaNet-2, arXiv
2605.22791, and its published code.

Letters: B, L, H, K as in the notation (V = K here), D = d_model, R repetitions.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from gdn2_kernels.api import gdn2
from gdn2_kernels.sharding import gdn2_sharded


@dataclasses.dataclass(frozen=True)
class Config:
    """attention_every: 0 for none, n for every n-th layer (1: all). gate_rank: of the
    output gate. conv: tokens the short convolution sees. dtype: of activations,
    "float32" or "bfloat16". stage, precision: as of `gdn2`. remat: compute a layer
    again in the backward pass instead of keeping what it made.
    """

    d_model: int = 128
    heads: int = 2
    head_dim: int = 32
    layers: int = 4
    mlp: int = 384
    vocabulary: int = 256
    attention_every: int = 0
    gate_rank: int = 32
    conv: int = 4
    dtype: str = "float32"
    stage: str = "auto"
    precision: str = "high"
    remat: bool = False

    def __post_init__(self):
        if self.layers % len(self.pattern):
            raise ValueError(
                f"layers: expected a multiple of attention_every={self.attention_every}, "
                f"got {self.layers}"
            )

    @property
    def pattern(self) -> tuple[str, ...]:
        n = self.attention_every
        return ("gdn2",) * (n - 1) + ("attention",) if n else ("gdn2",)


PRESETS = {
    # On a CPU three passes are three products; float32 is one.
    "tiny": Config(precision="highest"),
    # Without remat a step of 8 x 2048 tokens takes more than the 16 GiB of a v5e.
    "34.87M": Config(512, 6, 128, 8, 1536, gate_rank=128, remat=True),
    "334M": Config(1024, 8, 128, 24, 3072, gate_rank=128, dtype="bfloat16", remat=True),
    "307M": Config(
        1024, 8, 128, 24, 3072, attention_every=3, gate_rank=128, dtype="bfloat16", remat=True
    ),
}  # fmt: skip


# ------------------------------------------------------ parameters

# What the published counts leave out: everything that is not one of the large matrices.
SMALL = ("norm", "conv", "log_rate", "dt_bias", "gate_down", "gate_up")


def init(key: jax.Array, config: Config) -> dict:
    """Parameters: {"embedding" (vocabulary, D), "blocks": one dict for each place in
    the pattern, arrays (R, ..), "norm" (D,), "head" (D, vocabulary)}.
    """
    first, last, *keys = jax.random.split(key, 2 + len(config.pattern))
    repetitions = config.layers // len(config.pattern)

    def stacked(key, kind):
        return jax.vmap(lambda key: _block(key, kind, config))(
            jax.random.split(key, repetitions)
        )

    shape = (config.vocabulary, config.d_model)
    return {
        "embedding": 0.02 * jax.random.normal(first, shape),
        "blocks": [stacked(*x) for x in zip(keys, config.pattern)],
        "norm": jnp.ones(config.d_model),
        "head": 0.02 * jax.random.normal(last, shape[::-1]),
    }


def _block(key, kind, config):
    D, inner = config.d_model, config.heads * config.head_dim
    keys = iter(jax.random.split(key, 16))

    def matrix(rows, columns):  # Xavier with the published gain
        bound = 2**-2.5 * math.sqrt(6 / (rows + columns))
        return jax.random.uniform(
            next(keys), (rows, columns), minval=-bound, maxval=bound
        )

    block = {
        "norm_mixer": jnp.ones(D),
        "norm_mlp": jnp.ones(D),
        "q": matrix(D, inner),
        "k": matrix(D, inner),
        "v": matrix(D, inner),
        "conv": _conv_init(next(keys), config.conv, 3 * inner),
        "out": matrix(inner, D),
        "mlp_up": matrix(D, config.mlp),
        "mlp_down": matrix(config.mlp, D),
    }
    if kind == "attention":
        return block
    # exp(g) is the step response of a decay at rate exp(log_rate) over a time dt: rates
    # from 1 to 16, times from a thousandth to a tenth.
    rate = jax.random.uniform(next(keys), (config.heads,), minval=1.0, maxval=16.0)
    dt = jnp.exp(
        jax.random.uniform(
            next(keys), (inner,), minval=math.log(1e-3), maxval=math.log(0.1)
        )
    )
    return block | {
        "erase": matrix(D, inner),
        "write": matrix(D, inner),
        "decay": matrix(D, inner),
        "log_rate": jnp.log(rate),
        "dt_bias": dt + jnp.log(-jnp.expm1(-dt)),  # softplus of it is dt
        "gate_down": matrix(D, config.gate_rank),
        "gate_up": matrix(config.gate_rank, inner),
        "norm_out": jnp.ones(config.head_dim),
    }


def _conv_init(key, width, channels):
    return jax.random.uniform(key, (width, channels), minval=-1, maxval=1) / math.sqrt(
        width
    )


def count(params: dict, small: bool = True) -> int:
    """Numbers in `params`; without `small` only the large matrices, as published counts
    have it.
    """
    total = 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        total += x.size if small or not name.startswith(SMALL) else 0
    return total


# ------------------------------------------------------ the state between two pieces


def start(config: Config, B: int, length: int = 0) -> dict:
    """The state before the first token. length: of all text that attention blocks will
    have to remember; GDN-2 blocks need none, their state does not grow.
    """
    R, H, K = config.layers // len(config.pattern), config.heads, config.head_dim
    dtype = jnp.dtype(config.dtype)

    def of(kind):
        tail = jnp.zeros((R, B, config.conv - 1, 3 * H * K), dtype)
        if kind == "gdn2":
            return {"tail": tail, "S": jnp.zeros((R, B, H, K, K))}
        return {"tail": tail} | {
            x: jnp.zeros((R, B, length, H, K), dtype) for x in ("keys", "values")
        }

    return {
        "position": jnp.zeros((), jnp.int32),
        "blocks": [of(kind) for kind in config.pattern],
    }


# ------------------------------------------------------ forward


def forward(params, tokens, config: Config, state=None, mesh=None):
    """Logits of the next token at every place.

    Arguments:
      tokens: (B, L) integers. state: from `start` or the piece before; None for a text
        that starts here and will not go on, as in training.
      mesh: with an axis "batch" over which B is spread, for kernels that the compiler
        cannot spread by itself.
    Returns: logits (B, L, vocabulary) float32; the state after the piece, or None.
    """
    dtype = jnp.dtype(config.dtype)
    x = params["embedding"][tokens].astype(dtype)  # (B, L, D)
    position = None if state is None else state["position"]

    def layers(x, one):
        """One repetition of the pattern."""
        blocks, states = one
        after = []
        for kind, block, s in zip(config.pattern, blocks, states):
            mixer = functools.partial(
                _mixers[kind], config=config, position=position, mesh=mesh
            )
            mixed, s = mixer(block, norm(x, block["norm_mixer"]), s)
            x = x + mixed
            hidden = jax.nn.silu(
                norm(x, block["norm_mlp"]) @ block["mlp_up"].astype(dtype)
            )
            x = x + hidden @ block["mlp_down"].astype(dtype)
            after.append(s)
        return x, after

    layers = jax.checkpoint(layers) if config.remat else layers
    states = [None] * len(config.pattern) if state is None else state["blocks"]
    x, states = lax.scan(layers, x, (params["blocks"], states))
    logits = norm(x, params["norm"]).astype(jnp.float32) @ params["head"]
    if state is None:
        return logits, None
    return logits, {"position": position + tokens.shape[1], "blocks": states}


def norm(x, weight, eps=1e-5):
    """RMSNorm over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * weight).astype(x.dtype)


def unit(x):
    """Length one over the last axis. eps inside the root: a zero stays zero, and its
    gradient finite.
    """
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _qkv(block, x, tail, config):
    """Projections and the short causal convolution. Returns: q, k, v (B, L, H, K), and
    the last inputs of the convolution, which the next piece begins with.
    """
    B, L, _ = x.shape
    w = jnp.concatenate([block[name] for name in "qkv"], 1).astype(x.dtype)
    y = x @ w  # (B, L, 3*H*K)
    if tail is None:
        tail = jnp.zeros((B, config.conv - 1, y.shape[-1]), y.dtype)
    y = jnp.concatenate([tail, y], 1)
    taps = block["conv"].astype(x.dtype)
    z = sum(taps[i] * y[:, i : i + L] for i in range(config.conv))
    qkv = jnp.split(z, 3, -1)
    return *(a.reshape(B, L, config.heads, config.head_dim) for a in qkv), y[:, L:]


def gdn2_mixer(block, x, state, *, config, position, mesh):
    """(B, L, D) -> (B, L, D)."""
    B, L, _ = x.shape
    H, K = config.heads, config.head_dim
    q, k, v, tail = _qkv(block, x, None if state is None else state["tail"], config)
    q, k, v = (jax.nn.silu(a) for a in (q, k, v))

    def project(name):
        return (x @ block[name].astype(x.dtype)).reshape(B, L, H, K)

    b, w = jax.nn.sigmoid(project("erase")), jax.nn.sigmoid(project("write"))
    # The decay in float32: bfloat16 would round what should remember to never forget.
    dt = jax.nn.softplus(
        project("decay").astype(jnp.float32) + block["dt_bias"].reshape(H, K)
    )
    g = -jnp.exp(block["log_rate"])[:, None] * dt
    run = gdn2 if mesh is None else functools.partial(gdn2_sharded, mesh)
    options = dict(stage=config.stage, precision=config.precision)
    if state is not None:
        options["initial_state"] = state["S"]
    if mesh is not None and mesh.devices.flat[0].platform == "tpu":
        options["interpret"] = False  # also where the TPU is only compiled for
    o, S = run(unit(q), unit(k), v, g, b, w, **options)
    gate = (x @ block["gate_down"].astype(x.dtype)) @ block["gate_up"].astype(x.dtype)
    o = norm(o, block["norm_out"]) * jax.nn.silu(gate).reshape(o.shape)
    after = None if state is None else {"tail": tail, "S": S}
    return o.reshape(B, L, H * K) @ block["out"].astype(x.dtype), after


def attention_mixer(block, x, state, *, config, position, mesh):
    """(B, L, D) -> (B, L, D). The convolution tells neighbours apart; there is no other
    encoding of places.
    """
    B, L, _ = x.shape
    q, k, v, tail = _qkv(block, x, None if state is None else state["tail"], config)
    if state is None:
        o, after = jax.nn.dot_product_attention(q, k, v, is_causal=True), None
    else:
        keys = lax.dynamic_update_slice_in_dim(state["keys"], k, position, 1)
        values = lax.dynamic_update_slice_in_dim(state["values"], v, position, 1)
        seen = jnp.arange(keys.shape[1]) <= position + jnp.arange(L)[:, None]
        o = jax.nn.dot_product_attention(q, keys, values, mask=seen[None, None])
        after = {"tail": tail, "keys": keys, "values": values}
    return o.reshape(B, L, -1) @ block["out"].astype(x.dtype), after


_mixers = {"gdn2": gdn2_mixer, "attention": attention_mixer}


# ------------------------------------------------------ loss and generation


def loss(params, inputs, targets, config: Config, mesh=None):
    """Mean cross entropy in nats over targets (B, L) that are not negative."""
    logits, _ = forward(params, inputs, config, mesh=mesh)
    wanted = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    each = jax.nn.logsumexp(logits, -1) - wanted
    counts = targets >= 0
    return jnp.sum(jnp.where(counts, each, 0)) / jnp.maximum(counts.sum(), 1)


def generate(params, prompt, config: Config, steps: int, key, temperature: float = 1.0):
    """Go on from a prompt, one token at a time, the state carried along.

    Arguments: prompt (B, L) integers, L >= 1. temperature: 0 takes the likeliest.
    Returns: (B, steps) integers.
    """
    B, L = prompt.shape
    state = start(config, B, length=L + steps)
    logits, state = forward(params, prompt, config, state)
    one_at_a_time = dataclasses.replace(config, stage="recurrence")

    def pick(logits, key):
        if temperature == 0:
            return jnp.argmax(logits, -1)
        return jax.random.categorical(key, logits / temperature)

    def step(carry, key):
        logits, state = carry
        token = pick(logits, key)
        logits, state = forward(params, token[:, None], one_at_a_time, state)
        return (logits[:, -1], state), token

    _, tokens = lax.scan(step, (logits[:, -1], state), jax.random.split(key, steps))
    return tokens.T
