"""Attention whose batch axis holds heads or windows: what is counted is said, no rows are compared."""

import numpy as np
import pytest
import torch
from torch import nn

import semdiag
from semdiag.measuring.calls.collector import NotAvailableError, QueryDraws
from semdiag.measuring.calls.running import running, unnamed
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions import registry
from semdiag.questions.k_sweep.top_scores import TopScores
from semdiag.questions.mask_stability.measure import MASKS, NoisePlan
from semdiag.questions.overlap.measure import OVERLAP, OverlapPlan, key_overlaps
from semdiag.questions.stability.measure import SECANTS, SecantsPlan, measure_secants
from semdiag_files import InputError

SAMPLES, LENGTH, HEADS, WIDTH = 3, 6, 4, 8
SAMPLES_FIRST, HEADS_FIRST, WINDOWS = "samples first", "heads first", "windows"


class Model(nn.Module):
    """Tokens, and one attention whose heads or windows of three tokens are folded into the batch axis."""

    def __init__(self, fold=None):
        super().__init__()
        self.fold, self.tokens, self.qkv = fold, nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids):
        x = self.tokens(ids)
        if self.fold == WINDOWS:
            x = x.unflatten(1, (-1, 3)).flatten(0, 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.fold == HEADS_FIRST:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        if self.fold in (SAMPLES_FIRST, HEADS_FIRST):
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return (q @ k.mT).softmax(-1) @ v


def model_of(fold):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(fold).eval()


@pytest.fixture
def ids():
    return torch.randint(30, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fold", [SAMPLES_FIRST, HEADS_FIRST])
def test_folded_heads_have_the_same_numbers_and_a_remark(fold, ids):
    whole, found = (semdiag.measure(model_of(f), ids) for f in (None, fold))
    np.testing.assert_allclose(
        np.sort(found.queries["dispersion"]), np.sort(whole.queries["dispersion"]), rtol=1e-5, atol=1e-6
    )
    assert whole.remarks.empty
    said = found.remarks["text"].item()
    assert said.startswith(
        "its batch axis holds 4 rows per sample (heads or windows): the first 4 count as sample 0"
    )
    assert found.queries.groupby("sample").size().tolist() == [HEADS * LENGTH] * SAMPLES


@pytest.mark.parametrize("fold", [SAMPLES_FIRST, HEADS_FIRST, WINDOWS])
def test_a_capture_says_that_rows_are_not_samples(fold, ids):
    model, several = model_of(fold), 2 if fold == WINDOWS else HEADS
    said = f"its batch axis holds {several} rows per sample (heads or windows): each row counts as a sample"
    with semdiag.capture(model) as calls:
        model(ids)
        model(ids=ids[:1])
    assert calls.audit[["what", "reason", "times"]].values.tolist() == [["remark", said, 2]]
    assert calls.dispersion().query("call == 0")["sample"].nunique() == several * SAMPLES
    assert not {**model._forward_hooks, **model._forward_pre_hooks}
    with semdiag.capture(whole := model_of(None)) as calls:
        whole(ids)
    assert calls.audit.empty


def test_windows_are_parts_of_their_sample(ids):
    found = semdiag.measure(model_of(WINDOWS), ids, batch_size=2)
    assert found.remarks[["text", "times"]].values.tolist() == [
        [
            "its batch axis holds 2 rows per sample (heads or windows): the first 2 count as sample 0, and so on, "
            "which mixes samples if heads come before them",
            2,
        ]
    ]
    alone = semdiag.measure(model_of(WINDOWS), ids[1:2]).queries["dispersion"]
    np.testing.assert_allclose(
        found.queries[found.queries["sample"] == 1]["dispersion"], alone, rtol=1e-5, atol=1e-6
    )


def test_a_batch_axis_of_something_else_is_said(ids):
    class Columns(nn.Module):
        def forward(self, x):  # attends among samples
            x = x.transpose(0, 1)
            return ((x @ x.mT).softmax(-1) @ x).transpose(0, 1)

    said = semdiag.measure(Columns(), torch.randn(4, LENGTH, WIDTH)).remarks["text"].item()
    assert said == "its batch axis holds 6 rows, but the batch has 4 samples: each row counts as a sample"


class SequenceFirst(nn.Module):
    """Attention of torch's own that takes sequences first, and is given samples first."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def test_no_two_batches_share_a_sample():
    batches = [torch.randn(5, 12, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    found = semdiag.measure(SequenceFirst(), batches)
    assert found.models["samples"].item() == 10
    assert found.queries.groupby("sample").size().tolist() == [2 * 5] * 24  # heads × queries of a row
    swept = TopScores(1, QueryDraws(2, 0))
    with running(unnamed(SequenceFirst()), swept.add) as run:
        for batch in batches:
            swept.samples.start(len(batch))
            run(batch)
    held = swept.queries.held()
    for place in held["place"].unique():
        assert held["sample"][held["place"] == place].unique().tolist() == list(range(24))


def test_a_capture_says_of_a_batch_axis_of_something_else_what_a_measurement_says():
    x = torch.randn(5, 12, WIDTH, generator=torch.Generator().manual_seed(0))
    model = SequenceFirst().eval()
    with semdiag.capture(model) as calls:
        model(x)
    said = "its samples are the second axis of its input (batch_first=False), not the first"
    said += ": each row counts as a sample"
    assert calls.audit["reason"].tolist() == semdiag.measure(model, x).remarks["text"].tolist() == [said]


def test_drawn_queries_of_windows_belong_to_their_sample(ids):
    """Intervals rest on how many samples there are: six windows of two are three samples."""
    found = TopScores(1, QueryDraws(2, 0))
    of_batches = []
    with running(unnamed(model_of(WINDOWS)), found.add) as run:
        for batch in ids.split(2):
            found.samples.start(len(batch))
            run(batch)
            of_batches.append(found.queries.held()["sample"].unique().tolist())
    assert of_batches == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("fold", [SAMPLES_FIRST, HEADS_FIRST, WINDOWS])
def test_what_compares_rows_refuses_a_folded_batch_axis(fold, ids):
    model = model_of(fold)
    why = r"the attention of the model does not keep the samples apart: its batch axis holds [24] rows per sample"
    with pytest.raises(InputError, match=f"^mask stability of model not available, because {why}") as refused:
        semdiag.mask_stability(model, ids)
    assert "\n" not in str(refused.value)
    for ask in (measure_secants, key_overlaps):
        with pytest.raises(NotAvailableError, match=f"^{why}"):
            ask(unnamed(model), [ids])


@pytest.mark.parametrize("fold", [SAMPLES_FIRST, HEADS_FIRST, WINDOWS])
def test_a_survey_names_what_it_left_out_and_measures_the_rest(fold, ids):
    model = semdiag.LoadedModel("own:model", "", model_of(fold), "factory", "unknown", batches=[ids])
    found = survey([model], Conditions(k=(2,), plans=(NoisePlan(k=2), SecantsPlan(), OverlapPlan(2))))
    said = found.remarks["text"]
    for name in ("mask stability", "secants", "overlap"):
        assert (
            said.str.startswith(f"{name} not available, because the attention of the model does not keep").sum()
            == 1
        )
    result = registry.QUESTIONS["mask-stability"].json(Findings(found))["results"][0]
    assert not result["applicable"]
    assert result["mask"].startswith("mask stability not available, because the attention")
    assert found[MASKS].empty
    assert found[SECANTS].empty
    assert found[OVERLAP].empty
    assert len(found.queries) == SAMPLES * LENGTH * HEADS
