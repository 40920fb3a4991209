"""Changes by length of the text, against loops; texts cut into pieces."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.presenting.drawing.style import panel_grid
from semdiag.questions.k_sweep.changes import Unit, change_table, length_table, smallest_enough
from semdiag.questions.k_sweep.figures import _Costs, _crossing, _rounded_up, cost
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.k_sweep.rerun import RERUN_TABLE, packed
from semdiag.questions.k_sweep.wording import length_lines, needed_words, verdict_lines
from semdiag_files import InputError

LETTERS, LENGTH, SAMPLES = 7, 24, 12


class Causal(nn.Module):
    """One block of causal attention, to the logits of the next token."""

    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS, width), nn.Embedding(4 * LENGTH, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, LETTERS)

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places.weight[torch.arange(input_ids.shape[1]) % (4 * LENGTH)]
        q, k, v = (3 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + mixed[:, 0])


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Causal().double().eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(LETTERS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def findings(model, ids):
    plan = KSweepPlan(rerun=True, ks=(2, 6), kinds=("topk", "random"), lengths=(16, 48))
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids])
    return Findings(survey([loaded], Conditions(plans=(plan,), dtype="float64")))


def token_losses(model, ids):
    """Minus the logarithm of the probability of each next token, (N, L - 1)."""
    with torch.no_grad():
        likely = model(ids).log_softmax(-1)
    return -likely[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy()


def changes(model, ids, k):
    with sparsify(model, TopK(k)):
        masked = token_losses(model, ids)
    return masked - token_losses(model, ids)


@pytest.mark.parametrize("length", [16, 48])
def test_pieces_of_a_length_are_the_tokens_one_behind_the_other(findings, model, ids, length):
    pieces = ids.flatten()[: ids.numel() // length * length].view(-1, length)
    table = findings(length_table)
    row = table[(table["length"] == length) & (table["mask"] == "topk")].set_index("k")
    for k in (2, 6):
        change = changes(model, pieces, k)
        want = sum_ratio_interval(change.sum(1), np.full(len(pieces), float(length - 1)))
        assert tuple(row.loc[k, ["low", "high"]]) == pytest.approx((want.low, want.high), rel=1e-6)
        assert row.loc[k, "samples"] == len(pieces)
        assert row.loc[k, "change"] == pytest.approx(changes(model, pieces, k).mean(), rel=1e-9)
        kept = sum(min(k, i + 1) for i in range(length)) / sum(i + 1 for i in range(length))
        assert row.loc[k, "kept"] == pytest.approx(kept, rel=1e-12)


def test_padding_is_left_out_of_the_pieces():
    batch = {
        "input_ids": torch.tensor([[1, 2, 9], [9, 3, 4]]),
        "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
    }
    assert [piece["input_ids"].tolist() for piece in packed([batch], 2, 1)] == [[[1, 2]], [[3, 4]]]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": torch.ones(1, 9).long(), "labels": torch.ones(1).long()}, "leave out labels"),
        (torch.ones(2, 3, 8, 8), "cuts texts or token ids alone"),
        (torch.ones(1, 9).long(), "the inputs hold 9 tokens in all"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, said):
    with pytest.raises(InputError, match=said):
        packed([batch], 12, 1)


def test_an_encoder_of_ours_is_sent_to_its_own_command(tiny_runs):
    with pytest.raises(InputError, match=r"experiments/lengths\.py"):
        survey([tiny_runs.full], Conditions(samples=4, plans=(KSweepPlan(rerun=True, lengths=(4,)),)))


@pytest.mark.slow
def test_a_report_cuts_its_lengths_from_the_samples_that_fit_into_its_minutes(model, ids):
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids])
    plan = KSweepPlan(rerun=True, seconds=1e-9, lengths=(8, 24))  # one sample fits
    found = survey([loaded], Conditions(plans=(plan,), dtype="float64")).rerun_lengths
    samples = found[found["mask"] == "none"].groupby("length")["sample"].nunique()
    assert samples.to_dict() == {8: LENGTH // 8, 24: 1}
    own = found[(found["mask"] == "none") & (found["length"] == 24)]
    assert own["loss"].sum() == pytest.approx(token_losses(model, ids[:1]).sum())


@pytest.mark.slow
def test_samples_that_have_a_length_already_are_not_run_twice(model, ids):
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids[:4]])
    ran = []
    hook = model.register_forward_hook(lambda *_: ran.append(1))
    both, once = (
        survey([loaded], Conditions(plans=(KSweepPlan(rerun=True, lengths=n, kinds=("topk",)),), dtype="float64"))
        for n in ((), (LENGTH,))
    )
    hook.remove()
    assert ran[: len(ran) // 2] == ran[len(ran) // 2 :]
    cut = once.rerun_lengths[[*RERUN_TABLE.columns]]
    pd.testing.assert_frame_equal(once.rerun, cut)
    assert len(both.rerun_lengths) == 0 < len(cut)


def test_a_model_of_outputs_alone_has_no_lengths(ids):
    """Nothing came of it, and nothing was said."""
    body = Causal()
    body.head = nn.Linear(16, 5)  # no column for each token
    loaded = LoadedModel("own:body", "", body.eval(), "factory", "unknown", batches=[ids])
    plan = KSweepPlan(rerun=True, ks=(2,), kinds=("topk",), lengths=(16,))
    with pytest.raises(InputError, match="--lengths is for models that predict tokens, and of own:body"):
        survey([loaded], Conditions(plans=(plan,)))


def test_the_smallest_k_is_the_last_from_above_that_stays_within(findings):
    needed = findings(smallest_enough, "own:model").set_index(["length", "mask"])
    table = findings(length_table)
    for (length, mask), row in needed.iterrows():
        own = table[(table["length"] == length) & (table["mask"] == mask)]
        within = own.set_index("k")["change"] <= 0.01
        want = 2 if within.all() else 6 if within[6] else None
        assert (None if pd.isna(row["k"]) else row["k"]) == want
    lines = length_lines(findings, "own:model")
    assert any("at 16 tokens" in line and "at 48 tokens" in line for line in lines)
    assert needed_words({"k": None, "largest": 6, "kept": math.nan}) == "above 6"


def test_the_second_panel_has_the_cost_of_one_k_by_length(findings):
    _, ax = cost(findings).axes
    table = findings(length_table)
    own = table[table["mask"] == "topk"]
    k = own["k"].max()
    assert ax.get_xlabel() == f"tokens in the text; {k} keys kept"
    assert ax.get_xticks().tolist() == [16, 48]
    (line,) = (line for line in ax.lines if line.get_gid() == "lengths-topk--line")
    changes = np.expm1(own[own["k"] == k].sort_values("length")["change"].to_numpy())
    assert line.get_ydata() == pytest.approx(np.maximum(changes, ax.get_ylim()[0]))


@pytest.mark.slow
def test_without_lengths_there_is_one_panel(model, ids):
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids])
    plan = KSweepPlan(rerun=True, ks=(2,), kinds=("topk",))
    assert len(cost(Findings(survey([loaded], Conditions(plans=(plan,))))).axes) == 1


@pytest.mark.parametrize("name", ["key_padding_mask", "src_key_padding_mask"])
def test_a_mask_that_is_true_for_padding_is_read_so(name):
    """Its pieces were made of the padding alone."""
    padded = torch.tensor([[False, False, True], [True, False, False]])
    ids = torch.tensor([[1, 2, 9], [9, 3, 4]])
    assert [piece["ids"].tolist() for piece in packed([{"ids": ids, name: padded}], 2, 1)] == [[[1, 2]], [[3, 4]]]


@pytest.mark.slow
def test_one_long_document_has_intervals_over_chunks_within_it(model):
    """4,095 targets of one document had no interval. Sums over its parts are those of its positions, by hand."""
    ids = torch.randint(LETTERS, (1, 700), generator=torch.Generator().manual_seed(2))
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids])
    conditions = Conditions(plans=(KSweepPlan(rerun=True, ks=(6,), kinds=("topk",)),), dtype="float64")
    findings = Findings(survey([loaded], conditions))
    rows = findings.measurements.rerun
    top = rows[rows["mask"] == "topk"]
    assert (top["chunk"].unique().tolist(), top["part"].tolist()) == ([128], [0, 1, 2, 3, 4])
    assert top["predictions"].sum() == 700
    with torch.no_grad(), sparsify(model, TopK(6)):
        loss = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
    part = 5 * torch.arange(699) // 700
    for at, found in enumerate(top["loss"]):
        assert found == pytest.approx(float(loss[part == at].double().sum()), rel=1e-9)
    row = change_table(findings).query("mask == 'topk'").iloc[0]
    assert (row["samples"], row["units"]) == (1, 5)
    assert row["low"] < row["change"] < row["high"]
    said = " ".join(verdict_lines(findings, "own:model"))
    assert "Intervals are over 5 chunks of this text, of 128 tokens or more" in said
    five = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids[:, :600].view(5, 120)])
    assert set(survey([five], conditions).rerun["chunk"]) == {0}


def test_panels_of_a_unit_share_their_scale(findings):
    keys, lengths = cost(findings).axes
    assert keys.get_ylim() == lengths.get_ylim()
    assert lengths.get_ylabel() == ""


def test_keys_are_named_by_k_and_by_how_many_there_are(findings):
    ax, _ = cost(findings).axes
    assert ax.get_xlabel().endswith(f", of {LENGTH}")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["2", "6"]


def test_the_k_of_the_mark_is_never_below_the_line():
    assert [_rounded_up(k) for k in (1.3, 8.0, 20.3, 99.0, 310.0, 311.0, 1234.0)] == [2, 8, 21, 99, 310, 320, 1300]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({100: 0.1, 400: 0.001}, 200),  # on a logarithmic axis half-way between the two, as is the limit of 0.01
        ({100: 0.1, 200: 0.005, 400: 0.1}, None),  # not for good
        ({100: 0.005, 400: 0.001}, None),  # never above
        ({100: 0.1, 400: 0.05}, None),
    ],
)
def test_the_mark_is_where_a_line_enters_the_shaded_area_for_good(changes, expected):
    rows = pd.DataFrame(
        {"mask": "topk", "k": k, "kept": k / 1000, "change": change, "low": change, "high": change}
        for k, change in changes.items()
    )
    _, (ax,) = panel_grid(1)
    ax.set_xscale("log")
    crossing = _crossing(ax, _Costs(rows, "kept", Unit("loss"), 0.01))
    assert crossing == (None if expected is None else (pytest.approx(0.2), expected))
