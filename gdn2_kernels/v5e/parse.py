"""The compiler's dump of one kernel, text, as instructions in bundles.

A line is a bundle: up to a dozen instructions issued in one cycle.

    0xa   : > { %28 = sbr.rel (!%p26_p0) target = $region35  ;;  %s40_s15 = sshll.u32 .. }

Names end in the physical register: %s40_s15 is register s15. So the walk needs no
allocation and `sphi`, which joins names of one register, does nothing.
"""

import collections
import dataclasses
import re
from typing import NamedTuple

from gdn2_kernels.v5e.machine import COLUMNS, SLOTS


class Register(NamedTuple):
    name: str
    negated: bool = False


class Pointer(NamedTuple):
    """An address: distance from the start of an allocation or operand."""

    base: str
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    target: str | None  # scalar or predicate register that it writes
    predicate: Register | None  # does nothing where this is false
    operands: tuple  # Register, int, Pointer, or None for what is not understood
    named: dict  # operands with names
    text: str


@dataclasses.dataclass
class Listing:
    """One kernel. Bundles are numbered from 0."""

    bundles: list[tuple[Instruction, ...]]
    slots: list[dict]  # issued in each bundle, by the words of machine.SLOTS
    branches: dict  # bundle -> (predicate or None, bundle it goes to)
    starts: frozenset  # bundles that carry a label: loops and regions
    unknown: collections.Counter  # what was not understood


BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +([A-Z]{2})? *: *(>*) *\{", re.M)
KEY_END = "= control target key end"
REGION = re.compile(r"(?:Start region|Start/End empty region) (\d+)")
MARK = re.compile(r"@(\d+)@")
SPLIT = re.compile(r"(?:%(\S+) = )?([a-z_][\w.\-]*)\s*(.*)", re.S)
PREDICATE = re.compile(r"\((!?%p\w+)(?:, *%\w+)?\)\s*,?\s*")
NOTE = re.compile(r"\[(?:resolvable|thread|sflag|smem_unassigned)[^\]]*\]")
REGISTER = re.compile(r"(!?)%\w+_([sp]\d+)")
ADDRESS = re.compile(
    r"\[?(?:(?:smem|vmem|hbm|sflag):)?\[?#(\w+)(?: \+ \$(0x[0-9a-f]+))?\]*"
)
INDIRECT = re.compile(r"\[smem:(%\w+)(?: \+ \$(0x[0-9a-f]+))?\]")
# libtpu before 0.0.40 writes "target bundleno = 37 (0x25), region = 24"; its numbers of
# bundles are those before the last pass, only the region can be trusted.
GOES_TO = re.compile(r"target = \$region(\d+)|target bundleno.* region = (\d+)")


def signed(value: int) -> int:
    """32 bits as a signed number."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def operand(text: str):
    """Register, int, Pointer, (Register, offset) for [smem:%s1 + $0x4], or None."""
    text = text.strip()
    if match := REGISTER.fullmatch(text):
        return Register(match[2], bool(match[1]))
    if re.fullmatch(r"-?\d+", text):
        return signed(int(text))
    if match := ADDRESS.fullmatch(text):
        return Pointer(match[1], int(match[2] or "0", 16))
    if match := INDIRECT.fullmatch(text):
        register = operand(match[1])
        return register and (register, int(match[2] or "0", 16))
    return {"true": 1, "false": 0}.get(text)


def instruction(text: str) -> Instruction | None:
    """text: one instruction without comments. None if it is not one."""
    match = SPLIT.fullmatch(text)
    if not match:
        return None
    target, opcode, rest = match.groups()
    predicate = PREDICATE.search(rest) if "(" in rest else None
    condition = predicate and operand(predicate[1])
    if opcode[0] == "v":  # of a vector instruction only the name matters
        return Instruction(opcode, None, condition, (), {}, text)
    if predicate:
        rest = f"{rest[: predicate.start()]}, {rest[predicate.end() :]}"
    written = re.search(r"_([sp]\d+)$", target or "")
    positional, named = [], {}
    for part in re.split(r",(?![^\[]*\])", NOTE.sub("", rest)):
        name, equals, value = part.strip().partition("=")
        if equals:
            named[name.strip()] = operand(value)
        else:
            # "[smem:%s1] %s2" of a scalar store has no comma between the two.
            positional += map(operand, filter(None, re.split(r"(?<=\])\s+", name)))
    return Instruction(
        opcode, written and written[1], condition, tuple(positional), named, text
    )


def without_comments(text: str) -> str:
    """Names of operands and starts of regions kept, as `name=` and `@number@`."""
    text = text[max(text.find(KEY_END), 0) :]
    text = re.sub(r"/\*([a-z_]+)=\*/", r"\1=", text)

    def marks(comment):
        return "".join(f" @{number}@" for number in REGION.findall(comment[0]))

    return re.sub(r"/\*.*?\*/", marks, text, flags=re.S)


def listing(text: str, utilization: str) -> Listing:
    """text: a file *-final_bundles.txt; utilization: the file beside it whose rows say
    how many slots each bundle fills.
    """
    text = without_comments(text)
    heads = list(BUNDLE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bundles, regions, unknown = [], {}, collections.Counter()
    for number, (head, end) in enumerate(zip(heads, ends)):
        body = text[head.end() : end]
        for region in MARK.findall(body):
            regions.setdefault(int(region), number)
        body = MARK.sub("", body)
        body = body[: body.rfind("}")] if "}" in body else body
        found = []
        for one in filter(None, (x.strip() for x in body.split(";;"))):
            parsed = instruction(one)
            if parsed:
                found.append(parsed)
            else:
                unknown[f"text {one[:40]!r}"] += 1
        bundles.append(tuple(found))
    branches = {}
    for number, bundle in enumerate(bundles):
        for one in bundle:
            if one.opcode.startswith("sbr"):
                goes_to = GOES_TO.search(one.text)
                to = goes_to and regions.get(int(goes_to[1] or goes_to[2]))
                if to is None:
                    unknown["branch without a target"] += 1
                else:
                    branches[number] = one.predicate, to
    slots = _slots(utilization, len(bundles), unknown)
    labelled = frozenset(n for n, head in enumerate(heads) if head[2])
    return Listing(bundles, slots, branches, labelled, unknown)


def _slots(utilization, count, unknown):
    head, _, body = utilization.partition("== UTILIZATION:")
    columns = [name.strip() for name in head.splitlines()[1].split(",")]
    names = [COLUMNS.get(name) for name in columns]
    for column, name in zip(columns, names):
        if name is None:
            unknown[f"column {column} of the utilization"] += 1
    rows = [row.split() for row in body.splitlines() if re.fullmatch(r"[\d ]+", row)]
    if len(rows) < count:
        unknown["bundles without a row of the utilization"] += count - len(rows)
    table = [dict.fromkeys(SLOTS, 0) for _ in range(count)]
    for row, entry in zip(rows, table):
        for name, value in zip(names, row):
            if name:
                entry[name] += int(value)
    return table
