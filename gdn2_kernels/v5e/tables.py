"""Reports for the eye: a small table, a picture, ratios."""

import dataclasses

from gdn2_kernels.v5e import machine
from gdn2_kernels.v5e.report import Report

MEGA = 1e6
SHOWN = 8  # launches
ISSUED = "#0072B2"
COLOURS = ("#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000", "#999999")


def text(report: Report) -> str:
    lines = [
        f"TPU v5e by the compiler alone (jax {report.jax}, libtpu {report.libtpu}); "
        "not a measurement",
        *(
            f"{name:10s} {getattr(report, name + '_bytes'):>16,} bytes"
            for name in ("argument", "output", "temporary", "total")
        ),
    ]
    if report.program is None:
        return "\n".join(lines)
    floors = ", ".join(f"{name} {x:,}" for name, x in report.floors.items())
    used = report.occupancy
    units = (
        "matrix",
        "vector",
        "transcendental",
        "cross-lane",
        "load",
        "store",
        "scalar",
    )
    stalls = ", ".join(f"{x} {n / report.cycles:.0%}" for x, n in report.stalls.items())
    lines += [
        f"cycles     {report.cycles:>16,} = {report.milliseconds:.3f} ms at 1.5 GHz",
        f"floors     {floors}: {report.binds} binds, {report.floors[report.binds] / max(report.cycles, 1):.0%}",
        f"HBM        {report.hbm_bytes / MEGA:,.1f} MB moved; VMEM at most "
        f"{report.vmem_bytes / 2**20:.1f} MiB; {report.kernels:g} kernels started",
        "used       "
        + ", ".join(f"{unit} {used[unit]:.0%}" for unit in units if unit in used),
        f"waits      {stalls or 'none'}",
        "spills     {:,} stores, {:,} loads".format(*report.spills),
    ]
    for x in report.collectives:
        lines.append(
            f"{x.kind} {x.shape} over {x.devices} chips, {x.times or 'unknown'} times "
            f"{x.bytes / MEGA:,.1f} MB, about {x.microseconds:,.0f} µs each, not in the cycles"
        )
    lines.append(
        f"{'launch':40s} {'calls':>7s} {'cycles':>12s} {'%':>4s} {'HBM MB':>8s} {'matrix':>7s}"
    )
    for x in report.launches[:SHOWN]:
        cycles = x.calls * x.cycles
        lines.append(
            f"{x.name[:40]:40s} {x.calls:7g} {cycles:12,.0f} {100 * cycles / max(report.cycles, 1):4.0f} "
            f"{x.calls * x.walk.hbm_bytes / MEGA:8.1f} "
            f"{x.walk.matmul_cycles / machine.MATRIX_UNITS / max(x.cycles, 1):7.0%}"
            + (f"  ({x.source})" if x.source != "bundles" else "")
        )
    if len(report.launches) > SHOWN:
        rest = sum(x.calls * x.cycles for x in report.launches[SHOWN:])
        lines.append(f"{len(report.launches) - SHOWN} more {'':34s} {rest:13,.0f}")
    for what, times in report.unknown.items():
        lines.append(f"not understood: {what}, {times:,} times")
    return "\n".join(lines)


def plot(report: Report):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(1.6, 1))
    shown = report.launches[:SHOWN]
    causes = [x for x in report.stalls]
    labels = [x.name if len(x.name) < 24 else x.name[:22] + ".." for x in shown]
    at = range(len(shown))
    scale = machine.CLOCK / 1e6  # cycles per microsecond
    start = [0.0] * len(shown)

    def bars(values, colour, label):
        left.barh(at, values, left=start, color=colour, label=label, height=0.6)
        start[:] = [x + y for x, y in zip(start, values)]

    bars([x.calls * x.walk.bundles / scale for x in shown], ISSUED, "issuing")
    for cause, colour in zip(causes, COLOURS):
        bars(
            [x.calls * x.walk.stalls.get(cause, 0) / scale for x in shown],
            colour,
            cause,
        )
    for n, x in enumerate(shown):
        floor = x.walk.matmul_cycles / machine.MATRIX_UNITS
        hbm = x.walk.hbm_bytes / machine.HBM_BYTES_PER_CYCLE
        for cycles, style, label in (
            (floor, "--", "matrix floor"),
            (hbm, "-", "HBM floor"),
        ):
            left.plot([x.calls * cycles / scale] * 2, [n - 0.42, n + 0.42], style, color="black",
                      label=None if n else label)  # fmt: skip
    left.set_yticks(at, labels, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("compiled microseconds")
    left.set_title(f"{report.milliseconds:.3f} ms: where they go")
    left.legend(fontsize=7)
    units = [x for x in report.occupancy if x in ("matrix", "vector", "transcendental",
             "cross-lane", "load", "store", "scalar")]  # fmt: skip
    right.barh(units, [100 * report.occupancy[x] for x in units], color=ISSUED)
    right.set(xlim=(0, 100), xlabel="used, % of what the unit can", title="Units")
    right.invert_yaxis()
    figure.tight_layout()
    return figure


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Reports side by side; ratios are to the first."""

    names: tuple[str, ...]
    reports: tuple[Report, ...]

    ROWS = ("cycles", "hbm_bytes", "temporary_bytes", "vmem_bytes", "kernels")

    @property
    def ratios(self) -> dict[str, list[float]]:
        """Cycles, bytes and kernels of each, divided by those of the first (nan: by 0)."""
        table = {}
        for row in self.ROWS:
            first, *_ = values = [getattr(x, row) for x in self.reports]
            table[row] = [x / first if first else float("nan") for x in values]
        return table

    def __str__(self):
        head = " " * 16 + "".join(f"{name[:20]:>22s}" for name in self.names)
        lines = [head]
        for row, ratios in self.ratios.items():
            values = [getattr(x, row) for x in self.reports]
            cells = (f"{x:>14,.0f} {f'({r:.3g})':>7s}" for x, r in zip(values, ratios))
            lines.append(f"{row:16s}" + "".join(cells))
        return "\n".join(lines)


def compare(*reports: Report, names=None) -> Comparison:
    """Two reports or more, ratios to the first. names: one for each.

    Raises: ValueError: fewer than two reports, or another number of names.
    """
    if len(reports) < 2:
        raise ValueError(f"reports: expected two or more, got {len(reports)}")
    names = tuple(names or map(str, range(1, len(reports) + 1)))
    if len(names) != len(reports):
        raise ValueError(
            f"names: expected {len(reports)}, one for each, got {len(names)}"
        )
    return Comparison(names, reports)
