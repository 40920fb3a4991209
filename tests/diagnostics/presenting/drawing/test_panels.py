"""Which models share a panel, and what they are called."""

from itertools import pairwise

import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.presenting.drawing.panels import attention_label, panels_of
from semdiag.presenting.drawing.style import ATTENTION_STYLES
from semdiag.questions import registry
from semdiag.reporting.report import summary_sentences
from semdiag_models import ATTENTIONS

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_at_most_one_attention_looks_like_those_without_a_style():
    assert set(ATTENTION_STYLES) <= set(ATTENTIONS)
    assert len(set(ATTENTIONS) - set(ATTENTION_STYLES)) <= 1


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        (("full", None), "full"),
        (("topk", 5), "top-k (k = 5)"),
        (("bottomk", 5), "bottom-k (k = 5)"),
        (("random", 5), "random-k (k = 5)"),
        (("banded", 5, 3), "banded (k = 5 + 3 global)"),
    ],
)
def test_labels(arguments, label):
    assert attention_label(*arguments) == label


def test_models_of_another_norm_or_pooling_get_a_panel_of_their_own(model):
    parts = [model("full"), model("topk"), model("banded", path="post.pt"), model("banded", path="cls.pt")]
    models = pd.concat([part.models for part in parts], ignore_index=True)
    models.loc[2, "norm"], models.loc[3, "pooling"] = "post", "cls"
    titles = {panel.title: len(panel.series) for panel in panels_of(models)}
    assert titles == {
        "even-pairs, norm pre, pooling mean": 2,
        "even-pairs, norm post, pooling mean": 1,
        "even-pairs, norm pre, pooling cls": 1,
    }


def test_models_of_the_same_attention_look_different(model):
    paths = [f"run-{i}/last.pt" for i in range(9)]
    parts = [model("full"), *(model("topk", path=path) for path in paths)]
    (panel,) = panels_of(pd.concat([part.models for part in parts], ignore_index=True))
    full, *topk = (series.style for series in panel.series)
    assert full == ATTENTION_STYLES["full"]
    assert topk[0] == ATTENTION_STYLES["topk"]  # the first, or only, looks as everywhere
    assert len({style.color for style in topk}) == len({(s.color, s.marker) for s in topk}) == len(paths)
    assert all(before.marker != after.marker for before, after in pairwise(topk))
    assert {style.line for style in topk} == {ATTENTION_STYLES["topk"].line}


@pytest.mark.slow
def test_bottom_k_is_not_called_a_mask_that_ignores_the_scores(model):
    measured = Measurements.concat([model(kind) for kind in ("full", "random", "bottomk")])
    found = Findings(measured)
    (said,) = (
        s
        for s in summary_sentences(found, {"dispersion": registry.QUESTIONS["dispersion"].answered(found)})
        if "masks that ignore the scores" in s
    )
    assert "random-" in said
    assert "bottomk" not in said
