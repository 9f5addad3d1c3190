"""Run the bundles of one kernel on a model of the core.

Scalar instructions that decide where it goes are computed, so loops take their true
number of trips and copies that a pipeline skips are skipped. Everything else only takes
time: its bundle, and what `pipes` says it waits for. Copies share one channel to HBM.
"""

import collections
import dataclasses

from gdn2_kernels.v5e import machine, pipes, scalar
from gdn2_kernels.v5e.parse import Listing, Register

MOST_BLOCKS = 3_000_000  # then the walk is broken off, and the report says so


@dataclasses.dataclass
class Walk:
    """What one run of a kernel took. Cycles at `machine.CLOCK`."""

    cycles: int = 0
    bundles: int = 0  # issued
    code_bundles: int = 0  # in the program
    stalls: dict = dataclasses.field(default_factory=dict)  # cause -> cycles
    slots: dict = dataclasses.field(default_factory=dict)  # unit -> issued
    matmul_cycles: int = 0  # of all matrix units together
    hbm_bytes: int = 0
    copies: dict = dataclasses.field(default_factory=dict)  # kind -> [number, bytes]
    loops: list = dataclasses.field(default_factory=list)  # [first, last bundle, trips]
    unknown: dict = dataclasses.field(default_factory=dict)  # what -> times


@dataclasses.dataclass
class Block:
    """Bundles that are always executed together: [start, end)."""

    start: int
    end: int
    script: list  # what the scalar core does, in order: (kind, what), see `_compute`
    events: list  # (bundle within the block, effects, predicate or None)
    branch: tuple | None  # (bundle, predicate, target)
    slots: dict
    matmul_cycles: int
    unknown: collections.Counter


def walk(listing: Listing) -> Walk:
    """Run a kernel once."""
    blocks = _blocks(listing)
    at = {block.start: number for number, block in enumerate(blocks)}
    state, visits = scalar.State(), [0] * len(blocks)
    unknown = collections.Counter(listing.unknown)
    stalls, copies = collections.Counter(), collections.defaultdict(lambda: [0, 0])
    channel, flags = 0.0, collections.defaultdict(collections.deque)
    now, units, memory, pending, number, steps = 0, pipes.IDLE, {}, None, 0, 0
    while number < len(blocks):
        steps += 1
        if steps > MOST_BLOCKS:
            unknown["walk broken off"] += 1
            break
        block = blocks[number]
        visits[number] += 1
        executed, moves, taken = _compute(block, state)
        if block.branch:
            if taken is None:
                # Forward: the region is run. Backward: the loop is left.
                unknown["branch that depends on data"] += 1
            bundle, _, target = block.branch
            pending = bundle + machine.BRANCH_DELAY + 1, target, taken
        for opcode, flag, granules in moves:
            if not opcode.startswith("dma.done"):
                continue
            done = _wait(flags[flag], granules)
            if flag is None:
                unknown["wait for a flag that depends on data"] += 1
            if done > now:
                stalls["copy not done"] += done - now
                units = pipes.aged(units, done - now)
                now = done
        key = number, units, executed
        if key not in memory:
            memory[key] = _timed(block, units, executed)
        cycles, units, waits = memory[key]
        now += cycles
        stalls.update(waits)
        for opcode, flag, granules in moves:
            if opcode.startswith("dma.done"):
                continue
            if granules is None:
                unknown["copy whose size depends on data"] += 1
            size = (granules or 0) * machine.GRANULE
            kind = opcode.removeprefix("dma.")
            copies[kind][0] += 1
            copies[kind][1] += size
            duration = size / machine.HBM_BYTES_PER_CYCLE
            start = now
            if _on_hbm(kind):
                start = max(now, channel)
                duration *= 2 if kind == "hbm_to_hbm" else 1
                channel = start + duration
            done = round(start + duration) + machine.HBM_LATENCY
            flags[flag].append([done, granules or 0])
        number += 1
        if pending and block.end >= pending[0]:
            _, target, taken = pending
            pending = None
            if taken:
                number = at[target]
    return _result(listing, blocks, visits, now, stalls, copies, unknown)


def _result(listing, blocks, visits, now, stalls, copies, unknown):
    at = {block.start: number for number, block in enumerate(blocks)}
    slots = dict.fromkeys(machine.SLOTS, 0)
    bundles = matmuls = 0
    for block, times in zip(blocks, visits):
        bundles += times * (block.end - block.start)
        matmuls += times * block.matmul_cycles
        for unit, count in block.slots.items():
            slots[unit] += times * count
        for what, count in block.unknown.items():
            unknown[what] += times * count
    loops = [
        [target, bundle, visits[at[target]]]
        for bundle, (_, target) in sorted(listing.branches.items())
        if target <= bundle
    ]
    return Walk(
        cycles=now,
        bundles=bundles,
        code_bundles=len(listing.bundles),
        stalls=dict(stalls),
        slots=slots,
        matmul_cycles=matmuls,
        hbm_bytes=sum(size for kind, (_, size) in copies.items() if _on_hbm(kind)),
        copies=dict(copies),
        loops=loops,
        unknown={what: count for what, count in unknown.items() if count},
    )


def _on_hbm(kind):
    """Copies named "general" are strided ones between HBM and VMEM."""
    return kind == "general" or ("hbm" in kind and "smem" not in kind)


def _wait(flag, granules):
    """When the copies that a wait is for are done: as many as fill `granules`."""
    done = 0
    needed = granules if isinstance(granules, int) else flag[0][1] if flag else 0
    while flag and needed > 0:
        finished, size = flag.popleft()
        needed -= size
        done = max(done, finished)
    return done


# ------------------------------------------------------ taking a listing apart


def _is_copy(one):
    return one.opcode.startswith("dma.")


def _blocks(listing):
    count = len(listing.bundles)
    cuts = {0, count, *listing.starts}
    for bundle, (_, target) in listing.branches.items():
        cuts |= {target, min(count, bundle + machine.BRANCH_DELAY + 1)}
    for number, bundle in enumerate(listing.bundles):
        if any(map(_is_copy, bundle)):
            cuts |= {number, number + 1}
    cuts = sorted(cuts)
    needed = _needed(listing)
    return [_block(listing, *ends, needed) for ends in zip(cuts[:-1], cuts[1:])]


def _block(listing, start, end, needed):
    script, events, branch = [], [], None
    slots, unknown, matmuls = collections.Counter(), collections.Counter(), 0
    for number in range(start, end):
        slots.update(listing.slots[number])
        computed = []
        for one in listing.bundles[number]:
            matmuls += machine.matmul_cycles(one.opcode)
            effects = machine.effects(one.opcode, one.text)
            if effects:
                events.append((number - start, effects, one.predicate))
                if one.predicate:
                    script.append(("condition", one.predicate))
            if _is_copy(one):
                script.append(("copy", one))
            elif _decides(one, needed):
                computed.append((one, scalar.meaning(one)))
            if one.opcode[0] == "v":
                known = one.opcode.split(".")[0] in machine.VECTOR
            else:
                known = _is_known(one)
            if not known:
                unknown[f"instruction {one.opcode}"] += 1
        if number in listing.branches:
            branch = number, *listing.branches[number]
            script.append(("branch", branch[1]))
        if computed:
            script.append(("compute", computed))
    return Block(start, end, script, events, branch, slots, matmuls, unknown)


def _is_known(one):
    head = one.opcode.split(".")[0]
    if head in machine.OTHER or head in scalar.NOTHING:
        return True
    return scalar.meaning(one) is not None


def _decides(one, needed):
    head = one.opcode.split(".")[0]
    if head == "sst":
        return "memory" in needed
    return one.target in needed and head not in scalar.NOTHING


def _registers(one):
    """What an instruction reads."""
    for operand in (one.predicate, *one.operands, *one.named.values()):
        if isinstance(operand, Register):
            yield operand.name
        elif type(operand) is tuple:
            yield operand[0].name


def _needed(listing):
    """Registers that branches, copies and conditional use of units depend on, whatever
    the way; "memory" for scalar memory.
    """
    instructions = [one for bundle in listing.bundles for one in bundle]
    needed, open_ = set(), set()
    writers = collections.defaultdict(list)
    for one in instructions:
        writers["memory" if one.opcode == "sst" else one.target].append(one)
        if one.opcode.startswith("sbr") or _is_copy(one):
            open_.update(_registers(one))
        elif one.predicate and machine.effects(one.opcode, one.text):
            open_.add(one.predicate.name)
    while open_:
        name = open_.pop()
        needed.add(name)
        for one in writers[name]:
            reads = set(_registers(one))
            if one.opcode.split(".")[0] == "sld":
                reads.add("memory")
            open_ |= reads - needed
    return needed


# ------------------------------------------------------ one visit of a block


def _compute(block, state):
    """The scalar part of a block.

    Returns: for each conditional use of a unit whether it happens; copies and waits as
    (opcode, flag, granules); whether the branch is taken, None if that is not known.
    """
    executed, moves, taken = [], [], None
    for kind, what in block.script:
        if kind == "compute":
            for write in [_write(one, meaning, state) for one, meaning in what]:
                write()
        elif kind == "condition":
            predicate = state[what]
            executed.append(predicate is None or bool(predicate))
        elif kind == "branch":
            taken = 1 if what is None else state[what]
        elif what.predicate is None or state[what.predicate] != 0:
            moves.append(_move(what, state))
    return tuple(executed), moves, taken


def _write(one, meaning, state):
    """The write of a scalar instruction, all of its operands read."""
    predicate = 1 if one.predicate is None else state[one.predicate]
    if one.opcode == "sst":
        address, value = state[one.operands[0]], state[one.operands[-1]]
        return lambda: state.store(address, value, predicate)
    if meaning is None:
        return lambda: state.write(one.target, None, predicate)
    f, operands = meaning
    values = [state[x] for x in operands]
    value = state.load(*values) if f == "load" else f(*values)
    return lambda: state.write(one.target, value, predicate)


def _move(one, state):
    if one.opcode.startswith("dma.done"):
        flag, granules = (*one.operands, None, None)[:2]
    else:
        flag = one.named.get("dst_syncflagno")
        granules = one.named.get("size_in_granules")
    size = state[granules]
    return one.opcode, state[flag], size if isinstance(size, int) else None


def _timed(block, units, executed):
    conditions = iter(executed)
    events = collections.defaultdict(tuple)  # those of a bundle together
    for number, effects, predicate in block.events:
        if predicate is None or next(conditions):
            events[number] += effects
    return pipes.timed(list(events.items()), block.end - block.start, units)
