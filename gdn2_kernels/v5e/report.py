"""What is known of a compiled program, to print, to keep and to draw."""

import collections
import dataclasses
import json

from gdn2_kernels.v5e import machine
from gdn2_kernels.v5e.collectives import Collective
from gdn2_kernels.v5e.program import Launch, Program
from gdn2_kernels.v5e.walk import Walk


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes are of one chip's HBM, cycles of one chip's core at 1.5 GHz, as counted over
    the compiler's output. Nothing here was measured on a TPU.

    Not in the cycles: the start of a program from the host, 0.15 to 0.3 ms, and what
    passes between chips; `collectives` says what that is.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    flops: float  # as XLA counts them, loop bodies once
    trace_seconds: float
    compile_seconds: float
    jax: str
    libtpu: str
    topology: str = "v5e:1x1"
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    program: Program | None = None  # None with count=False

    @property
    def total_bytes(self) -> int:
        """Arguments, results and temporaries: what has to fit into the 16 GiB of a v5e."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    def _counted(self) -> Program:
        if self.program is None:
            raise ValueError("count: expected a report with cycles, got one with False")
        return self.program

    @property
    def launches(self) -> list[Launch]:
        """Operations of the program, the longest first."""
        return self._counted().launches

    def _sum(self, of):
        return sum(launch.calls * of(launch) for launch in self.launches)

    @property
    def cycles(self) -> int:
        overhead = self._counted().overhead_cycles
        return round(self._sum(lambda x: x.cycles) + overhead)

    @property
    def milliseconds(self) -> float:
        """Compiled cycles at 1.5 GHz."""
        return self.cycles / machine.CLOCK * 1e3

    @property
    def hbm_bytes(self) -> int:
        """Read from and written to HBM by all launches and beside them."""
        return round(self._sum(lambda x: x.walk.hbm_bytes) + self.program.hidden_bytes)

    @property
    def floors(self) -> dict[str, int]:
        """Cycles below which no schedule gets: matrix passes on four busy units, and
        bytes at the full bandwidth of HBM.
        """
        matrix = self._sum(lambda x: x.walk.matmul_cycles) / machine.MATRIX_UNITS
        return {
            "matrix": round(matrix),
            "HBM": round(self.hbm_bytes / machine.HBM_BYTES_PER_CYCLE),
        }

    @property
    def binds(self) -> str:
        """The higher floor: "matrix" or "HBM"."""
        return max(self.floors, key=self.floors.get)

    @property
    def slots(self) -> dict[str, int]:
        """Issued, by unit; fills are among the loads, spills among the stores."""
        total = collections.Counter()
        for launch in self.launches:
            for unit, count in launch.walk.slots.items():
                total[unit] += round(launch.calls * count)
        return dict(total)

    @property
    def occupancy(self) -> dict[str, float]:
        """Part of the slots that is used, by unit; of the matrix units, part of the time
        that they multiply.
        """
        cycles = max(self.cycles, 1)
        filled = {
            unit: count / cycles / machine.SLOTS[unit]
            for unit, count in self.slots.items()
        }
        return {**filled, "matrix": self.floors["matrix"] / cycles}

    @property
    def stalls(self) -> dict[str, int]:
        """Cycles in which nothing is issued, by what is waited for."""
        total = collections.Counter()
        for launch in self.launches:
            for cause, cycles in launch.walk.stalls.items():
                total[cause] += round(launch.calls * cycles)
        return dict(total.most_common())

    @property
    def spills(self) -> tuple[int, int]:
        """Stores and loads of registers that had no room."""
        return self.slots.get("spill", 0), self.slots.get("fill", 0)

    @property
    def vmem_bytes(self) -> int:
        """Of the launch that takes most."""
        return max((launch.vmem_bytes for launch in self.launches), default=0)

    @property
    def kernels(self) -> float:
        """Pallas kernels started."""
        return sum(x.calls for x in self.launches if x.kind == "pallas")

    @property
    def unknown(self) -> dict[str, int]:
        """What was not understood in the compiler's output, and how often it was run.
        Empty where the count is as good as the model.
        """
        return self._counted().unknown

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        fields = json.loads(text)
        if program := fields.pop("program", None):
            launches = [
                Launch(**{**x, "walk": Walk(**x["walk"])})
                for x in program.pop("launches")
            ]
            program = Program(launches, **program)
        talk = [Collective(*x) for x in fields.pop("collectives", ())]
        return cls(**fields, collectives=talk, program=program)

    def plot(self):
        """Returns: a matplotlib figure: where the cycles of each launch go, the floors,
        and how full the slots are.
        """
        from gdn2_kernels.v5e.tables import plot

        return plot(self)

    def __str__(self):
        from gdn2_kernels.v5e.tables import text

        return text(self)
