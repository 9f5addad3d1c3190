"""The core of a TPU v5e as the compiler sees it: clock, slots, units and how long they
take. Every number of the model that `walk` runs stands here.

Sources. PUBLIC: cloud.google.com/tpu/docs/v5e and jax-ml.github.io/scaling-book/tpus.
COMPILER: libtpu's own machine model, as its dumps state it: slots in the heads of the
utilization files, latencies and occupancies in its critical-path dumps. FITTED: to times
measured by others on real chips, some of those in `book/data/v5e_published.json`.
"""

import dataclasses
import functools
import re

CLOCK = 1.5e9  # Hz. PUBLIC: 197e12 FLOP/s = 2 * 4 * 128 * 128 * CLOCK
HBM_BANDWIDTH = 819e9  # bytes per second. PUBLIC
HBM_BYTES_PER_CYCLE = HBM_BANDWIDTH / CLOCK
PEAK_FLOPS = 197e12  # bfloat16. PUBLIC
GRANULE = 32  # bytes, the unit in which a copy's size is written. COMPILER
BRANCH_DELAY = 4  # bundles after a branch that are still executed. COMPILER
HBM_LATENCY = 1100  # cycles from the start of a copy to its first byte. FITTED
LOOP_OVERHEAD = 30  # cycles per step of a loop between kernels. FITTED
# Seconds that a measured call takes and no bundle shows: the start of a program from the
# host, 0.15 to 0.3 ms. Not in a report's cycles. FITTED
HOST_START = 0.225e-3

MATRIX_UNITS = 4
# What a bundle can issue, by the words that the report uses. COMPILER
SLOTS = {
    "matrix": 4,
    "matrix push": 4,
    "cross-lane": 3,
    "vector": 4,
    "pop": 2,
    "transcendental": 1,
    "load": 3,
    "fill": 3,
    "store": 1,
    "spill": 1,
    "scalar": 2,
}
# The same by the words of the utilization files. Fills are among the loads and spills
# among the stores; libtpu before 0.0.40 has no column VPOP.
COLUMNS = {
    "MXU": "matrix",
    "MATMUL": "matrix",
    "MATPUSH": "matrix push",
    "XLU": "cross-lane",
    "VALU": "vector",
    "VPOP": "pop",
    "EUP": "transcendental",
    "VLOAD": "load",
    "VLOAD:FILL": "fill",
    "VSTORE": "store",
    "VSTORE:SPILL": "spill",
    "SALU": "scalar",
}

# Cycles. COMPILER, but for the two that say otherwise.
MATMUL = {"float32": 8, "bfloat16": 16}  # a unit is busy: 8 rows, 16 rows in pairs
MATMUL_QUEUE = 16  # cycles of work that a matrix unit holds before issue waits. FITTED
MATMUL_LATENCY = 131  # until the first result can be popped
MATMUL_POP = 8  # until the second half of 16 rows can
WEIGHT_SWITCH = 64  # between two switches to other weights, at least. FITTED
PUSH = {"float32": 2, "bfloat16": 4}  # 8 or 16 rows of weights
PUSH_TRANSPOSED = {"float32": 4, "bfloat16": 8}
CROSS_LANE = 8  # a cross-lane unit is busy
CROSS_LANE_16 = 16  # with the transpose of 16 bits
PERMUTE_LATENCY, REDUCE_LATENCY, TRANSPOSE_LATENCY = 114, 115, 116
TRANSCENDENTAL_LATENCY = 7

# ------------------------------------------------------ what an instruction does
# to the units that make others wait


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """Occupies `unit` for `cycles`."""

    unit: str
    cycles: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Puts results into the queue of `unit`, ready after so many cycles each."""

    unit: str
    ready: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pop:
    """Takes a result from the queue of `unit`, waits for it."""

    unit: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delay:
    cycles: int


TRANSCENDENTAL = (
    "vexp2 vpow2 vlog2 vrcp vrsqrt vtanh verf vsin vcos vsigshft vpush".split()
)
PIPED = re.compile(r"v[\w.]*\.(mxu|xlu)(\d)")
PACKED = re.compile(r"\.(bf16|[su]8|packed)\b")


def effects(opcode: str, text: str) -> tuple:
    """What an instruction does to matrix, cross-lane and transcendental units: a tuple
    of `Use`, `Result`, `Pop` and `Delay`. text: the whole instruction.
    """
    piped = PIPED.match(opcode)
    if piped:
        unit = piped[1] + piped[2]
        return (_matrix if piped[1] == "mxu" else _cross_lane)(opcode, unit, text)
    head = opcode.split(".")[0]
    if opcode.startswith("vpop.e"):
        return (Pop("eup"),)
    if head in TRANSCENDENTAL and ".pop" not in opcode:
        return (Result("eup", (TRANSCENDENTAL_LATENCY,)),)
    if head == "vdelay":
        return (Delay(int(re.search(r"vdelay (\d+)", text)[1])),)
    return ()


def _matrix(opcode, unit, text):
    kind = "bfloat16" if PACKED.search(opcode) else "float32"
    if opcode.startswith("vmatmul"):
        ready = (MATMUL_LATENCY, MATMUL_LATENCY + MATMUL_POP)
        rows = ready if kind == "bfloat16" else ready[:1]
        product = (Use(unit, MATMUL[kind]), Result(unit, rows))
        switch = (Use("weights" + unit, WEIGHT_SWITCH),) if "lgmr" in opcode else ()
        return switch + product
    if opcode.startswith("vmatpush"):
        return (Use(unit, (PUSH_TRANSPOSED if ".xpose" in opcode else PUSH)[kind]),)
    return (Pop(unit),) if opcode.startswith("vpop") else ()


def _cross_lane(opcode, unit, text):
    transposed = "transpose" + unit
    if opcode.startswith("vpop.trf"):
        return (Pop(transposed),)
    if opcode.startswith("vpop"):
        return (Pop(unit),)
    if opcode.startswith("vset"):  # the pattern of a permutation
        return (Use(unit, CROSS_LANE),)
    if opcode.startswith("vxpose"):
        pairs = ".b16" in opcode
        use = Use(unit, CROSS_LANE_16 if pairs else CROSS_LANE)
        if not opcode.endswith(".end"):
            return (use,)
        width = re.search(r"width=(\d+)", text)
        rows = -(-int(width[1] if width else 128) // (16 if pairs else 8))
        ready = (TRANSPOSE_LATENCY + CROSS_LANE * n for n in range(rows))
        return use, Result(transposed, tuple(ready))
    latency = REDUCE_LATENCY if ".xlane" in opcode else PERMUTE_LATENCY
    return Use(unit, CROSS_LANE), Result(unit, (latency,))


@functools.cache
def matmul_cycles(opcode: str) -> int:
    """Cycles that a matrix unit spends on a vmatmul; 0 for other instructions."""
    if not opcode.startswith("vmatmul"):
        return 0
    return MATMUL["bfloat16" if PACKED.search(opcode) else "float32"]


# Instructions by the first part of their names that need no more than their slot, or
# that `scalar` and `walk` know about. Others are counted in a report as unknown.
# vllmr moves weights within a matrix unit, taken as free.
VECTOR = frozenset(
    """vabs vadd vand vbcast vceil vclamps-f32 vclz vcmask vcmp vcombine vcvt vdelay vfloor vlaneseq
    vld vllmr vmand vmatmul vmatpush vmax vmin vmmov vmneg vmor vmov vmpackc vmul vmxor vnand vneg
    vnez vnor vor vpack vpcnt vperm vphi vpop vrng vrot vround vsel vset vsetiar vsettm
    vshll vshra vshrl vst vstv vsub vsyncadd vsyncpa vtrace vtrunc vunpack vwait vweird
    vxor vxpose""".split()
) | frozenset(TRANSCENDENTAL)
OTHER = frozenset(
    """compiler-scheduling-barrier dma inlined_call sbr sdivrem set sfence shalt sst
    """.split()
)
