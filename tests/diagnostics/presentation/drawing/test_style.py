import seaborn as sns

from semdiag.presentation.drawing.style import palette


def test_the_palette_is_seaborns_for_the_colour_blind():
    assert palette(13) == list(sns.color_palette("colorblind", 13).as_hex())
