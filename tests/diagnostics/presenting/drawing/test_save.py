"""Saved figures: what they say is shown."""

from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import save_figure

NAME = "a\x1b]0;title\x07\x9b2J\u202eb"


@pytest.mark.filterwarnings("ignore:Glyph")  # of ticks' labels, which are drawn as they are
def test_control_characters_in_a_name_leave_an_svg_one(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], label=NAME)
    axes.legend()
    axes.set_title(NAME)
    axes.set_yticks([0, 1], [NAME, "plain"])
    figure.suptitle(NAME)
    (file,) = save_figure(figure, tmp_path / "f", ["svg"])
    ElementTree.parse(file)  # with control characters it would be no XML
    assert not set(file.read_text(encoding="utf-8")) & set("\x1b\x07\x9b\u202e")
    assert axes.get_title() == r"a\x1b]0;title\x07\x9b2J\u202eb"
