"""The scalar core: what loop counters, predicates and addresses are worth.

Only what decides control flow and copies is computed (`walk` asks for that). A value is
an int of 32 bits, a `Pointer`, or None where it depends on data.
"""

import math
import operator
from typing import Callable

from gdn2_kernels.v5e.parse import Instruction, Pointer, Register, signed

UNSIGNED = 0xFFFFFFFF


def of_numbers(f):
    """None and pointers make the result unknown."""

    def wrapped(*values):
        if all(isinstance(x, int) for x in values):
            return f(*values)
        return None

    return wrapped


def add(x, y):
    if isinstance(x, Pointer) and isinstance(y, int):
        return Pointer(x.base, x.offset + y)
    if isinstance(y, Pointer):
        return add(y, x) if isinstance(x, int) else None
    return signed(x + y) if isinstance(x, int) and isinstance(y, int) else None


def either(x, y):
    return 1 if x == 1 or y == 1 else None if x is None or y is None else 0


def both(x, y):
    return 0 if x == 0 or y == 0 else None if x is None or y is None else 1


def opposite(x):
    return None if x is None else int(not x)


def chosen(predicate, on_true, on_false):
    if predicate is None:
        return on_true if on_true == on_false else None
    return on_true if predicate else on_false


def identity(x):
    return x


def shifted(f):
    return of_numbers(lambda x, by: signed(f(x, by)) if 0 <= by < 32 else 0)


OPERATIONS: dict[str, tuple[int, Callable]] = {
    "sadd": (2, add),
    "scalar_lea": (2, add),
    "ssub": (2, of_numbers(lambda x, y: signed(x - y))),
    "smul": (2, of_numbers(lambda x, y: signed(x * y))),
    "sand": (2, of_numbers(lambda x, y: signed(x & y))),
    "sor": (2, of_numbers(lambda x, y: signed(x | y))),
    "sxor": (2, of_numbers(lambda x, y: signed(x ^ y))),
    "sshll": (2, shifted(lambda x, by: x << by)),
    "sshrl": (2, shifted(lambda x, by: (x & UNSIGNED) >> by)),
    "sshra": (2, of_numbers(lambda x, by: signed(x >> min(31, by & UNSIGNED)))),
    "smin": (2, of_numbers(min)),
    "smax": (2, of_numbers(max)),
    "sdiv": (2, of_numbers(lambda x, y: signed(int(x / y)) if y else None)),
    "srem": (2, of_numbers(lambda x, y: signed(int(math.fmod(x, y))) if y else None)),
    "smov": (1, identity),
    "pmov": (1, identity),
    "pneg": (1, opposite),
    "por": (2, either),
    "pand": (2, both),
    "pnor": (2, lambda x, y: opposite(either(x, y))),
    "pnand": (2, lambda x, y: opposite(both(x, y))),
    "pxor": (2, of_numbers(lambda x, y: int(bool(x) != bool(y)))),
}
COMPARISONS = {name: getattr(operator, name) for name in "eq ne lt le gt ge".split()}
# Names of what stays in its register, and values that are not known here on purpose.
NOTHING = frozenset(["sphi", "pphi", "int_to_ptr"])
OPAQUE = frozenset(
    "reloc scalar_parameter_address inlined_call_operand sc scvt spop".split()
)


def compared(opcode):
    """The function of scmp.lt.s32.totalorder, or None."""
    _, relation, kind, *_ = opcode.split(".") + ["", ""]
    f = COMPARISONS.get(relation)
    if f is None or kind not in ("s32", "u32"):
        return None
    mask = UNSIGNED if kind == "u32" else -1

    def compare(x, y):
        if isinstance(x, Pointer) and isinstance(y, Pointer) and x.base == y.base:
            x, y = x.offset, y.offset
        if isinstance(x, int) and isinstance(y, int):
            return int(f(x & mask, y & mask))
        return None

    return compare


def meaning(one: Instruction) -> tuple[Callable, tuple] | None:
    """Function and operands of a scalar instruction that writes a register; None if it
    is not known here. A load's function is the string "load".
    """
    head = one.opcode.split(".")[0]
    if head in OPAQUE:
        return (lambda: None), ()
    if head == "sld":
        return "load", one.operands[:1]
    if head == "scalar_select":
        names = ("predicate", "on_true", "on_false")
        return chosen, tuple(one.named.get(x) for x in names)
    if head == "scmp":
        f = compared(one.opcode)
        return f and (f, one.operands[:2])
    count, f = OPERATIONS.get(head, (0, None))
    if f is None or len(one.operands) < count:
        return None
    return f, one.operands[:count]


class State:
    """Registers and scalar memory; what was never written is None."""

    def __init__(self):
        self.registers, self.memory = {}, {}

    def __getitem__(self, operand):
        if isinstance(operand, Register):
            value = self.registers.get(operand.name)
            return opposite(value) if operand.negated else value
        if type(operand) is tuple:  # [smem:%s1 + $0x4]
            base = self[operand[0]]
            if isinstance(base, int):
                return Pointer("absolute", base + operand[1])
            return base and Pointer(base.base, base.offset + operand[1])
        return operand

    def load(self, address):
        return self.memory.get(address)

    def store(self, address, value, predicate=1):
        if predicate is None:
            self.memory.pop(address, None)
        elif predicate:
            self.memory[address] = value

    def write(self, register, value, predicate=1):
        if predicate is None:
            if self.registers.get(register) != value:
                self.registers[register] = None
        elif predicate:
            self.registers[register] = value
