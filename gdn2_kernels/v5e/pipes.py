"""Units with queues: when an instruction has to wait for one, and for how long.

Issue is in order. A bundle waits until the results it pops are there and the units it
uses have room; everything else takes its one cycle.
"""

import collections

from gdn2_kernels.v5e.machine import MATMUL, MATMUL_QUEUE, Delay, Pop, Result, Use

CAUSES = {
    "mxu": "matrix unit busy",
    "weightsmxu": "weights not loaded",
    "xlu": "cross-lane unit busy",
}
RESULT_CAUSES = {
    "mxu": "product not back",
    "xlu": "cross-lane result not back",
    "transposexlu": "cross-lane result not back",
    "eup": "transcendental not back",
}
IDLE = ()  # the state of units that nobody waits for


def aged(state, cycles):
    """A state so many cycles later, when they were spent on something else."""
    return tuple(
        (unit, max(0, busy - cycles), tuple(max(0, x - cycles) for x in ready))
        for unit, busy, ready in state
    )


def timed(events, length, state):
    """Issue a block of `length` bundles.

    events: [(number of the bundle, its effects)], in order.
    state: of the units at the start, relative to it: ((unit, busy for, results ready
      in), ..).
    Returns: cycles, state at the end, cycles waited by cause.
    """
    free = {unit: busy for unit, busy, _ in state}
    queues = {unit: collections.deque(ready) for unit, _, ready in state}
    now, issued, waits = 0, 0, collections.Counter()
    for number, effects in events:
        now += number - issued
        issued = number
        until, cause = now, "delay"
        for effect in effects:
            match effect:
                case Pop(unit):
                    ready = queues[unit].popleft() if queues.get(unit) else 0
                    if ready > until:
                        until, cause = ready, RESULT_CAUSES[unit.rstrip("0123")]
                case Use(unit):
                    room = MATMUL_QUEUE if unit.startswith("mxu") else 0
                    if free.get(unit, 0) - room > until:
                        until = free[unit] - room
                        cause = CAUSES[unit.rstrip("0123")]
                case Delay(cycles):
                    until += cycles
        if until > now:
            waits[cause] += until - now
            now = until
        for effect in effects:
            match effect:
                case Use(unit, cycles):
                    free[unit] = max(now, free.get(unit, 0)) + cycles
                case Result(unit, ready):
                    # A product counts from when its last rows enter the unit.
                    enters = now
                    if unit.startswith("mxu"):
                        enters = max(now, free[unit] - MATMUL["float32"])
                    queue = queues.setdefault(unit, collections.deque())
                    queue.extend(enters + x for x in ready)
    now += length - issued
    rest = []
    for unit in sorted({*free, *queues}):
        busy = max(0, free.get(unit, 0) - now)
        ready = tuple(max(0, x - now) for x in queues.get(unit, ()))[-64:]
        if busy or ready:
            rest.append((unit, busy, ready))
    return now, tuple(rest), waits
