"""The model of the v5e core against counts made by hand: on listings written here, and on kernels small enough to count."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from gdn2_kernels import v5e
from gdn2_kernels.__main__ import main
from gdn2_kernels.v5e import machine, parse, walk
from gdn2_kernels.v5e.programs import program

# ------------------------------------------------------ listings written by hand

HEAD = "= control target key end\n\n"


def run(*bundles):
    """Walk a listing; bundles: their texts, with "@7" at the end where region 7 starts."""
    lines = []
    for n, bundle in enumerate(bundles):
        text, at, region = bundle.partition("@")
        lines.append(f"   {n:#x}   : {{ {text} }} " + (f"/* Start region {region} */" if at else ""))
    slots = "== CAPACTIY:\nMXU, XLU, VALU, EUP, VLOAD, SALU\n 4 3 4 1 3 2\n== UTILIZATION:\n" + "0 0 1 0 0 0\n" * len(bundles)
    return walk.walk(parse.listing(HEAD + "\n".join(lines), slots))


def test_bundles_without_waits_take_a_cycle_each():
    found = run("%v1_v0 = vadd.f32 %v0_v1, %v0_v1", "", "%v2_v2 = vmul.f32 %v1_v0, %v1_v0")
    assert (found.cycles, found.bundles, found.stalls, found.unknown) == (3, 3, {}, {})
    assert found.slots["vector"] == 3


LOOP = [
    "%s1_s0 = smov 0",
    "%s2_s0 = sadd.s32 1, %s1_s0 @7",  # 1: the body
    "%p3_p0 = scmp.ge.s32.totalorder %s2_s0, 10",
    "%9 = sbr.rel (!%p3_p0) target = $region7",
    "", "", "", "",  # four bundles after a branch still belong to the loop
    "%v1_v0 = vadd.f32 %v0_v1, %v0_v1",
]  # fmt: skip


def test_a_loop_takes_its_trips():
    found = run(*LOOP)
    assert found.loops == [[1, 3, 10]]
    assert found.bundles == found.cycles == 1 + 10 * 7 + 1


def test_a_branch_as_older_compilers_write_it():
    """The number is one of bundles before the last pass: what counts is the region."""
    old = [x.replace("target = $region7", "target bundleno = 5 (0x5), region = 7") for x in LOOP]
    assert run(*old).cycles == 72


def test_loops_within_loops():
    found = run(
        "%s1_s0 = smov 0",
        "%s2_s0 = sadd.s32 1, %s1_s0  ;;  %s3_s1 = smov 0 @7",
        "%s4_s1 = sadd.s32 1, %s3_s1 @8",
        "%p5_p0 = scmp.ge.s32.totalorder %s4_s1, 3",
        "%9 = sbr.rel (!%p5_p0) target = $region8",
        "", "", "", "",
        "%p6_p1 = scmp.ge.s32.totalorder %s2_s0, 5",
        "%9 = sbr.rel (!%p6_p1) target = $region7",
        "", "", "", "",
    )  # fmt: skip
    assert found.bundles == 1 + 5 * (1 + 3 * 7 + 6)
    assert [trips for *_, trips in found.loops] == [15, 5]


def test_a_product_comes_back_after_its_latency():
    found = run("%1 = vmatmul.f32.gmra.mxu0 %v0_v0", "%v2_v1 = vpop.f32.mrf.mxu0")
    assert found.cycles == machine.MATMUL_LATENCY + 1
    assert found.stalls == {"product not back": machine.MATMUL_LATENCY - 1}
    assert found.matmul_cycles == machine.MATMUL["float32"]


def test_a_full_matrix_unit_makes_wait():
    """16 cycles each, 16 may wait in the unit: the third is issued at 16, so 16, the fourth at 32."""
    product = "%1 = vmatmul.bf16.gmra.mxu0 %v0_v0"
    found = run(*[product] * 4)
    assert found.cycles == 2 * 16 + 1 and found.stalls == {"matrix unit busy": 33 - 4}
    spread = run(*[f"%1 = vmatmul.bf16.gmra.mxu{n} %v0_v0" for n in range(4)])
    assert spread.cycles == 4 and not spread.stalls


def test_transcendentals_come_back_in_order():
    found = run("%1 = vpow2.f32 %v0_v0", "%2 = vpow2.f32 %v0_v0", "%v2_v1 = vpop.eup %1", "%v2_v1 = vpop.eup %2")
    assert found.cycles == machine.TRANSCENDENTAL_LATENCY + 2


def copy_of(granules, flag="[#allocation3]"):
    return f"%1 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s0, /*size_in_granules=*/{granules}, /*vmem=*/%s2_s1, /*dst_syncflagno=*/{flag}"


def test_copies_share_one_channel():
    size = 100_000
    found = run(copy_of(size), copy_of(size, "[#allocation4]"), f"%2 = dma.done.wait [#allocation4], {size}")
    transfer = 2 * size * machine.GRANULE / machine.HBM_BYTES_PER_CYCLE
    assert found.hbm_bytes == 2 * size * 32
    assert found.cycles == pytest.approx(transfer + machine.HBM_LATENCY, abs=4)
    assert set(found.stalls) == {"copy not done"}


def test_a_copy_whose_predicate_is_false_is_not_made():
    predicated = copy_of(128).replace("[thread:$0]", "[thread:$0]  (%p1_p0),")
    assert run("%p1_p0 = scmp.eq.s32.totalorder 1, 2", predicated).hbm_bytes == 0
    assert run("%p1_p0 = scmp.eq.s32.totalorder 2, 2", predicated).hbm_bytes == 128 * 32


def test_what_is_not_understood_is_counted():
    found = run("%v1_v0 = vfrobnicate.f32 %v0_v1", "%s1_s0 = sfrob.s32 1, 2", "%9 = sbr.rel target = $region99")
    assert found.unknown == {"instruction vfrobnicate.f32": 1, "instruction sfrob.s32": 1, "branch without a target": 1}
    jump = run("%s1_s0 = sld [smem:[#allocation0]]", "%p1_p0 = scmp.eq.s32.totalorder %s1_s0, 2", "%9 = sbr.rel (%p1_p0) target = $region7",
               "", "", "", "", "%v1_v0 = vmov %v0_v1", "@7")  # fmt: skip
    assert jump.unknown == {"branch that depends on data": 1} and jump.bundles == 9  # the region is run


# ------------------------------------------------------ kernels, compiled

try:
    v5e.compile(lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), jnp.float32), count=False)
    unavailable = None
except v5e.Unavailable as reason:
    unavailable = reason
on_v5e = pytest.mark.skipif(unavailable is not None, reason=str(unavailable))

N = 4096  # rows of the copy: 16 MiB
STEPS, INNER, TRIPS = 5, 60, 300


def call(kernel, name, x, grid=(1,), block=None):
    spec = pl.BlockSpec(block, lambda n: (n, 0)) if block else pl.BlockSpec(x.shape, lambda *_: (0, 0))
    options = dict(grid=grid, in_specs=[spec], out_specs=spec)
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name=name, **options)(x)


def copy(x, o):
    o[...] = x[...]


def grow(steps):
    """steps times one multiplication and one addition, each needing the last."""

    def kernel(x, o):
        o[...] = jax.lax.fori_loop(0, steps, lambda _, y: y * 1.5 + x[...], x[...])

    return kernel


def nested(x, o):
    def outer(_, y):
        return jax.lax.fori_loop(0, INNER, lambda _, z: z * 1.5 + x[...], y) + 1

    o[...] = jax.lax.fori_loop(0, STEPS, outer, x[...])


def predicated(x, o):
    o[...] = x[...]

    @pl.when(pl.program_id(0) == 2)
    def _():
        grow(TRIPS)(x, o)


def powers(x, o):
    o[...] = jax.lax.fori_loop(0, TRIPS, lambda _, y: jnp.exp2(y), x[...])


def programs(big, small, wide, tall, a):
    """Six kernels and a product, in one program: one compilation."""
    return (
        call(copy, "copy", big, (16,), (N // 16, 1024)),
        call(grow(TRIPS), "loop", small),
        call(grow(2 * TRIPS), "loop_twice", small),
        call(nested, "nested", small),
        call(predicated, "predicated", tall, (8,), (8, 128)),
        call(powers, "powers", wide),
        jnp.dot(a, a, preferred_element_type=jnp.float32),
    )


SHAPES = [(N, 1024), (8, 128), (16, 1024), (64, 128)]
ARGUMENTS = [*(jax.ShapeDtypeStruct(x, jnp.float32) for x in SHAPES), jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)]


@pytest.fixture(scope="module")
def report():
    return v5e.compile(programs, *ARGUMENTS, cache=False)


KERNELS = ["copy", "loop", "loop_twice", "nested", "predicated", "powers"]  # as `programs` calls them


def launch(report, name):
    kernels = [x for x in report.launches if x.kind == "pallas"]
    found = [x for x in kernels if x.name.split(".")[0] == name]
    if not found:  # older JAX numbers them: flat.6, flat.7, ..
        found = [sorted(kernels, key=lambda x: int(x.name.split(".")[-1]))[KERNELS.index(name)]]
    (one,) = found
    assert one.calls == 1 and one.source == "bundles"
    return one


@on_v5e
def test_everything_was_understood(report):
    known = {x: n for x, n in report.unknown.items() if "no listing" not in x}
    assert not known


@on_v5e
def test_a_copy_is_bound_by_hbm(report):
    found = launch(report, "copy")
    assert found.walk.hbm_bytes == 2 * N * 1024 * 4  # read and written
    floor = found.walk.hbm_bytes / 819e9 * 1.5e9
    # The first block has nothing to hide behind, nor has the last.
    assert floor < found.cycles < floor + 3 * machine.HBM_LATENCY
    assert found.walk.matmul_cycles == 0


@on_v5e
def test_trip_counts(report):
    once, twice = launch(report, "loop"), launch(report, "loop_twice")
    # The compiler may put several steps into one trip.
    ((first, last, trips),) = once.walk.loops
    ((*_, trips_twice),) = twice.walk.loops
    assert trips_twice == 2 * trips and TRIPS % trips == 0
    body = last - first + 1 + machine.BRANCH_DELAY
    assert twice.walk.bundles - once.walk.bundles == trips * body
    # Both operations of a step wait for the last: at least two bundles.
    assert once.walk.slots["vector"] >= 2 * TRIPS


@on_v5e
def test_nested_trip_counts(report):
    trips = sorted(x for *_, x in launch(report, "nested").walk.loops)
    assert STEPS in trips and (STEPS * INNER) % trips[-1] == 0 and trips[-1] > STEPS


@on_v5e
def test_a_predicated_region_is_run_when_it_is_due(report):
    found, alone = launch(report, "predicated"), launch(report, "loop")
    grid = [x for *_, x in found.walk.loops]
    assert alone.walk.loops[0][2] in grid  # once, in step 2 of 8
    assert found.walk.bundles < 8 * alone.walk.bundles / 3
    assert found.walk.hbm_bytes == 2 * 64 * 128 * 4


@on_v5e
def test_transcendentals_take_a_slot_each(report):
    found = launch(report, "powers")
    registers = 16 * 1024 // (8 * 128)
    assert found.walk.slots["transcendental"] == registers * TRIPS
    assert found.cycles > registers * TRIPS
    assert found.walk.matmul_cycles == 0 and found.walk.slots["cross-lane"] == 0


@on_v5e
def test_matrix_floor(report):
    product = max((x for x in report.launches if x.kind != "pallas"), key=lambda x: x.walk.matmul_cycles)
    # By hand: 64 row groups of 16, 8 by 8 weight tiles, 16 cycles, on four units.
    assert product.walk.matmul_cycles == 64 * 8 * 8 * 16
    public = 2 * 1024**3 / machine.PEAK_FLOPS * machine.CLOCK
    assert product.walk.matmul_cycles / machine.MATRIX_UNITS == pytest.approx(public, rel=0.1)
    assert product.cycles > public
    assert report.floors["matrix"] == product.walk.matmul_cycles / 4


@on_v5e
def test_unchanged_programs_give_unchanged_numbers(report):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    alone = v5e.compile(lambda x: call(grow(TRIPS), "loop", x), x, cache=False)
    assert alone.launches[0].walk == launch(report, "loop").walk
    assert v5e.Report.from_json(report.to_json()) == report


@on_v5e
def test_kernels_of_the_package_are_known_by_name():
    """At every version of JAX, or nobody can tell which row of a report, or of a profile, is which kernel."""
    fn, args = program(stage="atomic_ops", direction="forward", B=1, H=1, L=64, D=8)
    names = [x.name for x in v5e.compile(fn, *args).launches if x.kind == "pallas"]
    assert sorted(name[:2] for name in names) == ["A_", "B_", "C_", "D_"]


@on_v5e
def test_reports_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN2_KERNELS_CACHE", str(tmp_path))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def double(x):
        return 2 * x

    first = v5e.compile(double, x, count=False)
    (kept,) = (tmp_path / "v5e").iterdir()
    assert v5e.compile(double, x, count=False) == first
    kept.write_text(kept.read_text().replace('"compile_seconds": ', '"compile_seconds": 1000'))
    assert v5e.compile(double, x, count=False).compile_seconds > 1000  # it was read from there


@on_v5e
def test_report_for_the_eye(report):
    text = str(report)
    for word in ("cycles", "floors", "waits", "spills", "copy", "not a measurement"):
        assert word in text
    compared = v5e.compare(report, report, names=["one", "two"])
    assert compared.ratios["cycles"] == [1.0, 1.0] and "two" in str(compared)
    assert len(report.plot().axes) == 2
    with pytest.raises(ValueError, match="reports: expected two or more, got 1"):
        v5e.compare(report)
    assert sum(x.calls * x.cycles for x in report.launches) == report.cycles


@on_v5e
def test_a_program_over_eight_chips():
    """What each chip adds up alone, and what they then tell each other."""
    chips = NamedSharding(AbstractMesh((8,), ("chip",)), PartitionSpec("chip"))
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=chips)
    report = v5e.compile(lambda x: x.sum(axis=0), x, topology="v5e:2x4", cache=False)
    assert report.argument_bytes == 64 * 1024 * 4 / 8
    (sent,) = report.collectives
    assert (sent.kind, sent.devices, sent.bytes, sent.times) == ("all-reduce", 8, 1024 * 4, 1)
    assert "all-reduce f32[1024] over 8 chips" in str(report)
    assert v5e.Report.from_json(report.to_json()) == report


def test_without_counting():
    report = v5e.Report(0, 0, 0, 0.0, 0.0, 0.0, "", "")
    with pytest.raises(ValueError, match="count"):
        report.cycles


def test_bad_arguments():
    with pytest.raises(ValueError, match="topology: expected one of 'v5e:1x1', .*got 'v5e:3x3'"):
        v5e.compile(lambda x: x, jnp.ones(3), topology="v5e:3x3")


def test_command(tmp_path, capsys):
    assert main(["--help"]) == 0 and "v5e" in capsys.readouterr().out
    assert main(["nonsense"]) == 2
    file = tmp_path / "small.py"
    file.write_text("import jax, jax.numpy as jnp\n\n\ndef double(n=8):\n    return lambda x: x * 2, (jax.ShapeDtypeStruct((n, 128), jnp.float32),)\n")
    assert main(["v5e", f"{file}:nothing"]) == 1
    assert "expected a function" in capsys.readouterr().err
    if unavailable is None:
        answer = tmp_path / "report.json"
        assert main(["v5e", f"{file}:double(n=16)", "--json", str(answer)]) == 0
        assert json.loads(answer.read_text())["argument_bytes"] == 16 * 128 * 4
        assert "cycles" in capsys.readouterr().out
