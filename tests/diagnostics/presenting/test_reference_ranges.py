"""The ranges of trained models: what the toolkit ships is what the program measures, and what the page says."""

from pathlib import Path

import pandas as pd
import pytest

from semdiag.presenting.drawing.style import reference_ranges, reference_words

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_what_is_shipped_is_what_is_measured():
    """Two digits, of which another processor may move the last."""
    import reference_ranges as program

    shipped, measured = pd.read_csv(program.TABLE), program.ranges()
    assert shipped[["model", "quantity", "heads", "tokens"]].equals(
        measured[["model", "quantity", "heads", "tokens"]]
    )
    for name in ("p5", "p50", "p95"):
        assert shipped[name].tolist() == pytest.approx(measured[name].tolist(), rel=0.1)
    assert program.markdown(shipped) in (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8")


def test_words_and_ranges_are_those_of_the_two_language_models():
    low, high = ([getattr(each, end) for each in reference_ranges("dispersion")] for end in ("low", "high"))
    assert (
        reference_words("dispersion", ["hf:other"])
        == f"{low[0]:g}–{high[0]:g} (MiniLM, 51 tokens), {low[1]:g}–{high[1]:g} (SmolLM2, 2,048 tokens)"
    )
    assert all(0 < a < b for a, b in zip(low, high, strict=True))
    assert all(0 <= each.low < each.high <= 1 for each in reference_ranges("first_weight"))


def test_a_model_is_not_compared_with_itself():
    """The grey band of the report on SmolLM2 contained SmolLM2."""
    assert reference_words("dispersion", ["hf:smollm2"]).endswith("(MiniLM, 51 tokens)")
