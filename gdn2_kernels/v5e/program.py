"""Cycles of a compiled program: its kernels, each walked once, times how often they run.

Every scheduled operation of the program has a listing of its own, a Pallas kernel as
well as a fusion that XLA made. A kernel takes as long as its walk, or as its bytes take
on the way to and from HBM, whichever is longer.
"""

import collections
import dataclasses
import pathlib
import re

from gdn2_kernels.v5e import hlo, machine
from gdn2_kernels.v5e.parse import listing
from gdn2_kernels.v5e.walk import Walk, walk

BUNDLES = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt")
UTILIZATION = re.compile(r"\d+-(.*)-\d+-final_hlo-static-per-bundle-utilization\.txt")
SCOPED_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass
class Launch:
    """One operation of the program, all of its calls alike. Numbers are of one call."""

    name: str
    kind: str  # "pallas", or what XLA calls it
    calls: float  # more than one in loops, a fraction where only a branch runs it
    cycles: int
    walk: Walk
    vmem_bytes: int
    source: str  # "bundles", "same as NAME", "compiler's estimate" or "bytes"


@dataclasses.dataclass
class Program:
    launches: list[Launch]
    overhead_cycles: float  # of loops around launches
    hidden_bytes: float  # copies between HBM and VMEM beside the launches
    unknown: dict


def analyse(text: str, dumps: pathlib.Path) -> Program:
    """text: the compiled program, HLO. dumps: the folder that holds its listings."""
    computations, entry = hlo.parse(text)
    return _Analysis(computations, dumps).program(entry)


class _Analysis:
    def __init__(self, computations, dumps):
        self.computations = computations
        self.bundles, self.utilization = {}, {}
        for path in sorted(dumps.iterdir()):
            for pattern, found in (
                (BUNDLES, self.bundles),
                (UTILIZATION, self.utilization),
            ):
                if match := pattern.fullmatch(path.name):
                    found[match[1]] = path
        self.walks = {}
        self.alike = {}
        for computation in computations.values():
            for one in computation:
                if one.name in self.bundles:
                    key = hlo.canonical(one, computation, computations)
                    self.alike.setdefault(key, one.name)
        self.launches, self.unknown = {}, collections.Counter()
        self.overhead = self.hidden = 0

    def program(self, entry):
        self.run(entry, 1)
        for launch in self.launches.values():
            for what, count in launch.walk.unknown.items():
                self.unknown[what] += round(count * launch.calls)
        launches = sorted(self.launches.values(), key=lambda x: -x.calls * x.cycles)
        return Program(
            launches,
            self.overhead,
            self.hidden,
            dict(self.unknown),
        )

    def run(self, name, times):
        for one in self.computations.get(name, ()):
            self.operation(one, self.computations[name], times)

    def operation(self, one, computation, times):
        if one.opcode in hlo.FREE or one.opcode.endswith("-done"):
            return
        if one.opcode.removesuffix("-start") in hlo.COLLECTIVES:
            return  # collectives.py, and their time is not in the cycles
        if one.opcode == "while":
            trips = hlo.trips(one, self.computations)
            if trips is None:
                self.unknown["loop between kernels, taken once"] += 1
            steps = times * (1 if trips is None else trips)
            self.run(one.attribute("body"), steps)
            self.overhead += steps * machine.LOOP_OVERHEAD
        elif one.opcode == "call":
            self.run(one.attribute("to_apply"), times)
        elif one.opcode == "conditional":
            names = one.called
            for name in names:
                self.run(name, times / len(names))
            self.unknown["conditional, each branch taken as often"] += 1
        elif one.opcode.endswith("-start"):
            arrays = [x[0] for x in hlo.ARRAY.finditer(one.shape)]
            self.hidden += times * max(
                (hlo.size(x, False) for x in arrays[:2]), default=0
            )
        elif (
            one.opcode == "custom-call"
            and not one.is_kernel
            and one.name not in self.bundles
        ):
            pass  # AllocateBuffer and the like
        else:
            if one.name not in self.launches:
                self.launches[one.name] = self.launch(one, computation)
            self.launches[one.name].calls += times

    def launch(self, one, computation):
        found, source = self.walked(one, computation)
        vmem = SCOPED_VMEM.search(one.rest)
        transfer = found.hbm_bytes / machine.HBM_BYTES_PER_CYCLE
        return Launch(
            name=one.name,
            kind="pallas" if one.is_kernel else one.opcode,
            calls=0,
            cycles=round(max(found.cycles, transfer)),
            walk=found,
            vmem_bytes=int(vmem[1]) if vmem else 0,
            source=source,
        )

    def walked(self, one, computation):
        name, source = one.name, "bundles"
        if name not in self.bundles:
            key = hlo.canonical(one, computation, self.computations)
            name = self.alike.get(key)
            source = f"same as {name}"
        if name:
            if name not in self.walks:
                texts = (self.bundles[name], self.utilization[name])
                self.walks[name] = walk(
                    listing(*(x.read_text(errors="replace") for x in texts))
                )
            return self.walks[name], source
        shapes = {x.name: x.shape for x in computation}
        moved = hlo.size(one.shape) + sum(
            hlo.size(shapes.get(x, "")) for x in one.operands
        )
        estimate = ESTIMATE.search(one.rest)
        if estimate:
            return Walk(cycles=int(estimate[1]), hbm_bytes=moved), "compiler's estimate"
        self.unknown[f"no listing of a {one.opcode}, its bytes counted"] += 1
        return Walk(hbm_bytes=moved), "bytes"
