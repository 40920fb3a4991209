import pytest
import seaborn as sns
from matplotlib.figure import Figure

from semdiag.presenting.drawing.style import palette, plain_numbers

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_the_palette_is_seaborns_for_the_colour_blind():
    assert palette(13) == list(sns.color_palette("colorblind", 13).as_hex())


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.002, 0.05), [0.002, 0.005, 0.01, 0.02, 0.05]),
        ((0.005, 0.3), [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]),
        ((0.005, 3), [0.01, 0.1, 1]),
        ((2, 4), [2, 3, 4]),
    ],
)
def test_a_logarithmic_axis_within_a_decade_or_two_has_numbers_between(ends, labels):
    figure = Figure()
    ax = figure.subplots()
    ax.set_yscale("log")
    ax.set_ylim(*ends)
    plain_numbers(ax.yaxis)
    figure.draw_without_rendering()
    shown = [
        tick.label1.get_text()
        for tick in [*ax.yaxis.get_major_ticks(), *ax.yaxis.get_minor_ticks()]
        if ends[0] <= tick.get_loc() <= ends[1] and tick.label1.get_text()
    ]
    assert sorted(map(float, shown)) == labels
