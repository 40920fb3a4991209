"""The twins of the language comparison: what they keep, and that their records are judged as registered."""

import language
import language_figure
import numpy as np
import pandas as pd
import pytest
import torch


@pytest.mark.parametrize("mask", language.MASKS)
def test_every_query_keeps_the_keys_of_its_mask(mask):
    layer = language.Attention(mask, torch.Generator().manual_seed(3))
    scores = torch.randn(
        1, language.HEADS, language.LENGTH, language.LENGTH, generator=torch.Generator().manual_seed(4)
    )
    kept = layer.keep(scores).expand_as(scores)[0, 1]
    for query in (0, 5, 8, 60):
        expected = set(range(query + 1))
        if mask.startswith("topk"):
            expected = set(scores[0, 1, query, : query + 1].argsort(descending=True)[: layer.k].tolist())
        elif mask == "window-8":
            expected = {0, *range(max(0, query - 7), query + 1)}
        own = set(kept[query].nonzero().flatten().tolist())
        if mask == "random-8":
            assert own <= expected
            assert len(own) == min(8, query + 1)
        else:
            assert own == expected


@pytest.mark.slow
def test_twins_of_a_seed_begin_alike_and_learn(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "EVERY", 15)
    text = tmp_path / "text"
    text.write_bytes(b"abcdefgh" * 1000)
    runs = [list(language.train(text, mask, 1, torch.device("cpu"), 15)) for mask in ("full", "topk-8")]
    first, last = zip(*runs, strict=True)
    assert all(2.5 < row["held_out_loss"] < 6.5 for row in first)
    assert all(row["held_out_loss"] < start["held_out_loss"] - 1 for start, row in zip(first, last, strict=True))
    twins = [
        language.Decoder(mask, 7).state_dict() for mask in ("full", "window-8") if torch.manual_seed(7) is not None
    ]
    assert all(torch.equal(one, twins[1][name]) for name, one in twins[0].items())


def test_the_difference_is_paired_by_seed_and_a_diverged_seed_leaves(tmp_path):
    for seed, own, full in zip(language.SEEDS, (1.0, 1.5, np.nan), (1.2, 1.6, 9.0), strict=True):
        for mask, loss in (("topk-8", own), ("full", full)):
            table = pd.DataFrame({"step": [0, 100], "bytes": [0, 5], "held_out_loss": [7.0, loss]})
            table.to_csv(language.record(tmp_path, mask, seed), index=False)
    found = language.judge(tmp_path).set_index("mask")
    assert found.loc["topk-8", "seeds"] == 2
    assert found.loc["topk-8", "area"] == pytest.approx(-0.15)
    half = 12.7062047 * 0.05  # t of 1 degree of freedom times the standard error of −0.2 and −0.1
    assert found.loc["topk-8", "area_low"] == pytest.approx(-0.15 - half)


@pytest.mark.slow
def test_a_title_says_which_mask_ends_where_and_fits(tmp_path):
    """Means over seeds at the last step, 1.5, 2.5 and 2: another step or one seed would say otherwise."""
    ends = {"full": (1.0, 2.0), "topk-8": (4.0, 1.0), "window-8": (0.5, 3.5)}
    for mask, losses in ends.items():
        for seed, loss in zip(language.SEEDS, losses, strict=False):
            columns = {name: [0.1, 9.0 - loss, loss] for name in language_figure.PANELS}
            table = pd.DataFrame({"step": [0, 200, 300], "bytes": [0, 10, 20], **columns})
            table.to_csv(language.record(tmp_path, mask, seed), index=False)
    figure = language_figure.figure(tmp_path)
    figure.draw_without_rendering()
    panels = figure.axes[: len(language_figure.PANELS)]
    for ax, quantity in zip(panels, language_figure.PANELS.values(), strict=True):
        assert (
            " ".join(ax.get_title(loc="left").split())
            == f"{quantity}: full ends lowest (1.5), top-8 highest (2.5)"
        )
        box = ax._left_title.get_window_extent()
        assert box.x1 <= figure.bbox.x1
        assert not any(box.overlaps(other.get_window_extent()) for other in panels if other is not ax)
