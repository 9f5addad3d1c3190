"""Pictures for the chapters. Needs matplotlib and ipywidgets, which the kernels
themselves do not.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipywidgets import VBox
    from matplotlib.figure import Figure

# White ground and dark ink in light and dark mode alike: the pictures are drawn that
# way. The slider takes the place of the tab headers, which ipywidgets 7 and 8 call by
# different names.
_STYLE = """<style>
.gk-slider { background: #fff; color: #222; border-radius: 6px; padding: 8px; max-width: 100%; box-sizing: border-box; }
.gk-slider .widget-label { color: #222; }
.gk-slider .widget-slider { max-width: 100%; margin: 0 8px; width: auto; }
.gk-slider .lm-TabBar, .gk-slider .p-TabBar { display: none !important; }
.gk-slider .widget-tab, .gk-slider .widget-tab-contents, .gk-slider .widget-html, .gk-slider .widget-html-content {
  background: #fff; border: 0 !important; padding: 0 !important; margin: 0; width: 100%; overflow: hidden;
  box-sizing: border-box; }
.gk-slider img { display: block; max-width: 100%; height: auto; margin: 0 auto; padding: 0; background: #fff; }
.gk-slider p { margin: 0; padding: 4px 8px; text-align: center; color: #222; line-height: 1.4; }
</style>"""


def _as_image(figure: Figure, alt: str) -> str:
    """An HTML image that needs no file: drawing or pixels, whichever is shorter."""
    candidates = []
    for kind, mime in [("svg", "image/svg+xml"), ("png", "image/png")]:
        buffer = io.BytesIO()
        # No date: the same picture gives the same bytes.
        figure.savefig(buffer, format=kind, dpi=144, facecolor="white", bbox_inches="tight",
                       metadata={"Date": None} if kind == "svg" else None)  # fmt: skip
        candidates.append(f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}")
    width = round(figure.get_figwidth() * 96)
    return f'<img src="{min(candidates, key=len)}" alt="{html.escape(alt, quote=True)}" width="{width}">'


def slider_over(pictures: Sequence[Figure], labels: Sequence[str], description: str) -> VBox:
    """A slider that flips through pictures, with a kernel and without one.

    Every picture is drawn beforehand and the browser itself links slider and picture,
    so the widget also works on a web page. It draws no conclusion for the reader: the
    text around it has to carry the point.

    Arguments:
        pictures: matplotlib figures, one for each position of the slider. They are
          closed.
        labels: what each picture shows, printed under it and read out by screen
          readers.
        description: the name of what the slider changes, in a word or two.

    Returns:
        The widget. As the last value of a cell it is displayed.

    Raises:
        ValueError: no pictures, or not one label for each.
    """
    import ipywidgets as widgets
    import matplotlib.pyplot as plt

    if not pictures or len(pictures) != len(labels):
        raise ValueError(f"slider_over: expected one label for each of one or more pictures, "
                         f"got {len(pictures)} pictures and {len(labels)} labels")  # fmt: skip
    panes = []
    for picture, label in zip(pictures, labels):
        panes.append(widgets.HTML(_as_image(picture, f"{description}: {label}") + f"<p>{html.escape(label)}</p>"))
        plt.close(picture)
    slider = widgets.IntSlider(min=0, max=len(panes) - 1, value=0, description=description, readout=False,
                               layout={"width": "auto"}, style={"description_width": "initial"})  # fmt: skip
    frames = widgets.Tab(children=panes, selected_index=0)
    for index, label in enumerate(labels):
        frames.set_title(index, label)
    widgets.jslink((slider, "value"), (frames, "selected_index"))
    box = widgets.VBox([widgets.HTML(_STYLE), slider, frames])
    box.add_class("gk-slider")
    return box
