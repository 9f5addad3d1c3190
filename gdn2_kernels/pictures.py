"""What moves where: a picture of a stage, drawn from its traced program, so that it
shows what the code does. Needs matplotlib, which the kernels themselves do not.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax

from gdn2_kernels.stages import STAGES
from gdn2_kernels.v5e import launches, vmem
from gdn2_kernels.v5e.programs import program

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = ("matrix", "vector", "exp", "cross-lane")
# What only moves or makes numbers: loads, stores, layout, constants, casts.
_NO_WORK = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "get", "iota",
    "platform_index", "program_id", "reshape", "slice", "squeeze", "stack", "swap",
}  # fmt: skip
_ACROSS = {"gather", "transpose"}
_TRANSCENDENTAL = {"exp", "exp2", "log", "log1p", "logistic", "rsqrt", "tanh"}


class Launch(NamedTuple):
    """Bytes of one launch of a stage, forward or backward."""

    name: str
    own: tuple[int, int]  # in, out of HBM: inputs, outputs, gradients of the layer
    handed: tuple[int, int]  # in, out of HBM: made by one launch for a later one
    vmem: int  # blocks, those on their way included, and scratch
    units: dict[str, int]  # operands and results of the operations of each unit

    @property
    def hbm(self) -> int:
        return sum(self.own) + sum(self.handed)


class Kept(NamedTuple):
    """Arrays of one shape that wait in HBM for the backward pass."""

    count: int
    shape: tuple[int, ...]
    bytes: int  # of all of them


def _size(array) -> int:
    return array.size * array.dtype.itemsize


def _unit(equation) -> str | None:
    """The unit that an operation of a kernel is work for; None: no work."""
    name, params = equation.primitive.name, equation.params
    if name in _NO_WORK:
        return None
    if name == "dot_general":
        return "matrix"
    if name in _TRANSCENDENTAL:
        return "exp"
    across = name in _ACROSS
    if name.startswith("reduce_") or name == "roll":
        # Lanes are the last axis; along the others the vector unit adds and shifts.
        axes = (*params.get("axes", ()), params.get("axis"))
        across = equation.invars[0].aval.ndim - 1 in axes
    return "cross-lane" if across else "vector"


def _inner(value) -> list:
    """The programs inside a parameter of an equation."""
    values = value if isinstance(value, (tuple, list)) else [value]
    programs = [getattr(x, "jaxpr", x) for x in values]
    return [x for x in programs if hasattr(x, "eqns")]


def _work(jaxpr) -> dict[str, int]:
    """Bytes for each unit of one run of a kernel. Kernels for a chip are unrolled: no
    loops. A condition counts as its larger branch.
    """
    total = dict.fromkeys(UNITS, 0)
    for equation in jaxpr.eqns:
        inside = [_work(x) for value in equation.params.values() for x in _inner(value)]
        if inside:
            more = max(inside, key=lambda work: sum(work.values()))
        else:
            values = [x.aval for x in (*equation.invars, *equation.outvars)]
            arrays = [x for x in values if hasattr(x, "size")]
            more = {_unit(equation): sum(map(_size, arrays))}
        for unit, count in more.items():
            if unit:
                total[unit] += count
    return total


def traffic(stage: str, B=4, L=2048, H=6, D=128, **options) -> list[Launch]:
    """The launches of a stage of kernels, forward and all gradients, as traced.

    Arguments:
      stage: a name in `gdn2_kernels.STAGES`.
      B, L, H, D: batch, tokens, heads, channels; K = V = D.
      options: of `v5e.programs.program`, for instance dtype="bfloat16".
    Returns:
      One `Launch` each, in order; none for a stage in plain JAX.
    Raises:
      ValueError: an unknown stage, a size that is not a whole number above zero.
    """
    _check(stage, B=B, L=L, H=H, D=D)
    return list(_traffic(stage=stage, B=B, L=L, H=H, D=D, **options))


@functools.lru_cache(maxsize=8)  # tracing a kernel takes seconds
def _traffic(**options) -> tuple[Launch, ...]:
    fn, args = program(**options)
    calls = launches(fn, *args)
    found = []
    for number, call in enumerate(calls):
        made = {x for earlier in calls[:number] for x in earlier.outvars}
        asked = {x for later in calls[number + 1 :] for x in later.invars}
        own_in, handed_in = _split(call.invars, made)
        own_out, handed_out = _split(call.outvars, asked)
        kernel = call.params["jaxpr"]
        steps = math.prod(call.params["grid_mapping"].grid)
        # gdn2_forward_C64_K128.. at file:line. JAX 0.7 has no other place for the name.
        name = kernel.debug_info.func_src_info.split()[0].split("_C")[0]
        found.append(
            Launch(
                name.removeprefix("gdn2_").replace("_", " "),
                (own_in, own_out),
                (handed_in, handed_out),
                sum(count for _, _, count in vmem(call)),
                {unit: steps * count for unit, count in _work(kernel).items()},
            )
        )
    return tuple(found)


def _split(arrays, by_another) -> tuple[int, int]:
    """Bytes of the arrays, those of another launch apart."""
    handed = sum(_size(x.aval) for x in arrays if x in by_another)
    return sum(_size(x.aval) for x in arrays) - handed, handed


def kept(stage: str, B=4, L=2048, H=6, D=128, **options) -> list[Kept]:
    """What a stage keeps from its forward pass for its backward pass, the inputs among
    it, the largest first. Arguments and errors as of `traffic`. Axes of size 1 do not
    count, and what is no hundredth of the whole is left out.
    """
    _check(stage, B=B, L=L, H=H, D=D)
    fn, args = program(
        stage=stage, direction="forward", B=B, L=L, H=H, D=D, axes=4, **options
    )
    # The function that vjp returns is a pytree of what it needs.
    jaxpr = jax.make_jaxpr(lambda *x: jax.vjp(fn, *x)[1])(*args).jaxpr
    shapes = {}
    for x in dict.fromkeys(x for x in jaxpr.outvars if x.aval.size > 1):
        shape = tuple(n for n in x.aval.shape if n > 1)
        shapes.setdefault(shape, []).append(_size(x.aval))
    groups = [Kept(len(sizes), shape, sum(sizes)) for shape, sizes in shapes.items()]
    total = sum(x.bytes for x in groups)
    return sorted((x for x in groups if x.bytes >= total / 100), key=lambda x: -x.bytes)


def moves(stage: str, B=4, L=2048, H=6, D=128, *, names=(), **options) -> Figure:
    """Draw what a stage moves, forward and backward.

    A stage of kernels: a row for each launch, with the bytes that it reads from HBM and
    writes there, what it holds in VMEM, and what its operations hand to each unit. A
    stage in plain JAX, where the compiler decides that: the arrays that wait in HBM for
    the backward pass. Arguments and errors as of `traffic`, and

      names: of a stage in plain JAX, what to call each row of `kept`. A trace knows
        shapes only.
    """
    found = traffic(stage, B, L, H, D, **options)
    rows = [] if found else kept(stage, B, L, H, D, **options)
    if names and len(names) != len(rows):
        raise ValueError(f"names: expected {len(rows)} for {stage}, got {len(names)}")
    shape = {"B": B, "L": L, "H": H, "D": D, **options}
    title = f"{stage}: " + ", ".join(f"{name}={x}" for name, x in shape.items())
    if found:
        return _draw_launches(found, title)
    return _draw_kept(rows, names or [""] * len(rows), B * L * H, title)


def _check(stage, **sizes):
    if stage not in STAGES:
        raise ValueError(f"stage: expected one of {', '.join(STAGES)}, got {stage!r}")
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a whole number above 0, got {size!r}")


# ------------------------------------------------------ drawing, in inches

# In words a darker orange than in areas, to be readable on white.
BLUE, ORANGE, ORANGE_WORDS, GREEN = "#0072B2", "#D55E00", "#A64500", "#009E73"
INK, SHADE = "#222222", "#e4e4e4"
WIDTH = 5.9  # narrow: on a phone letters shrink with the picture
ROW = 0.8  # of one launch


def _text(count: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.95 * unit:
            x = count / unit
            return f"{x:.0f} {name}" if x >= 9.95 else f"{x:.1f} {name}"
    return f"{count} B"


def _page(height: float, title: str) -> tuple[Figure, Axes]:
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(WIDTH, height), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axis.axis("off")
    _write(axis, WIDTH / 2, 0.16, title, ha="center", fontsize=11)
    return figure, axis


def _write(axis, x, y, text, **look):
    axis.text(x, y, text, **{"fontsize": 10, "color": INK, "va": "center", **look})


def _box(axis, x, y, width, height, text, colour=SHADE):
    axis.fill([x, x + width, x + width, x], [y, y, y + height, y + height],
              color=colour, lw=0)  # fmt: skip
    _write(axis, x + width / 2, y + height / 2, text, ha="center")


def _arrow(axis, start, end, y, parts, most) -> float:
    """An arrow from x = start to end: its thickness says how many bytes, its colours
    whose. parts: (bytes, colour), .. Returns: the y above which there is room.
    """
    total = sum(count for count, _ in parts)
    full = 0.12 * total / most
    tip = 0.1 if end > start else -0.1
    top = y - full / 2
    for count, colour in parts:
        height = full * count / total
        axis.fill([start, end - tip, end - tip, start],
                  [top, top, top + height, top + height],
                  color=colour, lw=0.8)  # fmt: skip
        top += height
    wide = full / 2 + 0.04
    axis.fill([end - tip, end, end - tip], [y - wide, y, y + wide], color=INK, lw=0)
    return y - wide - 0.02


def _between_hbm_and_vmem(axis, start, end, y, own, handed, most):
    parts = [part for part in ((own, BLUE), (handed, ORANGE)) if part[0]]
    above = _arrow(axis, start, end, y, parts, most)
    middle, apart = (start + end) / 2, 0.04
    both = len(parts) == 2
    for (count, colour), ha, x in zip(
        parts, ("right", "left"), (middle - apart, middle + apart)
    ):
        _write(axis, x if both else middle, above, _text(count), va="bottom",
               ha=ha if both else "center",
               color=BLUE if colour == BLUE else ORANGE_WORDS)  # fmt: skip


def _draw_launches(found: list[Launch], title: str) -> Figure:
    top, vmem_at, vmem_wide, units_at, unit_wide = 0.72, 1.72, 1.42, 3.42, 0.62
    high, bottom = ROW - 0.06, top + ROW * len(found)
    figure, axis = _page(bottom + 0.56, title)
    _box(axis, 0, top, 0.45, bottom - top - 0.06, "HBM")
    places = [units_at + unit_wide * n for n in range(len(UNITS))]
    heads = [(vmem_at + vmem_wide / 2, "in VMEM")]
    heads += [(x + unit_wide / 2, unit.replace("-", "-\n"))
              for x, unit in zip(places, UNITS)]  # fmt: skip
    for x, head in heads:
        _write(axis, x, top - 0.06, head, ha="center", va="bottom")

    # Thickness and shades compare launches: with the most that any of them has.
    most = max(own + handed for x in found for own, handed in zip(x.own, x.handed))
    most_work = {unit: max(x.units[unit] for x in found) for unit in UNITS}
    for number, launch in enumerate(found):
        y = top + ROW * number
        _box(axis, vmem_at, y, vmem_wide, high, f"{launch.name}\n{_text(launch.vmem)}")
        left, right = 0.48, vmem_at - 0.03
        for way, ends in enumerate([(left, right), (right, left)]):
            _between_hbm_and_vmem(axis, *ends, y + 0.25 + 0.36 * way, launch.own[way],
                                  launch.handed[way], most)  # fmt: skip
        axis.annotate(
            "", (units_at - 0.01, y + high / 2), (vmem_at + vmem_wide, y + high / 2),
            arrowprops={"arrowstyle": "<|-|>", "color": INK},
        )  # fmt: skip
        for x, (unit, count) in zip(places, launch.units.items()):
            share = count / most_work[unit] if count else 0
            _box(axis, x + 0.02, y, unit_wide - 0.04, high,
                 _text(count) if count else "none",
                 (GREEN, 0.05 + 0.5 * share))  # fmt: skip

    through = _text(sum(x.hbm for x in found))
    handed = _text(sum(x.handed[0] for x in found))
    _write(axis, 0, bottom + 0.1, f"HBM, {through} in all:")
    _write(axis, 1.55, bottom + 0.1, "inputs, outputs, gradients", color=BLUE)
    _write(axis, WIDTH, bottom + 0.1, f"between launches ({handed} read)", ha="right",
           color=ORANGE_WORDS)  # fmt: skip
    units = "Units: operands and results of all operations, as traced"
    _write(axis, 0, bottom + 0.36, units)
    return figure


def _draw_kept(found: list[Kept], names, tokens: int, title: str) -> Figure:
    top, hbm, hbm_wide, side = 0.6, 3.1, 1.25, 0.85
    bottom = top + ROW * len(found)
    figure, axis = _page(bottom + 0.56, title)
    for x, name in ((0, "forward"), (WIDTH - side, "backward")):
        _box(axis, x, top, side, bottom - top - 0.06, f"{name}\npass")
    _write(axis, hbm + hbm_wide / 2, top - 0.06, "HBM", ha="center", va="bottom")
    most = max(x.bytes for x in found)
    for number, (group, name) in enumerate(zip(found, names)):
        y = top + ROW * number
        each = group.bytes / group.count / 4 / tokens
        _box(axis, hbm, y, hbm_wide, ROW - 0.06,
             f"{_text(group.bytes)}\n{group.count} x {each:,.0f}")  # fmt: skip
        parts = [(group.bytes, BLUE)]
        above = _arrow(axis, side + 0.05, hbm - 0.03, y + 0.34, parts, most)
        _arrow(axis, hbm + hbm_wide + 0.03, WIDTH - side - 0.03, y + 0.34, parts, most)
        _write(axis, side + 0.05, above, name, va="bottom")
        _write(axis, side + 0.05, y + 0.57, f"{group.count} x {group.shape}")
    total = _text(sum(x.bytes for x in found))
    _write(axis, 0, bottom + 0.1, f"Kept for the backward pass: {total}")
    _write(axis, 0, bottom + 0.36, "Second lines: arrays x numbers per token and head")
    return figure
