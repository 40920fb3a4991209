"""What is said of the weight that a top-k mask would keep, layer by layer."""

import torch
from torch import nn

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import measure
from semdiag.questions.counterfactual import within_sentences


class TwoLayers(nn.Module):
    """Attention of the inputs to themselves, twice; the scores of the second are ``factor`` times as large."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        x = nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)
        return nn.functional.scaled_dot_product_attention(x, x, x, scale=self.factor)


def said(factor):
    x = torch.eye(6)[None] * 2 + torch.zeros(3, 6, 6)  # a query's own key has nearly all of its weight
    sentences = within_sentences(Findings(measure(TwoLayers(factor), x, k=[2])))
    return next(sentence for sentence in sentences if "Would sparse attention help?" in sentence)


def test_layers_that_keep_as_much_are_not_told_apart():
    """The first layer keeps (e⁴ + 1)/(e⁴ + 5), 93.3%, the second with this factor 92.6%."""
    assert "at the median (93% at the 5th percentile; 93% in every layer), with" in said(1.2)


def test_layers_that_keep_less_are_named():
    """Equal scores: the second layer keeps 2 of 6 keys, a third of the weight."""
    assert "by layer, medians from 33% in layer 1 to 93% in layer 0)" in said(0.0)
