"""What the pictures of moves say is what the stages move, and they can be read."""

import jax
import jax.numpy as jnp
import pytest

from gdn2_kernels import pictures
from gdn2_kernels.stages import atomic_gdn2, mxu
from gdn2_kernels.stages.launch import Dims, Options, shape_and_block
from gdn2_kernels.v5e import launches
from gdn2_kernels.v5e.programs import program
from helpers import KERNELS, once

SMALL = dict(B=1, L=256, H=2, D=128)


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("stage, module", [pytest.param("atomic_gdn2", atomic_gdn2.stage, marks=once), ("mxu", mxu.stage)])
def test_bytes_through_hbm_are_those_of_the_arrays(stage, module):
    """Against the shapes that `forward` and `backward` of the stage take and return, not the launches."""
    B, L, H, D = SMALL.values()
    C = module.CHUNK_SIZE
    dims = Dims(B, H, L // C, C, D, D)
    options = Options(dims, "high", False)
    tokens = jax.ShapeDtypeStruct((B, L, H * D), jnp.float32)
    state = jax.ShapeDtypeStruct((B, H, D, D), jnp.float32)
    scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    inputs = [*[tokens] * 6, scale]
    choice = ["save"] if stage == "atomic_gdn2" else []
    results, residuals = jax.eval_shape(lambda *x: module.forward(*x, *choice, options), *inputs, state)
    *gradients, _, d_initial = jax.eval_shape(
        lambda kept, *x: module.backward(x[:7], kept, *x[7:], options), residuals, *inputs, tokens, state
    )
    # The gradient of scale leaves the launch as rows, which are summed outside.
    rows, _ = shape_and_block({"atomic_gdn2": "head row", "mxu": "head rows"}[stage], dims)
    d_scale = jax.ShapeDtypeStruct(rows, jnp.float32)
    forward, backward = pictures.traffic(stage, **SMALL)
    assert forward.own == (bytes_of([inputs, state]), bytes_of(results))
    assert forward.handed == (0, bytes_of(residuals)) and backward.handed == (bytes_of(residuals), 0)
    assert backward.own == (bytes_of([inputs, tokens, state]), bytes_of([gradients, d_initial, d_scale]))


@pytest.mark.parametrize("stage", KERNELS)
def test_bytes_through_hbm_are_those_of_the_launches(stage):
    fn, args = program(stage=stage, **SMALL)
    calls = launches(fn, *args)
    found = pictures.traffic(stage, **SMALL)
    assert len(found) == len(calls)
    for launch, call in zip(found, calls):
        assert launch.hbm == bytes_of([x.aval for x in (*call.invars, *call.outvars)])
    # Nothing appears from nowhere, and what is handed on is read at least once.
    assert 0 < sum(x.handed[1] for x in found) <= sum(x.handed[0] for x in found)


def test_named_and_counted_by_unit():
    found = {x.name: x for x in pictures.traffic("atomic_ops", **SMALL)}
    assert list(found) == ["A scores", "B inverse", "C prepare", "D scan", "B2 own outputs", "B1 scan back",
                           "B3 prepare back", "B4 scores back", "B5 log decay back"]  # fmt: skip
    for name, launch in found.items():
        assert (launch.units["matrix"] == 0) == (name[:2] in ("A ", "B4", "B5"))
    # Exactly known: six levels, five of them two products of three passes of 64 x 64 matrices.
    chunks, product = SMALL["H"] * SMALL["L"] // 64, 3 * 64 * 64 * 4
    assert found["B inverse"].units["matrix"] == chunks * 5 * 2 * 3 * product


@pytest.mark.parametrize("stage", KERNELS)
def test_kernels_for_a_chip_have_no_loops(stage):
    """Their work is counted once over; a loop would count as one of its rounds."""
    fn, args = program(stage=stage, **SMALL)
    for call in launches(fn, *args):
        text = str(call.params["jaxpr"])
        assert "while[" not in text and "scan[" not in text


def test_what_plain_stages_keep():
    B, L, H, D = (SMALL[x] for x in "BLHD")
    per_token = B * L * H * 4
    assert pictures.traffic("recurrence", **SMALL) == []
    states, inputs = pictures.kept("recurrence", **SMALL)
    assert (states.count, states.bytes) == (1, per_token * D * D)
    assert (inputs.count, inputs.bytes) == (6, 6 * per_token * D)
    # All heads at once: a map and a state for each token. One after another: inputs and initial states.
    pairs = pictures.kept("associative_scan", **SMALL)[0]
    assert (pairs.count, pairs.bytes) == (2, 2 * per_token * D * D)
    assert [x.count for x in pictures.kept("associative_scan")] == [6, 1]
    # wy: the six inputs, X, Aqk, vn and the states of chunks of 64.
    assert sum(x.bytes for x in pictures.kept("wy", **SMALL)) == per_token * (6 * D + 64 + 64 + D + D * D // 64)


@pytest.mark.parametrize("stage", ["wy", "mxu", "atomic_ops"])
def test_can_be_read(stage):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    figure = pictures.moves(stage, **SMALL)
    assert figure.get_facecolor() == (1, 1, 1, 1) and figure.get_figwidth() <= 7
    figure.draw_without_rendering()
    texts = [x for x in figure.axes[0].texts if x.get_text()]
    boxes = [x.get_window_extent() for x in texts]
    for text, box in zip(texts, boxes):
        assert text.get_fontsize() >= 10
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1, f"{text.get_text()!r} is cut off"
    for n, box in enumerate(boxes):
        for m in range(n):
            assert not box.overlaps(boxes[m]), f"{texts[n].get_text()!r} on {texts[m].get_text()!r}"
    matplotlib.pyplot.close(figure)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="stage: expected one of recurrence, .*, got 'fast'"):
        pictures.moves("fast")
    with pytest.raises(ValueError, match="L: expected a whole number above 0, got 0"):
        pictures.traffic("wy", L=0)
    with pytest.raises(ValueError, match="names: expected 2 for recurrence, got 1"):
        pictures.moves("recurrence", names=["S"])
