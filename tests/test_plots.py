"""The slider: what is in it, on the ipywidgets of today and of Colab. That it moves is tested in test_site.py."""

import base64

import pytest

matplotlib = pytest.importorskip("matplotlib")
widgets = pytest.importorskip("ipywidgets")
matplotlib.use("agg")
import matplotlib.pyplot as plt

from gdn2_kernels.plots import slider_over


def figures(count):
    made = []
    for power in range(count):
        figure, axis = plt.subplots(figsize=(3, 2))
        axis.plot([1, 2, 3], [x**power for x in (1, 2, 3)])
        made.append(figure)
    return made


def parts(box):
    """The slider and the panes of the widget."""
    _, slider, frames = box.children
    return slider, frames.children


def test_one_pane_for_each_picture():
    slider, panes = parts(slider_over(figures(3), ["first", "second", "third"], "power"))
    assert (slider.min, slider.value, slider.max, slider.description) == (0, 0, 2, "power")
    assert len({pane.value for pane in panes}) == 3
    assert [label in pane.value for label, pane in zip(["first", "second", "third"], panes)] == [True] * 3


def test_pictures_have_a_text_alternative_and_a_white_ground():
    _, (pane,) = parts(slider_over(figures(1), ['a < b & "c"'], "power"))
    assert 'alt="power: a &lt; b &amp; &quot;c&quot;"' in pane.value
    kind, data = pane.value.split('src="data:')[1].split('"')[0].split(";base64,")
    drawing = base64.b64decode(data)
    assert drawing[:4] == b"\x89PNG" if kind == "image/png" else b"#ffffff" in drawing


def test_same_picture_same_bytes():
    first, second = (parts(slider_over(figures(1), ["a"], "b"))[1][0].value for _ in range(2))
    assert first == second


def test_figures_are_closed():
    before = plt.get_fignums()
    slider_over(figures(2), ["a", "b"], "c")
    assert plt.get_fignums() == before


@pytest.mark.parametrize("pictures, labels", [(0, 0), (2, 1), (1, 2)])
def test_wrong_number_of_labels(pictures, labels):
    with pytest.raises(ValueError, match=f"got {pictures} pictures and {labels} labels"):
        slider_over(figures(pictures), ["a"] * labels, "b")
    plt.close("all")
