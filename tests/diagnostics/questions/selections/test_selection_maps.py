"""The figure of one sample's selections."""

import pytest
import torch
from matplotlib.colors import to_hex

from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.questions.selections.capture import Choices
from semdiag.questions.selections.compare import LARGEST, sample_map
from semdiag.questions.selections.figures import selection_maps


def keys(real=(False, True, True, True), samples=1):
    """A causal choice of one key each, of a sequence that may be padded; later samples are as the first."""
    length, first = len(real), real.index(True)
    at = torch.arange(length)
    forbidden = (at > at[:, None]) | (at < first)
    order = at.double().expand(length, length).masked_fill(forbidden, -torch.inf)
    rows = (order.argmax(1)[:, None], order, torch.tensor(real), torch.full((length,), first))
    return Choices("keys", (samples, length), *(each.repeat(samples, *[1] * (each.ndim - 1)) for each in rows))


def experts(tokens=3):
    """A choice of two experts of four, of which the last is in a group that was not chosen."""
    order = torch.tensor([3.0, 2.0, 1.0, -torch.inf]).expand(tokens, 4)
    indices = torch.tensor([[0, 1]]).expand(tokens, 2)
    return Choices(
        "experts", (1, tokens), indices, order, torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens)
    )


@pytest.mark.parametrize("samples", [1, 3])
def test_a_map_is_that_of_the_first_sample_without_padding(samples):
    found = sample_map("indexer", keys(samples=samples))
    assert found.states.tolist() == [[2, 0, 0], [1, 2, 0], [1, 1, 2]]
    assert not found.cut
    assert sample_map("gate", experts()).states.tolist() == [[2, 2, 1, 0]] * 3


def test_of_several_heads_the_first_is_shown():
    one = keys()
    rows = (one.indices, one.order, one.real, one.first)
    two = Choices("keys", (1, 2, 4), *(each.repeat(2, *[1] * (each.ndim - 1)) for each in rows))
    assert sample_map("indexer", two).states.tolist() == sample_map("indexer", one).states.tolist()


def test_a_long_sample_is_cut():
    found = sample_map("gate", experts(tokens=LARGEST + 1))
    assert (found.states.shape, found.cut) == ((LARGEST, 4), True)


def test_the_figure_shows_what_the_maps_hold():
    maps = [sample_map("layers.0.indexer", keys()), sample_map("layers.0.gate", experts())]
    figure = selection_maps(maps)
    figure.draw_without_rendering()
    first, second = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["layers.0.indexer", "layers.0.gate"]
    assert [ax.get_xlabel() for ax in figure.axes] == ["key", "expert"]
    assert [ax.get_ylabel() for ax in figure.axes] == ["query", "token"]
    assert first.images[0].get_array().tolist() == maps[0].states.tolist()
    assert second.images[0].get_array().tolist() == maps[1].states.tolist()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["chosen", "available, left out", "forbidden"]
    colours = [to_hex(handle.get_facecolor()[0]) for handle in legend.legend_handles]
    image = first.images[0]
    assert colours == [to_hex(image.cmap(image.norm(state))) for state in (2, 1, 0)]
    assert "The first 256 tokens" not in figure.get_supxlabel()


def test_it_says_what_is_not_shown():
    figure = selection_maps([sample_map("gate", experts(tokens=LARGEST + 1))] * 13)
    assert len([ax for ax in figure.axes if ax.images]) == 12
    said = " ".join(figure.get_supxlabel().split())
    assert "The first 256 tokens." in said
    assert "The first 12 of 13 selections." in said


def test_a_sample_of_padding_alone_has_no_figure():
    none = keys()
    none.real[:] = False
    with pytest.raises(NothingToDrawError, match="no token that selects"):
        selection_maps([sample_map("indexer", none)])
