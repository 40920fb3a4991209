"""Gains of attention heads, against whole Jacobians written out by autograd."""

import numpy as np
import pandas as pd
import pytest
import scipy
import torch
from torch import nn
from torch.nn import functional as F

from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.calls.running import unnamed
from semdiag.questions.stability.answer import head_correlation
from semdiag.questions.stability.gains import measure_gains
from semdiag_models import Encoder, ModelConfig

HEADS, KEY_HEADS, WIDTH = 4, 2, 3


class Causal(nn.Module):
    """Causal attention whose key heads are shared by two query heads each; values are wider."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(5, HEADS * WIDTH), nn.Linear(5, KEY_HEADS * WIDTH)
        self.v = nn.Linear(5, KEY_HEADS * 2 * WIDTH)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in ((self.q, HEADS), (self.k, KEY_HEADS), (self.v, KEY_HEADS))
        )
        return F.scaled_dot_product_attention(3 * q, k, v, is_causal=True, enable_gqa=True)


def exact(q, k, v, kept, scale):
    """Spectral norms of the Jacobians of one head: in q, k and v; in q and k; in v."""

    def attend(q, k, v):
        return (scale * q @ k.T).masked_fill(~kept, -torch.inf).softmax(-1) @ v

    parts = torch.autograd.functional.jacobian(attend, (q, k, v))
    parts = [part.reshape(q.shape[0] * v.shape[1], -1) for part in parts]
    return [float(torch.linalg.matrix_norm(torch.cat(some, 1), 2)) for some in (parts, parts[:2], parts[2:])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal, shared keys", "top-k"])
def test_gains_are_norms_of_whole_jacobians(kind):
    torch.manual_seed(0)
    if kind == "top-k":
        model = Encoder(ModelConfig(vocabulary_size=9, classes=2, length=7, blocks=1, attention="topk", k=3))
        batch = torch.randint(0, 8, (2, 7))
    else:
        model, batch = Causal(), torch.randn(2, 6, 5, dtype=torch.float64)
    model = model.double().eval()
    table = measure_gains(unnamed(model), [batch])
    seen = []
    with watch_attention(model, seen.append), torch.no_grad():
        model(batch)
    (call,) = seen
    assert len(table) == 2 * call.q.shape[1]
    length = call.q.shape[2]
    for row in table.to_dict("records"):
        sample, head = row["sample"], row["head"]
        shared = head // (call.q.shape[1] // call.k.shape[1])
        kept = torch.ones(length, length).tril() > 0
        if call.selected is not None:
            kept = torch.zeros(length, length).scatter(-1, call.selected[sample, head], 1) > 0
        parts = (call.q[sample, head], call.k[sample, shared], call.v[sample, shared])
        for name, norm in zip(("gain", "score_gain", "value_gain"), exact(*parts, kept, call.scale), strict=True):
            assert norm * 0.99 <= row[name] <= norm * (1 + 1e-12)
        weights = (call.scale * parts[0] @ parts[1].T).masked_fill(~kept, -torch.inf).softmax(-1)
        largest = weights.amax(-1)
        assert row["xi"] == pytest.approx(float((2 * largest * (1 - largest)).mean()))
        assert row["value_gain"] == pytest.approx(float(torch.linalg.matrix_norm(weights, 2)), rel=1e-2)


def test_whether_xi_foretells_a_gain_is_asked_over_heads_not_over_rows():
    """Samples and heads were pooled: 0.04 over 72 rows of 12 heads that have -0.46."""
    draws = np.random.default_rng(0)
    head = np.repeat(np.arange(12), 6)
    rows = pd.DataFrame({"layer": 0, "head": head, "sample": np.tile(np.arange(6), 12)})
    of_sample = 100.0 * rows["sample"]  # moves both alike, whatever the head
    rows = rows.assign(xi=head + of_sample, gain=draws.permutation(12)[head] + of_sample)
    heads = rows.groupby(["layer", "head"], as_index=False)[["gain", "xi"]].median()
    found = head_correlation(heads)
    assert found.estimate == pytest.approx(scipy.stats.spearmanr(heads["xi"], heads["gain"]).statistic)
    assert found.low < found.estimate < found.high
    assert scipy.stats.spearmanr(rows["xi"], rows["gain"]).statistic > 0.9 > found.high
