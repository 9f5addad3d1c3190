"""Training: a loop around `model.loss` that can be stopped and gone on with at any
step, to the bit, and that no bad batch ruins.

optax is the optimiser, orbax writes checkpoints, tqdm the bar: pip install
gdn2-kernels[train].
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gdn2_kernels import corpus, environment, model

try:
    import optax
    import orbax.checkpoint as ocp
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f"training needs optax, orbax-checkpoint and tqdm ({error.name} is missing): pip install optax orbax-checkpoint tqdm"
    ) from None

SPIKE = 10  # a gradient so many times its running mean is not followed


def optimizer(steps: int, rate: float = 3e-3, decay: float = 0.1):
    """AdamW: warm-up over a twentieth of the steps, then a cosine to a tenth; gradients
    clipped at norm 1; weights decay, but not rates, biases and norms.
    """
    warm_up = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, warm_up, max(steps, warm_up + 1), rate / 10
    )

    def decays(params):
        def large(path, _):
            return not path[-1].key.startswith(("norm", "conv", "log_rate", "dt_bias"))

        return jax.tree_util.tree_map_with_path(large, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, 0.9, 0.95, weight_decay=decay, mask=decays),
    )


def begin(config: model.Config, optimize, seed: int = 0) -> dict:
    """All that training knows between two steps, a pytree of arrays."""
    params = model.init(jax.random.key(seed), config)
    return {
        "params": params,
        "optimizer": optimize.init(params),
        "step": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "typical": jnp.zeros(()),  # size of a gradient
    }


def step(state, inputs, targets, config, optimize, mesh=None):
    """One step; one whose loss or gradient is not finite, or whose gradient is more
    than `SPIKE` times as large as usual, changes no parameter and is counted.

    Returns: new state, {"loss", "gradient" (its norm), "ok"}.
    """
    loss, gradients = jax.value_and_grad(model.loss)(
        state["params"], inputs, targets, config, mesh
    )
    size, typical = optax.global_norm(gradients), state["typical"]
    finite = jnp.isfinite(loss) & jnp.isfinite(size)
    ok = finite & ((typical == 0) | (size < SPIKE * typical))
    updates, moments = optimize.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)

    def keep(new, old):
        return jax.tree.map(functools.partial(jnp.where, ok), new, old)

    # What is usual follows, slowly, so that a change for good does not end training.
    capped = jnp.where(typical == 0, size, jnp.minimum(size, SPIKE * typical))
    follows = jnp.where(typical == 0, capped, 0.95 * typical + 0.05 * capped)
    state = {
        "params": keep(params, state["params"]),
        "optimizer": keep(moments, state["optimizer"]),
        "step": state["step"] + 1,
        "skipped": state["skipped"] + ~ok,
        "typical": jnp.where(finite, follows, typical),
    }
    return state, {"loss": loss, "gradient": size, "ok": ok}


@functools.lru_cache(maxsize=8)
def compiled_step(config, steps, rate, mesh):
    """`step` as `train` runs it, compiled once for all runs of one kind."""
    optimize = optimizer(steps, rate)
    run = functools.partial(step, config=config, optimize=optimize, mesh=mesh)
    return jax.jit(run, donate_argnums=0)


def train(
    config,
    batches,
    steps,
    *,
    folder=None,
    rate=3e-3,
    seed=0,
    save_every=100,
    data_parallel=True,
    bar=True,
    stop_at=None,
):
    """Train for `steps`, or go on from the last checkpoint in `folder`.

    Arguments:
      batches: function of a step number to (inputs, targets) (B, L).
      folder: for checkpoints and loss.jsonl; None keeps nothing.
      data_parallel: spread each batch over all devices, if their number divides B.
      stop_at: end after that step as if the process had been told to.
    Returns: state; losses, one for each step from the first; NaN where skipped.
    SIGTERM ends it after the running step, with a checkpoint.
    """
    optimize = optimizer(steps, rate)
    state = begin(config, optimize, seed)
    losses, manager = [], None
    if folder is not None:
        folder = pathlib.Path(folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False
        )
        manager = ocp.CheckpointManager(folder / "checkpoints", options=options)
        if manager.latest_step() is not None:
            state, losses = resume(manager, state, folder)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    mesh = _mesh(len(batches(0)[0])) if data_parallel else None
    spread = None
    if mesh is not None:
        spread = NamedSharding(mesh, P("batch"))
        state = jax.device_put(state, NamedSharding(mesh, P()))
    one_step = compiled_step(config, steps, rate, mesh)

    def save():
        if manager is not None and manager.latest_step() != len(losses):
            manager.save(len(losses), args=ocp.args.StandardSave(state))
            lines = (
                json.dumps({"step": n + 1, "loss": loss}) + "\n"
                for n, loss in enumerate(losses)
            )
            (folder / "loss.jsonl").write_text("".join(lines))

    with (
        _Stop() as stop,
        tqdm(total=steps, initial=len(losses), disable=not bar) as progress,
    ):
        while len(losses) < steps and not stop.asked and len(losses) != stop_at:
            batch = batches(len(losses))
            if spread is not None:
                batch = jax.device_put(batch, spread)
            state, seen = one_step(state, *batch)
            losses.append(float(seen["loss"]) if seen["ok"] else float("nan"))
            progress.update()
            progress.set_postfix(
                loss=f"{losses[-1]:.3f}", skipped=int(state["skipped"])
            )
            if len(losses) % save_every == 0:
                save()
    save()
    if manager is not None:
        manager.close()
    return state, losses


def resume(manager, like, folder):
    """The last checkpoint, and the losses up to it."""
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    state = manager.restore(
        manager.latest_step(), args=ocp.args.StandardRestore(shapes)
    )
    lines = (folder / "loss.jsonl").read_text().splitlines()
    return state, [json.loads(line)["loss"] for line in lines][: int(state["step"])]


def restored(folder):
    """Config and parameters of a run."""
    folder = pathlib.Path(folder).absolute()
    if not (folder / "config.json").exists():
        raise ValueError(
            f"run: expected the folder of a training run, got {str(folder)!r}"
        )
    config = model.Config(**json.loads((folder / "config.json").read_text()))
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        like = begin(config, optimizer(1))
        return config, resume(manager, like, folder)[0]["params"]


def _mesh(B):
    devices = jax.devices()
    if len(devices) == 1 or B % len(devices):
        return None
    return Mesh(np.array(devices), ("batch",))


class _Stop:
    """Notes SIGTERM instead of dying of it."""

    asked = False

    def _note(self, *_):
        self.asked = True

    def __enter__(self):
        try:
            self.before = signal.signal(signal.SIGTERM, self._note)
        except ValueError:  # not the main thread
            self.before = None
        return self

    def __exit__(self, *_):
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)


def held_out(config, params, data, B=8, L=512, batches=8):
    """Loss in nats per byte on `data`."""
    run = jax.jit(functools.partial(model.loss, config=config))
    batch = corpus.batches(data, B, L, seed=1)
    return float(np.mean([run(params, *batch(n)) for n in range(batches)]))


def accuracy(config, params, batch):
    """Share of the targets, of those that count, that are the likeliest token."""
    inputs, targets = batch
    logits, _ = jax.jit(functools.partial(model.forward, config=config))(params, inputs)
    counts = targets >= 0
    return float((np.argmax(np.asarray(logits), -1) == targets)[counts].mean())


# ------------------------------------------------------ commands


def main(words):
    """python -m gdn2_kernels train"""
    parser = argparse.ArgumentParser(
        prog="python -m gdn2_kernels train", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--preset", default="tiny", choices=model.PRESETS)
    parser.add_argument("--data", default="stdlib", help="stdlib, enwik8, or a file")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", default="auto")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument(
        "--folder",
        help="default: runs/PRESET-DATA; a run that is there is gone on with",
    )
    o = parser.parse_args(words)
    environment.banner()
    config = dataclasses.replace(model.PRESETS[o.preset], stage=o.stage)
    text = corpus.load(o.data)
    cut = len(text) * 19 // 20
    folder = pathlib.Path(o.folder or f"runs/{o.preset}-{pathlib.Path(o.data).stem}")
    state, losses = train(config, corpus.batches(text[:cut], o.batch, o.length, o.seed), o.steps, folder=folder,
                          rate=o.rate, seed=o.seed, save_every=o.save_every)  # fmt: skip
    print(f"step {len(losses)} of {o.steps}: loss {np.nanmean(losses[-20:]):.3f} nats per byte (mean of the last 20), "
          f"{int(state['skipped'])} steps skipped")  # fmt: skip
    if len(losses) == o.steps:
        print(
            f"held out: {held_out(config, state['params'], text[cut:]):.3f} nats per byte"
        )
    plot(losses, folder / "loss.png")
    print("in", folder)


def plot(losses, path):
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5))
    axis.plot(range(1, len(losses) + 1), losses, lw=1)
    axis.set(xlabel="step", ylabel="nats per byte", title="training loss")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def main_generate(words):
    """python -m gdn2_kernels generate"""
    parser = argparse.ArgumentParser(prog="python -m gdn2_kernels generate")
    parser.add_argument(
        "--folder", default="runs/tiny-stdlib", help="of a training run"
    )
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(words)
    if not o.prompt:
        parser.error("--prompt: expected at least one character")
    config, params = restored(o.folder)
    prompt = jnp.asarray(
        np.frombuffer(o.prompt.encode(), np.uint8)[None].astype(np.int32)
    )
    found = model.generate(
        params, prompt, config, o.bytes, jax.random.key(o.seed), o.temperature
    )
    print(o.prompt + bytes(np.asarray(found[0], np.uint8)).decode(errors="replace"))
