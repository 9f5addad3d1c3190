"""What a compiled program says to other devices: its collectives, how often each runs,
and the bytes. Read from the text of the compiled program, so it is the compiler's own
answer, after all that it added, merged and removed.
"""

import re
from typing import NamedTuple

from gdn2_kernels.v5e import hlo

# Links between v5e chips: one direction of one link, and the latency of a hop. Both
# directions of a ring work at once. Source: How to Scale Your Model (scaling book).
LINK = 4.5e10  # bytes per second
HOP = 1e-6  # seconds


class Collective(NamedTuple):
    """kind: one of `hlo.COLLECTIVES`. shape: of the result on one device. bytes: of the operand
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
    computations, entry = hlo.parse(text)
    times = _times(computations, entry)
    fused = {x.attribute("calls") for body in computations.values() for x in body}
    found = {}
    for name in filter(computations.get, times):
        for one in computations[name]:
            kind = one.opcode.removesuffix("-start")
            if kind not in hlo.COLLECTIVES:
                continue
            arrays = [x.group() for x in hlo.ARRAY.finditer(one.shape)]
            if one.opcode.endswith("-start") and kind == "collective-permute":
                arrays = arrays[:1]  # (operand, result, and two words)
            elif one.opcode.endswith("-start") and kind != "all-reduce":
                arrays = arrays[-1:]  # (operand, result)
            n = _group(one.rest, devices)
            number = sum(hlo.size(x, hbm_only=False) for x in arrays)
            number *= n if kind == "reduce-scatter" else 1
            shape = " ".join(x.split("{")[0] for x in arrays)
            # The TPU compiler may split one collective into parts, each fused with other
            # work; all carry its channel, which elsewhere need not be its own.
            channel = re.search(r"channel_id=(\d+)", one.rest)
            key = channel[0] if name in fused and channel else (name, one.name)
            found.setdefault(key, Collective(kind, shape, number, n, times[name]))
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


def _group(line, devices):
    """How many devices talk to each other."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return listed.group(1).count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(counted.group(1)) if counted else devices


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
        for one in computations.get(name, ()):
            trips = hlo.trips(one, computations) if one.opcode == "while" else 1
            inner = None if n is None or trips is None else n * trips
            waiting += [(called, inner) for called in one.called]
    return times
