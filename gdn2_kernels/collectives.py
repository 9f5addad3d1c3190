"""What a compiled program says to other devices: its collectives, how often each runs,
and the bytes. Read from the text of the compiled program, so it is the compiler's own
answer, after all that it added, merged and removed.
"""

import math
import re
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)
BITS = {"pred": 8, "f8": 8, "bf16": 16} | {
    f"{t}{n}": n for t in "sufc" for n in (4, 8, 16, 32, 64, 128)
}

# Links between v5e chips: one direction of one link, and the latency of a hop. Both
# directions of a ring work at once. Source: How to Scale Your Model (scaling book).
LINK = 4.5e10  # bytes per second
HOP = 1e-6  # seconds


class Collective(NamedTuple):
    """kind: one of `KINDS`. shape: of the result on one device. bytes: of the operand
    or of the result on one device, the larger. devices: that take part in one. times: it
    runs in one call of the program; None where a loop does not tell.
    """

    kind: str
    shape: str
    bytes: int
    devices: int
    times: int | None

    @property
    def microseconds(self) -> float:
        """One run, by the stated figures of the links: in a ring of both directions
        (n-1)/n of the bytes pass each device, twice in an all-reduce, and the last one
        has n/2 hops to go. A permute is one hop on one link. An estimate, not a time.
        """
        if self.kind == "collective-permute":
            return 1e6 * (HOP + self.bytes / LINK)
        n, rounds = self.devices, 2 if self.kind == "all-reduce" else 1
        return 1e6 * rounds * (n // 2 * HOP + (n - 1) / n * self.bytes / (2 * LINK))


def collectives(text: str, devices: int) -> list[Collective]:
    """Those in a compiled program.

    Arguments: text: `jax.jit(f).lower(..).compile().as_text()`. devices: it runs on.
    """
    computations, entry = _computations(text)
    times = _times(computations, entry)
    fused = set(re.findall(r"calls=%?([\w.\-]+)", text))
    found = {}
    for name, lines in computations.items():
        for number_of_line, line in enumerate(lines):
            match = re.match(
                r"(\([^()]*\)|\S+) (" + "|".join(KINDS) + r")(-start)?\(", line
            )
            if not match or name not in times:
                continue
            shape, kind, start = match.groups()
            sizes = [(_bytes(x), x) for x in re.findall(r"\w+\[[\d,]*\]", shape)]
            if start and kind not in ("all-reduce", "collective-permute"):
                sizes = sizes[-1:]  # (operand, result)
            elif start and kind == "collective-permute":
                sizes = sizes[:1]  # (operand, result, and two words)
            number = sum(x for x, _ in sizes)
            n = _group(line, devices)
            if kind == "reduce-scatter":
                number *= n
            one = Collective(
                kind, " ".join(x for _, x in sizes), number, n, times[name]
            )
            # The TPU compiler may split one collective into parts, each fused with other
            # work; all carry its channel, which elsewhere need not be its own.
            channel = re.search(r"channel_id=(\d+)", line)
            part = name in fused and channel
            found.setdefault(channel.group() if part else (name, number_of_line), one)
    return list(found.values())


def summary(found: list[Collective]) -> dict:
    """kind -> how many, each counted as often as it runs; and "bytes", "microseconds"
    of all together, one after another.
    """
    total = {"bytes": 0, "microseconds": 0.0}
    for one in found:
        times = one.times or 1
        total[one.kind] = total.get(one.kind, 0) + times
        total["bytes"] += times * one.bytes
        total["microseconds"] += times * one.microseconds
    return total


def _bytes(shape):
    dtype, sizes = re.match(r"(\w+)\[([\d,]*)\]", shape).groups()
    bits = BITS.get(dtype) or BITS[dtype[:2]]
    return math.prod(int(n) for n in sizes.split(",") if n) * bits // 8


def _group(line, devices):
    """How many devices talk to each other."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return listed.group(1).count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(counted.group(1)) if counted else devices


def _computations(text):
    """name -> its instructions, what stands right of "=", and the name of the entry."""
    found, entry, lines = {}, None, []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            lines = found.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif " = " in line and line.startswith(" "):
            lines.append(line.split(" = ", 1)[1])
    return found, entry


def _times(computations, entry):
    """How often each computation runs, along the calls from the entry."""
    times, waiting = {}, [(entry, 1)]
    while waiting:
        name, n = waiting.pop()
        if name in times and (
            times[name] is None or (n is not None and times[name] >= n)
        ):
            continue
        times[name] = n
        for line in computations.get(name, ()):
            trips = 1
            if re.search(r"\bwhile\(", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                trips = int(known.group(1)) if known else _trips_of(line, computations)
            inner = None if n is None or trips is None else n * trips
            for word in re.findall(
                r"(?:body|calls|to_apply|branch_computations)=\{?([^,}]+(?:, ?%[^,}]+)*)",
                line,
            ):
                waiting += [(called.strip(" %"), inner) for called in word.split(",")]
    return times


def _trips_of(line, computations):
    """Trips of a loop that counts up from zero to a constant in its condition."""
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = computations.get(condition.group(1), ()) if condition else ()
    constants = [
        int(x)
        for one in lines
        for x in re.findall(r"^s32\[\]\S* constant\((\d+)\)", one)
    ]
    return constants[0] if len(constants) == 1 else None
