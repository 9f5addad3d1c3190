"""The compiled program around the kernels: which runs how often."""

import dataclasses
import math
import re

BITS = {"pred": 8, "bf16": 16}  # others end in theirs: s4, f32, f8e4m3
COLLECTIVES = (
    "all-gather all-reduce reduce-scatter collective-permute all-to-all "
    "collective-broadcast ragged-all-to-all"
).split()
# Of these nothing is left to do at run time.
FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id "
    "replica-id".split()
)

COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{\s*")
NESTED = r"\((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*\)"
LINE = re.compile(rf"\s+(?:ROOT )?%(\S+) = ({NESTED}|\S+) ([\w\-]+)\((.*)")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes, as they stand

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def attribute(self, name) -> str | None:
        """The computation that an attribute names."""
        match = re.search(rf"{name}=%([\w.\-<>]+)", self.rest)
        return match and match[1]

    @property
    def called(self) -> list[str]:
        """Computations that it runs, save the condition of a loop."""
        names = re.findall(
            r"(?:body|calls|to_apply|(?:true|false)_computation)=%([\w.\-<>]+)", self.rest
        )
        branches = re.search(r"branch_computations=\{(.*?)\}", self.rest)
        return names + re.findall(r"%([\w.\-]+)", branches[1] if branches else "")

    @property
    def is_kernel(self) -> bool:
        return '"tpu_custom_call"' in self.rest


def parse(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Returns: computations by name, and the name of the entry."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        if head := COMPUTATION.fullmatch(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := LINE.fullmatch(line)):
            current.append(Operation(*match.groups()))
    return computations, entry


def size(shape: str, hbm_only: bool = True) -> int:
    """Bytes of all arrays in a shape. hbm_only: without those in other memories."""
    total = 0
    for kind, sizes, layout in ARRAY.findall(shape):
        if hbm_only and re.search(r"S\([1-9]\)", layout):
            continue
        count = math.prod(int(x) for x in sizes.split(",") if x)
        total += _bits(kind) * count // 8
    return total


def _bits(kind: str) -> int:
    """Of one number; none for what is no array, a token for instance."""
    number = re.match(r"[sufc](\d+)", kind)
    return BITS.get(kind) or (int(number[1]) if number else 0)


def trips(loop: Operation, computations) -> int | None:
    """Steps of a while loop, None where its text does not say."""
    known = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.rest)
    if known:
        return int(known[1])
    condition = computations.get(loop.attribute("condition"), ())
    constants = {}
    for one in condition:
        number = re.match(r"(-?\d+)\)", one.rest)
        if one.opcode == "constant" and number:
            constants[one.name] = int(number[1])
    for one in condition:
        if one.opcode == "compare":
            for name in filter(constants.get, one.operands):
                return constants[name] + ("direction=LE" in one.rest)
    if len(constants) == 1:  # compared inside a fusion
        return next(iter(constants.values()))
    return None


def canonical(one: Operation, computation, computations) -> tuple:
    """Equal for operations that do the same to arrays of the same shapes."""
    shapes = {x.name: x.shape for x in computation}
    body = []
    if called := one.attribute("calls"):
        numbers = {}

        def numbered(match):
            return f"%{numbers.setdefault(match[1], len(numbers))}"

        for x in computations.get(called, ()):
            line = f"%{x.name} {x.shape} {x.opcode} {x.rest}"
            line = re.sub(r", (metadata|backend_config|sharding)=.*", "", line)
            body.append(re.sub(r"%([\w.\-]+)", numbered, line))
    operands = tuple(shapes.get(x, "?") for x in one.operands)
    return one.opcode, one.shape, operands, tuple(body)
