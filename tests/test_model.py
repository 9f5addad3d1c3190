"""The language model and its training: sizes as published, a past that no future touches, decoding that is the forward
pass, and a run that can be stopped anywhere.
"""

import dataclasses
import functools
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from gdn2_kernels import corpus, model, train

pytestmark = pytest.mark.once  # arithmetic, and a layer that the other tests run

SMALL = model.Config(d_model=16, heads=2, head_dim=8, layers=2, mlp=24, vocabulary=32, gate_rank=4, stage="recurrence")
HYBRID = dataclasses.replace(SMALL, attention_every=2)


QUICK = {"xla_backend_optimization_level": 0}  # programs that run once


@functools.cache
def params(config):
    """Any numbers will do, and numpy has them without a compiler."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(0.5 * random.normal(size=x.shape), x.dtype), shapes)


def tokens(L, B=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 32, (B, L)), jnp.int32)


@functools.cache
def forward(config):
    return jax.jit(functools.partial(model.forward, config=config), compiler_options=QUICK)


# ------------------------------------------------------ the model


@pytest.mark.parametrize("name, large, all_", [("34.87M", 34_865_152, None), ("334M", None, 334e6), ("307M", None, 307e6)])
def test_presets_have_the_published_sizes(name, large, all_):
    shapes = jax.eval_shape(functools.partial(model.init, config=model.PRESETS[name]), jax.random.key(0))
    if large:
        assert model.count(shapes, small=False) == large
    else:
        assert round(model.count(shapes) / 1e6) == all_ / 1e6
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(shapes))


def test_gates_begin_as_published():
    block = model.init(jax.random.key(0), SMALL)["blocks"][0]
    dt = np.asarray(jax.nn.softplus(block["dt_bias"]))
    assert 0.99e-3 < dt.min() and dt.max() < 0.101
    rate = np.exp(np.asarray(block["log_rate"]))
    assert 1 <= rate.min() and rate.max() <= 16


def test_the_future_does_not_reach_the_past():
    text = tokens(12)
    other = text.at[:, 7].add(1) % 32
    x, y = (np.asarray(forward(HYBRID)(params(HYBRID), t)[0]) for t in (text, other))
    np.testing.assert_array_equal(x[:, :7], y[:, :7])
    assert np.all(np.abs(x[:, 7:] - y[:, 7:]).max(-1) > 0)


def test_decoding_is_the_forward_pass():
    """In pieces of 5, 1, 1, .. tokens, the state handed on: a hybrid, so that both kinds of state are."""
    text = tokens(9)
    whole, _ = forward(dataclasses.replace(HYBRID, stage="wy"))(params(HYBRID), text)  # in chunks
    state, pieces = model.start(HYBRID, 2, length=9), []
    for start, end in [(0, 5), (5, 6), (6, 7), (7, 8), (8, 9)]:
        logits, state = forward(HYBRID)(params(HYBRID), text[:, start:end], state=state)
        pieces.append(logits)
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, rtol=2e-4, atol=2e-5)


def test_generating_takes_what_forward_finds_likeliest():
    prompt = tokens(5)
    run = jax.jit(functools.partial(model.generate, config=HYBRID, steps=4, key=jax.random.key(0), temperature=0), compiler_options=QUICK)
    found = np.asarray(run(params(HYBRID), prompt))
    text = jnp.concatenate([prompt, found], 1)
    logits, _ = forward(HYBRID)(params(HYBRID), text)
    np.testing.assert_array_equal(np.argmax(logits, -1)[:, 4:-1], found)


def test_a_zero_embedding_has_finite_gradients():
    p = dict(params(SMALL))
    p["embedding"] = p["embedding"].at[3].set(0)
    p["blocks"] = [b | {"q": 0 * b["q"], "k": 0 * b["k"]} for b in p["blocks"]]
    text = jnp.full((1, 6), 3)
    gradients = jax.jit(jax.grad(functools.partial(model.loss, config=SMALL)), compiler_options=QUICK)(p, text, text)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_a_pattern_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="layers: expected a multiple of attention_every=3, got 8"):
        dataclasses.replace(SMALL, layers=8, attention_every=3)


# ------------------------------------------------------ training

TEXT = np.random.default_rng(0).integers(0, 32, 400).astype(np.uint8)
BATCHES = corpus.batches(TEXT, 8, 12)
run = functools.partial(train.train, SMALL, steps=6, save_every=2, bar=False)


@functools.cache
def one_step_on():
    """A step, compiled, and the state after the first."""
    optimize = train.optimizer(100)
    step = jax.jit(functools.partial(train.step, config=SMALL, optimize=optimize), compiler_options=QUICK)
    return step, step(train.begin(SMALL, optimize), *BATCHES(0))[0]


def same(x, y):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_stopped_and_gone_on_with_it_is_the_same_run_to_the_bit(tmp_path):
    """Data parallel over the eight devices, and close to what one device makes of it."""
    through, losses = run(BATCHES, folder=tmp_path / "through")
    run(BATCHES, folder=tmp_path / "stopped", stop_at=3)
    again, losses_again = run(BATCHES, folder=tmp_path / "stopped")
    same(through, again)
    assert losses == losses_again and len(losses) == 6
    config, restored = train.restored(tmp_path / "stopped")
    assert config == SMALL
    same(restored, again["params"])
    _, alone = run(BATCHES, data_parallel=False)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_bad_steps_change_nothing_and_are_counted():
    step, state = one_step_on()
    # A parameter that makes the loss NaN, and a gradient that is far from usual.
    broken = state | {"params": state["params"] | {"head": state["params"]["head"].at[0, 0].set(jnp.nan)}}
    for before in (broken, state | {"typical": state["typical"] / 1000}):
        after, seen = step(before, *BATCHES(1))
        assert not seen["ok"] and int(after["skipped"]) == 1 and int(after["step"]) == 2
        same(after["params"], before["params"])
        same(after["optimizer"], before["optimizer"])
        assert np.isfinite(after["typical"])
    after, seen = step(state, *BATCHES(1))
    assert seen["ok"] and int(after["skipped"]) == 0


def test_a_spike_that_stays_is_followed_in_the_end():
    step, state = one_step_on()
    state = state | {"typical": state["typical"] / 1000}
    seen = [bool((out := step(state, *BATCHES(n)))[1]["ok"]) or state.update(out[0]) for n in range(30)]
    assert not seen[0] and any(seen)


def test_sigterm_saves(tmp_path):
    def batches(n):
        if n == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return BATCHES(n)

    before = signal.getsignal(signal.SIGTERM)
    _, losses = run(batches, folder=tmp_path)
    assert len(losses) == 4 and signal.getsignal(signal.SIGTERM) == before
    _, losses = run(BATCHES, folder=tmp_path)
    assert len(losses) == 6


# ------------------------------------------------------ data and commands


def test_the_standard_library_is_text_enough():
    text = corpus.load("stdlib")
    assert len(text) > 3e6 and b"def __init__(self" in text[:1_000_000].tobytes()
    same(text, corpus.load("stdlib"))
    with pytest.raises(ValueError, match="data: expected 'stdlib', 'enwik8' or a file, got 'nothing'"):
        corpus.load("nothing")


def test_a_download_goes_on_and_is_checked(tmp_path, monkeypatch):
    import hashlib
    import io
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("enwik8", b"some text")
    packed, asked = packed.getvalue(), []

    class Reply(io.BytesIO):
        status = 206

    def urlopen(request):
        asked.append(request.headers["Range"])
        return Reply(packed[int(asked[-1][6:-1]) :])

    monkeypatch.setattr(corpus.urllib.request, "urlopen", urlopen)
    (tmp_path / "enwik8.zip.part").write_bytes(packed[:20])
    get = functools.partial(corpus.enwik8, tmp_path, sha256=hashlib.sha256(b"some text").hexdigest())
    assert get() == get() == b"some text" and asked == ["bytes=20-"]
    with pytest.raises(ValueError, match="expected enwik8 with SHA-256"):
        corpus.enwik8(tmp_path, sha256="0")
    assert not (tmp_path / "enwik8.zip").exists()


def test_recall_asks_what_was_said():
    inputs, targets = corpus.recall_batches(4, 5, 20, 32)(0)
    for row, answers in zip(inputs, targets):
        said = dict(zip(row[:10:2], row[1:10:2]))
        asked = np.flatnonzero(answers >= 0)
        assert len(said) == len(asked) == 5 and asked.min() >= 10
        assert [said[key] for key in row[asked]] == list(answers[asked])
    with pytest.raises(ValueError, match="pairs: expected 1 .. 6"):
        corpus.recall_batches(4, 7, 20, 32)


def test_commands_load_only_what_they_need():
    code = "import sys; from gdn2_kernels.__main__ import COMMANDS; assert 'train' in COMMANDS and 'optax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    unknown = subprocess.run([sys.executable, "-m", "gdn2_kernels", "nothing"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "train" in unknown.stdout
