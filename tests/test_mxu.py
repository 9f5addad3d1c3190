"""The stage mxu: the tree of decays, the arrangements on registers, and two launches that stay exact at every decay."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

import gdn2_kernels as gk
from gdn2_kernels import tile, v5e
from gdn2_kernels.stages import launch, views
from gdn2_kernels.stages.mxu import heads, inverse, lanes, pairing, passes, plain, stage, tiles, tree
from helpers import GATES, NAMES, make, once, relative_error, rest_once, results, truth, wrong_signs, x64

C = stage.CHUNK_SIZE
T = np.arange(C)
PRECISIONS = ("default", "high", "highest")
BAR = {"default": 2e-2, "high": 2e-5, "highest": 2e-6}  # relative L2 against the oracle, every result, every decay
TOKENS = ("dq", "dk", "dv", "dg", "db", "dw")  # gradients with a row for each token

# ------------------------------------------------------ both launches, compiled once for a shape
#
# Kernels see whole chunks and channels padded to 128, so one program serves every length up to N chunks.


class Found(NamedTuple):
    results: dict  # by name, as `truth`
    residuals: stage.Residuals
    d_scale: float


@functools.partial(
    # Programs run for moments and compile for long: half the time without LLVM's optimisations.
    jax.jit, static_argnames=("options", "twins", "at_once"), compiler_options={"xla_backend_optimization_level": 0}
)  # fmt: skip
def _both(tokens, scale, state, do, d_state, options, twins, at_once):
    with pytest.MonkeyPatch.context() as patch:
        if twins:
            patch.setattr(stage, "FAST", stage.PLAIN)
        if at_once:
            patch.setattr(stage, "heads_at_once", lambda B, H, most: at_once)
        outputs, kept = stage.forward(*tokens, scale, state, options)
        *gradients, d_scale, d_initial = stage.backward((*tokens, scale), kept, do, d_state, options)
    return *outputs, *gradients, d_initial, kept, d_scale


def run(x, precision="high", *, N=None, twins=False, at_once=None, interpret=True, chunk_size=C, paired=False):
    """Both launches on N chunks, by default two of 128 tokens or what is as long. twins: the plain kernels. at_once:
    (batch, heads) of a grid step. paired: two heads of 64 channels count as one of 128, in chunks of 64."""
    scale = jnp.full((1, 1), x[0][0].shape[-1] ** -0.5, jnp.float32)
    heads_before = x[0][0].shape[2]
    if paired:
        inputs, state, do, d_state = x
        state, d_state = map(pairing.state_in, (state, d_state))
        x = [pairing.tokens_in(a) for a in inputs], state, pairing.tokens_in(do), d_state
    inputs, state, do, d_state = x
    B, L, H, K = inputs[0].shape
    V = inputs[2].shape[-1]
    members = pairing.MEMBERS if paired else 1
    chunk_size //= members
    N = N or 2 * members
    dims = launch.Dims(B, H, N, chunk_size, views.padded(K), views.padded(V), members)
    options = launch.Options(dims, precision, interpret)
    *tokens, do = (views.tokens_in(jnp.asarray(a), N * chunk_size) for a in (*inputs, do))
    whole, _ = launch.shape_and_block("head", dims)
    states_in = [views.state_in(jnp.asarray(a), whole) for a in (state, d_state)]
    *found, kept, d_scale = _both(tokens, scale, states_in[0], do, states_in[1], options, twins, at_once)
    named = {}
    for name, a in zip(NAMES, found, strict=True):
        D = V if name in ("o", "dv", "dw") else K
        a = views.state_out(a, state.shape) if "state" in name else views.tokens_out(a, L, H, D)
        if paired:
            a = (pairing.state_out if "state" in name else pairing.tokens_out)(a, heads_before)
        named[name] = np.asarray(a)
    return Found(named, kept, float(d_scale[0, 0]))


def bar(precision, case):
    if case == "one key":
        # Every token erases what the one before it wrote: what is left of three passes' rounding is four times as
        # large in relation to what is left of the gradients. The stage wy, with the same products, has the same errors.
        return 4 * BAR[precision]
    return BAR[precision]


def assert_within(found, expected, limit, what=""):
    for name in NAMES:
        error = relative_error(found[name], expected[name])
        assert error <= limit, f"{what} {name}: relative L2 error {error:.2e} > {limit:.0e}"


def changed(x, **changes):
    """The case with some of q, k, v, g, b, w replaced by functions of what they were."""
    inputs, *rest = x
    return [changes.get(name, lambda a: a)(a.copy()) for name, a in zip("qkvgbw", inputs, strict=True)], *rest


def alternating(g):
    g[:, 0::2], g[:, 1::2] = -1e4, 0
    return g


def one_key(k):
    return np.broadcast_to(k[:, :1], k.shape).copy()


LENGTH = 200  # two chunks, the second not whole


@functools.cache
def cases():
    """By name: a case at 128 channels, with its truth."""
    found = {gate: make(LENGTH, 128, 128, B=1, H=1, gate=gate) for gate in GATES}
    found["alternating"] = changed(found["-0"], g=alternating)
    found["one key"] = changed(found["-0.01"], k=one_key)
    found["b up to 2"] = make(LENGTH, 128, 128, B=1, H=1, gate="-0.1", b_max=2.0)
    return {name: (x, truth(*x)) for name, x in found.items()}


@pytest.mark.parametrize("precision", rest_once(PRECISIONS, "high"))
def test_every_decay_at_128_channels(precision):
    for name, (x, wanted) in cases().items():
        found = run(x, precision).results
        assert_within(found, wanted, bar(precision, name), name)
        if precision != "default":
            # Below what the precision promises of a typical element, a sign hangs on rounding.
            floor = max(1e-30, bar(precision, name) * np.abs(wanted["dg"]).mean())
            assert wrong_signs(found["dg"], wanted["dg"], floor) == 0, name


@once
@pytest.mark.parametrize("precision", ["high"])
def test_fast_kernels_equal_their_plain_twins(precision):
    """In results and in what the forward launch keeps for the backward one."""
    for name in ("per channel", "bursts", "b up to 2"):
        x, _ = cases()[name]
        fast, twin = run(x, precision), run(x, precision, twins=True)
        assert_within(fast.results, twin.results, BAR[precision], name)
        for kind, a, b in zip(stage.Residuals._fields, fast.residuals, twin.residuals):
            assert a.dtype == b.dtype == (jnp.bfloat16 if precision == "default" else jnp.float32)
            assert relative_error(a, b) <= BAR[precision], (name, kind)
        assert fast.d_scale == pytest.approx(twin.d_scale, rel=1e3 * BAR[precision], abs=1e3 * BAR[precision])


@once
def test_gradient_of_scale():
    x, wanted = cases()["-0.1"]
    assert run(x, "highest").d_scale == pytest.approx(128**0.5 * (wanted["o"] * x[2]).sum(), rel=1e-4)


@once
def test_a_long_sequence():
    """Sixteen chunks, a state carried in and its gradient carried out, hardly any decay."""
    x = make(2048, 128, 128, B=1, H=1, gate="-0.01")
    assert_within(run(x, "high", N=16).results, truth(*x), BAR["high"])


@once
def test_wide_keys():
    x = make(150, 256, 128, B=1, H=1, gate="per channel")
    assert_within(run(x, "high").results, truth(*x), BAR["high"])


def test_bfloat16_in_one_pass():
    """The fastest setting: bfloat16 tokens, float32 gates of decay, one pass, residuals in bfloat16."""
    (inputs, state, do, d_state), _ = cases()["-1"]
    narrow = [np.asarray(jnp.asarray(a, jnp.float32 if i == 3 else jnp.bfloat16)) for i, a in enumerate((*inputs, do))]
    x = narrow[:6], state, narrow[6], d_state
    found = run(x, "default").results
    assert_within(found, truth(*x), BAR["default"])
    assert found["o"].dtype == found["dq"].dtype == jnp.bfloat16 and found["dg"].dtype == np.float32


@once
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_smaller_chunks_give_the_same(chunk_size):
    x = make(100, 16, 24, B=1, H=1, gate="bursts")
    found = run(x, "highest", chunk_size=chunk_size, N=-(-100 // chunk_size)).results
    assert_within(found, truth(*x), BAR["highest"])
    assert_within(found, run(x, "highest").results, BAR["highest"])


# ------------------------------------------------------ two heads of 64 channels in the same lanes


@functools.cache
def two_heads(gate, seed=0):
    return make(LENGTH, 64, 64, B=1, H=2, gate=gate, seed=seed)


@pytest.mark.parametrize("precision", ["default", "high"])
def test_pairs_of_heads(precision):
    """Two heads that share registers, states and weights of products, against the oracle."""
    for gate in GATES if precision == "high" else ("-0.01", "per channel"):
        x = two_heads(gate)
        wanted, found = truth(*x), run(x, precision, paired=True)
        assert_within(found.results, wanted, BAR[precision], gate)
        floor = max(1e-30, BAR[precision] * np.abs(wanted["dg"]).mean())
        assert wrong_signs(found.results["dg"], wanted["dg"], floor) == 0, gate
        assert found.d_scale == pytest.approx(8 * (wanted["o"] * x[2]).sum(), rel=1e3 * BAR[precision], abs=0.5)


@once
def test_members_of_a_pair_are_independent_to_the_bit():
    """Whatever stands beside a head, and on whichever side it stands."""
    x, other = two_heads("per channel"), two_heads("-0.1", seed=1)

    def with_other(at):
        def change(a, b, axis):
            a = a.copy()
            (a if axis == 1 else np.moveaxis(a, 2, 1))[:, at] = (b if axis == 1 else np.moveaxis(b, 2, 1))[:, at]
            return a

        (a, s, do, ds), (b, t, eo, et) = x, other
        inputs = [change(*y, 2) for y in zip(a, b, strict=True)]
        return inputs, change(s, t, 1), change(do, eo, 2), change(ds, et, 1)

    base = run(x, paired=True).results
    for at in (0, 1):
        for name, a in run(with_other(at), paired=True).results.items():
            stays = (slice(None), 1 - at) if "state" in name else (slice(None), slice(None), 1 - at)
            assert np.array_equal(a[stays], base[name][stays]), (at, name)


@once
def test_an_odd_number_of_heads_in_pairs():
    """Through the stage: three heads become four, and one of zeros is cut off again."""
    x = make(150, 64, 64, B=1, H=3)
    assert_within(results("mxu", *x, precision="default"), truth(*x), BAR["default"])


def test_which_heads_are_paired():
    inputs, state, *_ = make(150, 64, 64, B=1, H=3)
    q, _, v, *_ = inputs
    assert pairing.fit(q, v, None) and pairing.fit(q, v, 64) and not pairing.fit(q, v, C)
    assert not pairing.fit(q[:, :, :1], v[:, :, :1], None)  # a head alone
    assert not pairing.fit(q, v[..., :32], None)
    assert pairing.tokens_in(q).shape == (1, 150, 2, 128) and pairing.state_in(state).shape == (1, 2, 128, 64)
    assert np.array_equal(pairing.tokens_out(pairing.tokens_in(q), 3), q)
    assert np.array_equal(pairing.state_out(pairing.state_in(state), 3), state)


@once
@pytest.mark.parametrize("of", [lanes.Alone, lanes.Pair])
@pytest.mark.parametrize("kind", [inverse.One, inverse.Two])
def test_inverses_of_one_and_of_two_in_one_matrix(kind, of):
    size = C // of.MEMBERS
    heads = 1 if kind is inverse.One else 2
    A = [[np.tril(0.3 * numbers(size, size, seed=2 * i + j), -1) for j in range(of.MEMBERS)] for i in range(heads)]

    def level(x, h):
        """As it comes from products: in columns of the earlier half, for queries of the later."""
        return tiles.roll_lanes(jnp.where(tiles.halves_of_block(size, h)[1], tiles.earlier(x, h), 0), -h)

    def leaf(x):
        X8 = yield from tiles.inverse_of_blocks(tiles.pack_blocks(x))
        if kind is inverse.One:
            return (X8,)
        return X8, (yield from tiles.doubled_blocks(X8, tiles.pack_level(level(x, 8))))

    def found(*A_turned):
        X, exact = kind.start(tile.side_by_side(map(leaf, A_turned)), size), passes.PASSES["highest"]
        for h in [h for h in kind.LEVELS if h < size]:
            in_early, in_late = tiles.halves_of_block(size, h)
            first, *second = (level(x, h) for x in A_turned)
            packed = exact.pack(first, in_early, in_late, h)
            if second:
                packed = jnp.where(in_early, packed, jnp.where(in_late, tiles.roll_lanes(second[0], h), 0))
            (X,) = tile.side_by_side([kind.doubled(exact, of, X, packed, h)])
        return kind.whole(X)

    for x, members in zip(on_device(found, *(np.concatenate([y.T for y in x], 1) for x in A)), A, strict=True):
        for x, y in zip(np.split(x, of.MEMBERS, 1), members, strict=True):
            assert relative_error(x, np.linalg.inv(np.eye(size) + y.astype(np.float64)).T) < 1e-5


# ------------------------------------------------------ two heads that share an inverse


def test_which_heads_share_an_inverse():
    """Neighbours of one sequence, at more than one pass, pairs as well; what is left over is alone."""

    def shared(batch, group, precision="high", members=1, alone=False):
        found = inverse.slots(heads.heads_of(np.zeros((batch, group)), members), passes.PASSES[precision], alone)
        return [[head.n for head in slot.heads] for slot in found], [slot.kind.__name__ for slot in found]

    assert shared(1, 5) == ([[0, 1], [2, 3], [4]], ["Two", "Two", "One"])
    assert shared(2, 3, "highest") == ([[0, 1], [2], [3, 4], [5]], ["Two", "One"] * 2)  # not over two sequences
    assert shared(3, 1) == ([[0], [1], [2]], ["One"] * 3)
    assert shared(1, 4, "default") == shared(1, 4, alone=True) == ([[0], [1], [2], [3]], ["One"] * 4)
    assert shared(1, 3, members=2) == ([[0, 1], [2]], ["Two", "One"])


@once
@pytest.mark.parametrize("precision", ["high"])
def test_heads_that_share_an_inverse(precision):
    """Three heads in a grid step: two share, the third is alone."""
    for gate in ("-0.01", "per channel", "bursts"):
        x = make(LENGTH, 128, 128, B=1, H=3, gate=gate)
        assert_within(run(x, precision, at_once=(1, 3)).results, truth(*x), BAR[precision], gate)
    x = make(LENGTH, 64, 64, B=1, H=6, gate="per channel")
    assert_within(run(x, precision, at_once=(1, 3), paired=True).results, truth(*x), BAR[precision], "pairs")


# ------------------------------------------------------ to the last bit


def mixed(x, y, t):
    """Tokens before t of one case, from t on of another."""
    return [np.concatenate([a[:, :t], b[:, t:]], 1) for a, b in zip(x[0], y[0], strict=True)]


@once
@pytest.mark.parametrize("precision, paired", [("high", False), ("high", True), ("highest", False)])
def test_later_tokens_change_nothing_before_them(precision, paired):
    """In outputs and in the gradients of a loss on earlier outputs; in a block of eight, at the end of one, of a level,
    of a chunk. The packed products of three passes put low parts where other tokens stand: this sees them."""
    x, other = (two_heads(gate) if paired else cases()[gate][0] for gate in ("-1", "bursts"))
    _, state, do, d_state = x
    base = run((x[0], state, do, 0 * d_state), precision, paired=paired).results
    for t in (1, 3, 8, 33, 64, 128, 131):
        early_do = np.concatenate([do[:, :t], 0 * do[:, t:]], 1)
        later = run((mixed(x, other, t), state, early_do, 0 * d_state), precision, paired=paired).results
        assert np.array_equal(later["o"][:, :t], base["o"][:, :t]), t
        first = run((x[0], state, early_do, 0 * d_state), precision, paired=paired).results
        for name in TOKENS:
            assert np.array_equal(first[name][:, :t], later[name][:, :t]), (t, name)
            assert not later[name][:, t:].any(), (t, name)
        assert np.array_equal(first["d_initial_state"], later["d_initial_state"]), t


@once
def test_earlier_tokens_are_not_seen_over_a_reset():
    """-1e4 in one token, in every channel: nothing before it is seen after it, forward or backward."""
    def reset(g):
        g[:, 70] = -1e4
        return g

    x, other = changed(cases()["-0.1"][0], g=reset), changed(cases()["per channel"][0], g=reset)
    inputs, state, do, d_state = x
    one, two = run(x).results, run((mixed(other, x, 70), 2 * state, do, d_state)).results
    assert np.array_equal(one["o"][:, 70:], two["o"][:, 70:])
    assert np.array_equal(one["final_state"], two["final_state"])
    late_do = np.concatenate([0 * do[:, :70], do[:, 70:]], 1)
    blind = run((inputs, state, late_do, d_state)).results
    assert all(not blind[name][:, :70].any() for name in TOKENS)
    assert not blind["d_initial_state"].any()


def test_two_runs_are_equal():
    x, _ = cases()["per channel"]
    first, second = run(x), run(x)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


@once
def test_filling_is_no_token():
    """Chunks that are filled up, or filling altogether, give the same as the tokens alone, to the bit."""
    (inputs, state, do, d_state), _ = cases()["-0.1"]
    for L in (1, 7, 100):
        x = [a[:, :L] for a in inputs], state, do[:, :L], d_state
        found = run(x).results
        assert_within(found, truth(*x), BAR["high"])
        assert np.array_equal(found["o"], run((inputs, state, do, d_state)).results["o"][:, :L])


@once
@pytest.mark.parametrize("cut", [1, 100, 128, 199])
def test_split_through_the_state(cut):
    (inputs, state, do, d_state), wanted = cases()["bursts"]
    first = run(([a[:, :cut] for a in inputs], state, do[:, :cut], d_state), "highest").results
    rest = run(([a[:, cut:] for a in inputs], first["final_state"], do[:, cut:], d_state), "highest").results
    # The gradient of the state at the cut is what the first part has to be given.
    again = run(([a[:, :cut] for a in inputs], state, do[:, :cut], rest["d_initial_state"]), "highest").results
    joined = {name: np.concatenate([again[name], rest[name]], 1) for name in ("o", *TOKENS)}
    joined |= {"final_state": rest["final_state"], "d_initial_state": again["d_initial_state"]}
    assert_within(joined, wanted, BAR["highest"])


# ------------------------------------------------------ heads of a grid step


def three_heads(L=150):
    return make(L, 16, 24, B=1, H=3, gate="per channel")


@functools.cache
def one_by_one():
    """Results of three heads, each in a grid step of its own."""
    return run(three_heads(), at_once=(1, 1)).results


@once
def test_heads_are_independent_to_the_bit():
    inputs, state, do, d_state = three_heads()
    order = [2, 0, 1]
    x = [a[:, :, order] for a in inputs], state[:, order], do[:, :, order], d_state[:, order]
    for name, a in run(x, at_once=(1, 1)).results.items():
        base = one_by_one()[name]
        assert np.array_equal(a, base[:, order] if "state" in name else base[:, :, order]), name


@once
def test_heads_that_do_not_exist_are_harmless():
    """Three heads in groups of two: half of the last block lies outside the arrays, where the interpreter puts NaN."""
    found = run(three_heads(), at_once=(1, 2)).results
    assert_within(found, truth(*three_heads()), BAR["high"])
    # Heads of one grid step are one program; interpreted, XLA may round them differently.
    assert_within(found, one_by_one(), BAR["highest"])


@once
@pytest.mark.parametrize("B, most", [*itertools.product(range(1, 9), (1, 4, 8, 12))])
def test_heads_at_once(B, most):
    for H in range(1, 17):
        batch, group = stage.heads_at_once(B, H, most)
        assert 1 <= batch <= B and 1 <= group <= H and batch * group <= most
        computed = -(-B // batch) * batch * -(-H // group) * group
        assert computed <= 1.34 * B * H  # three heads may take the time of four
        if B * H <= most:
            assert (batch, group) == (B, H)


@once
@pytest.mark.parametrize("K, V, members", [*itertools.product((128, 256), (128, 256), (1,)), (128, 128, 2)])
def test_a_grid_step_fits_its_share_of_vmem(monkeypatch, K, V, members):
    """Blocks twice and scratch once, counted from what pallas_call is given."""
    steps = []

    def pallas_call(body, *, in_specs, out_specs, out_shape, scratch_shapes, **_):
        def call(*arrays):
            blocks = zip([*in_specs, *out_specs], [*arrays, *out_shape], strict=True)
            moving = [np.prod([n for n in spec.block_shape if n]) * x.dtype.itemsize for spec, x in blocks]
            steps.append(2 * sum(moving) + sum(np.prod(x.shape) * 4 for x in scratch_shapes))
            return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

        return call

    monkeypatch.setattr(launch.pl, "pallas_call", pallas_call)
    for precision, dtype in itertools.product(PRECISIONS, (jnp.float32, jnp.bfloat16)):
        for B, H in ((1, 1), (1, 16), (4, 6)):
            size = C // members
            options = launch.Options(launch.Dims(B, H, 1, size, K, V, members), precision, False)
            keys, values = (jax.ShapeDtypeStruct((B, size, H * D), dtype) for D in (K, V))
            scale, state = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 1), (B, H, K, V // members)))
            six = keys, keys, values, keys, keys, values
            outputs, kept = jax.eval_shape(functools.partial(stage.forward, options=options), *six, scale, state)
            jax.eval_shape(functools.partial(stage.backward, options=options), (*six, scale), kept, values, state)
    assert len(steps) == 36 and max(steps) <= stage.VMEM_BUDGET <= 40 * 2**20 < stage.VMEM_LIMIT


@pytest.mark.parametrize("steps, others", [(4, 8), (8, 3), (6, 6), (4, 0)])
def test_spread_runs_all_in_order_and_evenly(steps, others):
    seen = []

    def head():
        for step in range(steps):
            seen.append(("step", step))
            yield

    heads.spread(head(), steps, [functools.partial(seen.append, ("other", i)) for i in range(others)])
    for kind, count in (("step", steps), ("other", others)):
        assert [n for k, n in seen if k == kind] == list(range(count))
    between = np.diff([i for i, (kind, _) in enumerate(seen) if kind == "step"])
    assert between.max() - between.min() <= 1


def test_one_launch_forward_and_one_backward():
    inputs, *_ = make(300, 16, 24, B=1, H=2)

    def loss(*x):
        return gk.gdn2(*x, stage="mxu")[0].sum()

    assert len(v5e.launches(loss, *inputs)) == 1
    assert len(v5e.launches(jax.grad(loss, argnums=range(6)), *inputs)) == 2


@pytest.mark.parametrize("chunk_size, words", [(8, "16 to 128.*8"), (256, "16 to 128.*256")])
def test_chunk_sizes_refused_by_name(chunk_size, words):
    inputs, *_ = make(4, 8, 8, B=1, H=1)
    with pytest.raises(ValueError, match=f"^chunk_size: .*{words}"):
        gk.gdn2(*inputs, stage="mxu", chunk_size=chunk_size)


# ------------------------------------------------------ memory full of NaN, races


NAN_FILLED = [("fast", 3, 1, (2, 1)), ("fast", 1, 2, (1, 2)), ("pairs", 1, 2, (1, 1)), ("twins", 1, 3, (1, 2))]


@pytest.mark.parametrize("form, B, H, at_once", rest_once(NAN_FILLED, NAN_FILLED[1]))
def test_in_memory_full_of_nan(form, B, H, at_once, capfd):
    """What nothing has written is NaN, blocks reach outside the arrays, reads that race with writes are reported."""
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    twins, paired = form == "twins", form == "pairs"
    size, channels = 16 if twins else C, (64, 64) if paired else (8, 16)
    x = make(2 * size, *channels, B=B, H=H, gate="bursts")
    found = run(x, chunk_size=size, at_once=at_once, interpret=strict, paired=paired).results
    assert_within(found, truth(*x), BAR["high"])
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize("form, precision", rest_once([("alone", "default"), ("pairs", "high"), ("twins", "high")]))
def test_a_forward_call_keeps_nothing_and_computes_the_same(form, precision):
    """To the bit, also in memory full of NaN. What is left of what the backward launch needs are o and the state."""
    channels, chunk_size = (64, 64) if form == "pairs" else (8, 16), 16 if form == "twins" else None
    inputs, state, _, _ = make((chunk_size or C) + 5, *channels, B=1, H=3, gate="bursts")

    def forward(*x, interpret=True):
        return stage.mxu(
            *x[:6], jnp.float32(0.3), x[6], precision=precision, chunk_size=chunk_size, interpret=interpret
        )

    x = [*map(jnp.asarray, inputs), jnp.asarray(state)]
    (launch_,) = v5e.launches(forward, *x)
    assert len(launch_.outvars) == 2
    (kept,) = v5e.launches(lambda *x: jax.vjp(forward, *x)[0], *x)
    assert len(kept.outvars) == 6
    expected = jax.jit(lambda *x: jax.vjp(forward, *x)[0])(*x)
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    for interpret in (True, strict):
        found = jax.jit(functools.partial(forward, interpret=interpret))(*x)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# ------------------------------------------------------ the plain form


def one_chunk(C=32, K=8, V=16, gate="per channel"):
    """q, k, v, g, b, w (C, D) and so on: one head of a case, scale in q."""
    inputs, state, do, d_state = make(C, K, V, B=1, H=1, gate=gate)
    return [a[0, :, 0] for a in inputs], state[0, 0], do[0, :, 0], d_state[0, 0]


def dense_decay(g):
    """(C, C, K): exp of the sum of g over j+1 .. i, zero for j > i; the sums are exact, not differences."""
    C = len(g)
    t = np.arange(C)
    between = (t[None, None] > t[None, :, None]) & (t[None, None] <= t[:, None, None])  # (i, j, token)
    decay = np.exp(np.einsum("ijt,tk->ijk", between.astype(np.float64), g.astype(np.float64)))
    return decay * (t[:, None] >= t[None])[..., None]


level_factors = jax.jit(plain.level_factors)


@once
@pytest.mark.parametrize("gate", GATES)
def test_factors_of_the_levels(gate):
    """In [0, 1]; every pair in one level; their product is the decay of the pair, at any decay."""
    (_, _, _, g, _, _), *_ = one_chunk(C=128, K=4, gate=gate)
    with x64():
        levels, P, Q = level_factors(np.exp(g.astype(np.float64)))
    assert len(levels) == 7
    wanted, times = dense_decay(g), np.zeros((128, 128), int)
    for n, (left, right) in enumerate(levels):
        left, right = np.asarray(left), np.asarray(right)
        assert left.dtype == np.float64 and all((0 <= x).all() and (x <= 1).all() for x in (left, right))
        later = np.arange(128) & (1 << n) != 0
        assert not left[~later].any() and not right[later].any()
        pairs = (T[:, None] >> n + 1 == T[None] >> n + 1) & later[:, None] & ~later[None]
        times += pairs
        np.testing.assert_allclose((left[:, None] * right[None])[pairs], wanted[pairs], rtol=1e-12, atol=1e-300)
    assert np.array_equal(times, np.tril(np.ones((128, 128), int), -1))
    np.testing.assert_allclose(P, np.exp(np.cumsum(g.astype(np.float64), 0)), rtol=1e-10, atol=1e-300)
    np.testing.assert_allclose(Q, wanted[-1], rtol=1e-12, atol=1e-300)
    # In float32 a factor is the product of at most 64 decays, each multiplication rounded once.
    a = np.exp(g)
    rounded, *_ = level_factors(a)
    with x64():
        exact, *_ = level_factors(a.astype(np.float64))
    for found, expected in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        assert found.dtype == np.float32 and np.asarray(found).max() <= 1
        np.testing.assert_allclose(found, expected, rtol=64 * 2.0**-24, atol=2e-38)


def test_halves_and_blocks():
    x = jnp.arange(32.0)[:, None] * jnp.ones((1, 8))
    for h in (1, 2, 4, 8, 16):
        t = np.arange(32)
        later, swapped = jax.jit(lambda x, h=h: (plain.in_later_half(x, h), plain.swap_halves(x, h)))(x)
        assert np.array_equal(later[:, 0], t // h % 2 == 1)
        assert np.array_equal(swapped[:, 0], t ^ h)
        same = jax.jit(lambda h=h: plain.same_block(32, h))()
        assert np.array_equal(same, t[:, None] // (2 * h) == t[None] // (2 * h))


def pairs_of(q, k, bk, decay):
    """Dense: Aqk with its diagonal, A without."""
    Aqk, A = (np.einsum("ik,jk,ijk->ij", x, k, decay) for x in (q, bk))
    return Aqk, np.tril(A, -1)


@jax.jit
def scores_and_inverse(q, k, g, b):
    levels, *_ = plain.level_factors(jnp.exp(g))
    return plain.scores_and_inverse(q, k, b * k, levels, "highest")


@once
@pytest.mark.parametrize("gate", GATES)
def test_plain_scores_and_inverse(gate):
    (q, k, _, g, b, _), *_ = one_chunk(gate=gate)
    Aqk, X = scores_and_inverse(q, k, g, b)
    wanted, A = pairs_of(*(x.astype(np.float64) for x in (q, k, b * k)), dense_decay(g))
    np.testing.assert_allclose(Aqk, wanted, atol=1e-6)
    np.testing.assert_allclose(X, np.linalg.inv(np.eye(32) + A), atol=2e-6)


@jax.jit
def chunk_and_back(inputs, S, do, dS):
    o, leaving, residuals = plain.forward_chunk(*inputs, S, "highest")
    return o, leaving, plain.backward_chunk(*inputs, S, do, dS, residuals, "highest")


@once
@pytest.mark.parametrize("gate", GATES)
def test_plain_chunk_against_the_oracle(gate):
    inputs, state, do, d_state = one_chunk(gate=gate)
    o, leaving, (gradients, entering) = chunk_and_back(inputs, state.T, do, d_state.T)
    given = [x[None, :, None] for x in inputs], state[None, None], do[None, :, None], d_state[None, None]
    found = [o[None, :, None], leaving.T[None, None], *(x[None, :, None] for x in gradients), entering.T[None, None]]
    assert_within(dict(zip(NAMES, found, strict=True)), truth(*given, scale=1.0), BAR["highest"])


@once
def test_plain_gradients_through_the_levels_alone():
    """Against autodiff of the dense definition, in float64."""
    (q, k, _, g, b, _), *_ = one_chunk(C=16, K=8, gate="-0.1")
    random = np.random.default_rng(3)
    dAqk, dA = (np.tril(random.normal(size=(16, 16)), -1) for _ in range(2))
    with x64():
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, b * k, g)]

        def pairs(q, k, bk, g):
            after = jnp.tril(jnp.ones((16, 16)))[:, None] - jnp.tril(jnp.ones((16, 16)))[None]
            decay = jnp.exp(jnp.einsum("ijt,tk->ijk", after, g))
            both = [jnp.einsum("ik,jk,ijk->ij", x, k, decay) for x in (q, bk)]
            return (both[0] * dAqk).sum() + (both[1] * dA).sum()

        wanted = jax.grad(pairs, argnums=range(4))(*wide)

    @jax.jit
    def found(q, k, bk, g, dAqk, dA):
        levels, *_ = plain.level_factors(jnp.exp(g))
        nothing = jnp.zeros_like(q)
        return plain.levels_back(q, k, bk, levels, dAqk, dA, *[nothing] * 4, "highest")

    dq, dk, d_bk, dg = found(q, k, b * k, g, *(x.astype(np.float32) for x in (dAqk, dA)))
    for x, y in zip((dq, dk, d_bk, dg), wanted):
        assert relative_error(x, y) < 1e-6


# ------------------------------------------------------ arrangements on registers

def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_device(f, *x):
    """Rotations of registers exist inside programs only."""
    return jax.tree.map(np.asarray, jax.jit(f)(*x))


@pytest.mark.parametrize("h", [1, 2, 4, 8, 16, 32, 64])
def test_halves_part_and_come_together(h):
    x = numbers(C, 256)
    early, late = tiles.earlier(x, h), tiles.later(x, h)
    assert np.array_equal(early, x[T & h == 0]) and np.array_equal(late, x[T & h != 0])
    assert np.array_equal(tiles.weave(jnp.asarray(early), jnp.asarray(late), h), x)


def test_rows_and_lanes_turn():
    x = numbers(C, C)
    for by in (-9, -1, 0, 3, 8, 64):
        assert np.array_equal(on_device(lambda x, by=by: tiles.roll_lanes(x, by), x), np.roll(x, by, 1))
        wanted = np.roll(x.reshape(16, 8, C), by, 1).reshape(C, C)
        assert np.array_equal(on_device(lambda x, by=by: tiles.roll_rows(x, by), x), wanted)
    y = numbers(C, C, seed=1)
    for h in (1, 2, 4):
        wanted = np.where((T & h != 0)[:, None], x, y)
        assert np.array_equal(on_device(lambda x, y, h=h: tiles.choose_rows(h, x, y), x, y), wanted)
    at = np.random.default_rng(2).integers(0, C, (8, C)).astype(np.int32)
    assert np.array_equal(on_device(tiles.lane_gather, x[:8], at), np.take_along_axis(x[:8], at, 1))


def blocks_of(x):
    """(C, C) with everything outside the 8 x 8 blocks on its diagonal zero."""
    block = np.arange(len(x)) // 8
    return np.where(block[:, None] == block, x, 0)


def test_blocks_in_one_register():
    x = numbers(C, C)
    packed = on_device(tiles.pack_blocks, x)
    for t in range(16):
        assert np.array_equal(packed[:, 8 * t : 8 * t + 8], x[8 * t : 8 * t + 8, 8 * t : 8 * t + 8])
    assert np.array_equal(on_device(lambda x: tiles.unpack_blocks(x, C), packed), blocks_of(x))
    sums = on_device(lambda x: tiles.pack_row_sums([x], lanes.Alone.chosen), numbers(C, 256))
    wanted = numbers(C, 256).astype(np.float64).sum(1).reshape(16, 8).T  # (row, register)
    np.testing.assert_allclose(sums, np.repeat(wanted, 8, 1), atol=1e-4)


def test_blocks_of_two_members_in_one_register():
    x = numbers(64, C)
    packed = on_device(tiles.pack_blocks, x)
    for t, m in itertools.product(range(8), range(2)):
        at = 64 * m + 8 * t
        assert np.array_equal(packed[:, at : at + 8], x[8 * t : 8 * t + 8, at : at + 8])
    assert np.array_equal(on_device(lambda x: tiles.unpack_blocks(x, 64), packed)[:, :64], blocks_of(x[:, :64]))
    sums = on_device(lambda x: tiles.pack_row_sums(lanes.Pair.own(x), lanes.Pair.chosen), x)
    wanted = x.astype(np.float64).reshape(8, 8, 2, 64).sum(3).transpose(1, 2, 0).reshape(8, 16)  # (row, block)
    np.testing.assert_allclose(sums, np.repeat(wanted, 8, 1), atol=1e-4)


@pytest.mark.parametrize("of", [lanes.Alone, lanes.Pair])
def test_product_of_blocks_in_two_halves(of):
    size = C // of.MEMBERS
    x, right = numbers(size, C), numbers(size, 128 if of is lanes.Pair else 256, seed=1)
    members = [blocks_of(y) for y in np.split(x, of.MEMBERS, 1)]
    for parts in ([right, np.zeros_like(right)], [right, 0.5 * right]):
        # Of both parts the left operand has what its lanes say: low parts 64 lanes away would be added for the second.
        exact = functools.partial(tile.dot, precision="highest")
        found = on_device(lambda x, *parts: of.small_blocks_dot(exact, tiles.pack_blocks(x), parts), x, *parts)
        columns = np.split(parts[0] + parts[1], of.MEMBERS, 1)
        wanted = np.concatenate([y @ z for y, z in zip(members, columns, strict=True)], 1)
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_members_of_a_pair_turned_and_as_weights():
    """What a pair holds is (64, 2*64): a product is one for each member, and so is a transpose."""
    x, y = numbers(64, C), numbers(64, C, seed=1)
    each = [np.split(a, 2, 1) for a in (x, y)]
    found = on_device(lambda x, y: tile.dot(x, lanes.Pair.weights(y), "highest"), x, y)
    wanted = np.concatenate([a @ b for a, b in zip(*each, strict=True)], 1)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    turned = np.concatenate([a.T for a in each[0]], 1)
    assert np.array_equal(on_device(lanes.Pair.turned, x), turned)
    for precision in PRECISIONS:  # at one pass by a product, whose operands are rounded anyway
        found = on_device(functools.partial(lanes.turned_operand, lanes.Pair, passes.PASSES[precision]), x)
        exact = jnp.asarray(turned).astype(jnp.bfloat16).astype(jnp.float32) if precision == "default" else turned
        assert np.array_equal(found, exact)


def test_inverse_of_blocks():
    A = blocks_of(np.tril(numbers(C, C), -1))

    def found(A_turned):
        steps = tiles.inverse_of_blocks(tiles.pack_blocks(A_turned))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return tiles.unpack_blocks(end.value, C)

    wanted = np.linalg.inv(np.eye(C) + A.astype(np.float64)).T
    assert relative_error(on_device(found, A.T.copy()), wanted) < 1e-6


@jax.jit
def whole_tree(a):
    found = [tree.first_doubling(a)]
    for h in (2, 4):
        found.append(tree.doubling_in_registers(*found[-1], h))
    for h in (8, 16, 32, 64):
        found.append(tree.doubling(*found[-1], h))
    return found


@pytest.mark.parametrize("gate", ["per channel", "-1000", "bursts"])
def test_the_tree_on_registers(gate):
    """Level by level: P up to the row from the start of its block, U after it to the end."""
    (_, _, _, g, _, _), *_ = one_chunk(C, 128, gate=gate)
    a = np.exp(g)
    for n, (P, U) in enumerate(whole_tree(a)):
        blocks = a.astype(np.float64).reshape(-1, 2 << n, 128)
        np.testing.assert_allclose(P, np.cumprod(blocks, 1).reshape(C, 128), rtol=C * 2.0**-24, atol=2e-38)
        after = np.concatenate([np.cumprod(blocks[:, :0:-1], 1)[:, ::-1], np.ones((len(blocks), 1, 128))], 1)
        np.testing.assert_allclose(U, after.reshape(C, 128), rtol=C * 2.0**-24, atol=2e-38)


# ------------------------------------------------------ packed products
#
# Three passes drop low x low and round low parts to bfloat16: each at most 2^-18 of |a| |b|, sums in float32 as much
# again. One pass would be off by 2^-9.

THREE_PASSES = 2.0**-16


def assert_three_passes(found, a, b):
    bound = THREE_PASSES * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
    assert np.all(np.abs(found - a.astype(np.float64) @ b.astype(np.float64)) <= bound + 1e-30)


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_three_passes(rows):
    a, b = numbers(rows, C), numbers(C, 256, seed=1)
    split = passes.PASSES["high"]
    assert_three_passes(on_device(split.dot, a, b), a, b)
    turned = on_device(lambda a, b: split.dot(split.split(a), split.split(b), transpose_b=True), a, b.T.copy())
    assert_three_passes(turned, a, b)


def twice(parts, h):
    return tuple(tiles.weave(x, x, h) for x in parts)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("h", [8, 16, 32, 64])
def test_packed_product_of_a_level(h, precision):
    """Blocks (h, h) of a (C/2, C) matrix, in the columns of earlier halves, times rows that stand in both halves."""
    chosen = passes.PASSES[precision]
    x, y = numbers(C // 2, C), numbers(C // 2, 128, seed=1)
    row, column = np.arange(C // 2)[:, None] // h, T[None] // h
    early, late = on_device(lambda: tiles.halves_of_block(C, h))
    assert np.array_equal(early, column == 2 * row) and np.array_equal(late, column == 2 * row + 1)
    left = np.where(early, x, 0)  # its columns of earlier halves meet the rows of y
    wanted = left[:, T & h == 0]

    packed = on_device(lambda x, y: chosen.packed_dot(chosen.pack(x, early, late, h), twice(chosen.split(y), h)), x, y)
    whole = on_device(lambda x, y: chosen.packed_dot(chosen.pack_whole(x, h), twice(chosen.split(y), h)), left, y)
    pack_parts = lambda x: chosen.pack_parts(chosen.split(x), early, late, h)  # noqa: E731
    from_parts = on_device(lambda x, y: chosen.packed_dot(pack_parts(x), twice(chosen.split(y), h)), x, y)
    for found in (packed, whole, from_parts):
        if precision == "high":
            assert_three_passes(found, wanted, y)
        else:
            assert relative_error(found, wanted.astype(np.float64) @ y) < BAR[precision]


# ------------------------------------------------------ the compiler of the chip

try:
    v5e.compile(lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), jnp.float32), count=False)
    unavailable = None
except v5e.Unavailable as reason:
    unavailable = str(reason)
on_v5e = pytest.mark.skipif(unavailable is not None, reason=str(unavailable))


def gradients(**options):
    def loss(*inputs):
        o, state = gk.gdn2(*inputs, stage="mxu", interpret=False, **options)
        return jnp.square(o.astype(jnp.float32)).sum() + jnp.square(state).sum()

    return jax.grad(loss, argnums=range(6))


def lowered(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()


def test_fast_kernels_are_lowered_under_transformations():
    """vmap, checkpoint, and shard_map with JAX's own check of what varies over the mesh; no TPU is asked."""
    tokens = [jax.ShapeDtypeStruct((2, 130, 1, D), jnp.float32) for D in (128, 128, 64, 128, 128, 64)]
    batch = PartitionSpec("batch")
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    sharded = jax.shard_map(gradients(), mesh=mesh, in_specs=batch, out_specs=batch)
    over_rows = jax.vmap(lambda *x: gradients()(*[a[None] for a in x]))
    for f in (sharded, over_rows, jax.checkpoint(gradients())):
        assert lowered(f, *tokens).count("tpu_custom_call") >= 2


@on_v5e
def test_compiles_at_the_widest():
    """256 channels both, one head more than a grid step takes, under x64."""
    tokens = jax.ShapeDtypeStruct((1, 130, 3, 256), jnp.float32)
    with x64():
        assert v5e.compile(gradients(), *[tokens] * 6, count=False).total_bytes > 0


@on_v5e
@pytest.mark.parametrize("H, members", [(7, 1), (1, 2)])
def test_between_the_launches_lies_what_is_kept_and_nothing_else(H, members):
    """No copy of an array is made on the way in or out: what the program holds in between are the residuals."""
    B, N, K, size = 1, 8 * members, 128, C // members
    options = launch.Options(launch.Dims(B, H, N, size, K, K, members), "default", False)

    def both(q, k, v, g, b, w, scale, state, do, d_state):
        (o, final), kept = stage.forward(q, k, v, g, b, w, scale, state, options)
        return o, final, stage.backward((q, k, v, g, b, w, scale), kept, do, d_state, options)

    tokens = jax.ShapeDtypeStruct((B, N * size, H * K), jnp.bfloat16)
    scale, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1), (B, H, K, K // members)))
    report = v5e.compile(both, *[tokens] * 6, scale, state, tokens, state, count=False)
    kept = B * N * H * 2 * (2 * members * size**2 + K * size + K * K // members)
    assert report.temporary_bytes < 1.1 * kept  # in HBM; less, where the compiler has them wait in VMEM
