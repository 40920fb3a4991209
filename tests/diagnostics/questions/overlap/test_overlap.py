"""Overlap of masks against loops over sets, a case by hand, and masks whose overlap is known."""

import itertools

import numpy as np
import pytest
import torch

from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.calls.collector import scored_rows
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions, measure
from semdiag.measuring.survey import survey
from semdiag.presenting.answer import sentences_of
from semdiag.questions import registry
from semdiag.questions.overlap.answer import overlap_table
from semdiag.questions.overlap.measure import OverlapPlan, expected_jaccard, key_overlaps
from semdiag_files import InputError

K = 3


def sets_of(encoder, tokens, k=None):
    """(layer, head, sample, query) -> kept keys, of queries that drop one; with k those that top-k would keep."""
    found = {}

    def keep(call):
        rows = scored_rows(call)
        for sample, head, query in itertools.product(*map(range, rows.kept.shape)):
            z = rows.scores[sample, head, query]
            allowed = [j for j in range(len(z)) if z[j] > -torch.inf]
            kept = {j for j in range(len(z)) if rows.selected[sample, head, query, j]}
            if k is not None:
                kept = set(sorted(allowed, key=lambda j: -float(z[j]))[:k])
            if 0 < len(kept) < len(allowed):
                found[call.layer, head, sample, query] = kept

    with torch.no_grad(), watch_attention(encoder, keep):
        encoder(tokens)
    return found


def index(a, b):
    return len(a & b) / len(a | b)


@pytest.mark.parametrize(("kind", "k"), [("topk", None), ("full", 4)])
def test_indices_are_those_of_a_loop_over_sets(wild_encoder, padded_tokens, kind, k):
    encoder, tokens = wild_encoder(kind), padded_tokens[0]
    sets = sets_of(encoder, tokens, k)
    table = key_overlaps(encoder, tokens, OverlapPlan(k or 5), batch_size=3)
    assert len(table)
    for row in table.to_dict("records"):
        one, two = (row["layer"], row["head"]), (row["other_layer"], row["other_head"])
        step = 0 if row["kind"] == "pair" else 1
        pairs = [
            (sets[*one, row["sample"], q], sets[*two, row["sample"], q - step])
            for q in range(tokens.shape[1])
            if (*one, row["sample"], q) in sets and (*two, row["sample"], q - step) in sets
        ]
        assert row["queries"] == len(pairs) > 0
        assert row["jaccard"] == pytest.approx(np.mean([index(*pair) for pair in pairs]), abs=1e-6)
    places = {(layer, head) for layer, head, *_ in sets}
    per_sample = table[table["kind"] == "pair"].groupby("sample").size()
    assert (per_sample == len(places) * (len(places) - 1) // 2).all()


def test_masks_that_ignore_the_input_overlap_as_they_must(wild_encoder):
    """block: all layers alike, and the query before is in the same block but at its start."""
    tokens = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1]])
    table = key_overlaps(wild_encoder("block"), tokens)
    assert (table.loc[table["kind"] == "pair", "jaccard"] == 1).all()
    before = table[table["kind"] == "previous"]
    assert before["jaccard"].tolist() == pytest.approx([9 / 11] * len(before))  # 12 queries, blocks 5, 5, 2


@pytest.mark.parametrize(("first", "second", "keys"), [(1, 1, 4), (2, 3, 5), (3, 3, 3), (4, 2, 6)])
def test_chance_is_the_mean_over_all_pairs_of_sets(first, second, keys):
    ones, others = (itertools.combinations(range(keys), size) for size in (first, second))
    indices = [index(set(a), set(b)) for a, b in itertools.product(ones, others)]
    assert expected_jaccard(first, second, keys) == pytest.approx(np.mean(indices), rel=1e-12)


def mean_index(ones, others, k):
    """Over all pairs of sets of k of these keys and k of those."""
    pairs = itertools.product(itertools.combinations(ones, k), itertools.combinations(others, k))
    return np.mean([index(set(a), set(b)) for a, b in pairs])


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("ones", "others"), [("abcde", "cdefgh"), ("abc", "abcdef"), ("abcde", "cde"), ("abc", "def")]
)
def test_chance_of_sets_from_different_keys_is_the_mean_over_all_pairs_of_sets(ones, others, k):
    shared = len({*ones} & {*others})
    assert expected_jaccard(k, k, len(ones), len(others), shared) == pytest.approx(mean_index(ones, others, k))


class Windows(torch.nn.Module):
    """Causal attention with a window of each of the given lengths, behind as many pads as the input has."""

    def __init__(self, *reaches):
        super().__init__()
        self.reaches, self.layers = reaches, torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in reaches)

    def keys(self, reach, query, pads):
        """Which keys a query sees."""
        return [key for key in range(pads, query + 1) if query - key < reach] or [query]

    def forward(self, x):
        pads, length = (x[..., 0] == 0).sum(1).tolist(), x.shape[1]
        for reach, layer in zip(self.reaches, self.layers, strict=True):
            allowed = torch.zeros(len(x), 1, length, length, dtype=torch.bool)
            for sample, query in itertools.product(range(len(x)), range(length)):
                allowed[sample, 0, query, self.keys(reach, query, pads[sample])] = True
            q = layer(x).view(len(x), length, 2, 2).transpose(1, 2)
            x = torch.nn.functional.scaled_dot_product_attention(q, q, q, allowed).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("reaches", [(3, 9), (9, 3), (3, 3), (4, 3, 9)])
def test_chance_draws_each_set_from_the_keys_of_its_own_query(reaches):
    inputs = torch.rand(3, 9, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    for sample in range(3):
        inputs[sample, :sample] = 0
    model, k = Windows(*reaches), 2
    table = key_overlaps(model, inputs, OverlapPlan(k), batch_size=2)
    assert set(table["kind"]) == {"pair", "previous"}
    for row in table.to_dict("records"):
        step = 0 if row["kind"] == "pair" else 1
        sides = [
            (
                model.keys(reaches[row["layer"]], query, row["sample"]),
                model.keys(reaches[row["other_layer"]], query - step, row["sample"]),
            )
            for query in range(step, 9)
        ]
        pairs = [mean_index(*both, k) for both in sides if min(map(len, both)) > k]
        assert row["queries"] == len(pairs) > 0
        assert row["chance"] == pytest.approx(np.mean(pairs), rel=1e-9)


def test_a_query_that_drops_nothing_does_not_count(wild_encoder):
    table = key_overlaps(wild_encoder("full"), torch.zeros(1, 4, dtype=torch.int64), OverlapPlan(4))
    assert table.empty
    with pytest.raises(InputError, match="k must be at least 1"):
        OverlapPlan(0)


@pytest.mark.slow
def test_findings_say_how_much_is_shared_and_by_chance(tiny_runs):
    found = Findings(survey([tiny_runs.topk, tiny_runs.full], Conditions(samples=6, plans=(OverlapPlan(3),))))
    table = found(overlap_table)
    assert set(table["what"]) == {"layers", "heads", "previous"}
    for (model, what), own in table.groupby(["model", "what"]):
        whole, parts = own[own["layer"] == -1], own[own["layer"] >= 0]
        rows = found.measurements.overlap[found.measurements.overlap["model"] == model]
        same = rows["layer"] == rows["other_layer"]
        chosen = {
            "layers": (rows["kind"] == "pair") & ~same,
            "heads": (rows["kind"] == "pair") & same,
            "previous": rows["kind"] == "previous",
        }[what]
        assert whole["jaccard"].item() == pytest.approx(rows.loc[chosen, "jaccard"].mean())
        assert whole["queries"].item() == parts["queries"].sum()
        assert (own["low"] <= own["jaccard"]).all()
        assert (own["jaccard"] <= own["high"]).all()
    results = registry.QUESTIONS["overlap"].json(found)["results"]
    assert [len(result["overlap"]) for result in results] == table.groupby("model").size().tolist()


def test_samples_that_are_all_alike_have_no_interval(wild_encoder):
    """Nothing varies between them, so nothing is known of other inputs."""
    tokens = torch.tensor([[0, 1, 1, 0, 1, 0]]).repeat(6, 1)
    encoder = wild_encoder("full")
    measurements = measure(encoder, tokens).replace(overlap=key_overlaps(encoder, tokens, OverlapPlan(K)))
    table = Findings(measurements)(overlap_table)
    assert set(table["samples"]) == {6}
    assert table[["low", "high"]].isna().all(axis=None)


@pytest.mark.slow
def test_the_section_draws_says_and_tabulates(tiny_runs):
    found = Findings(survey([tiny_runs.topk, tiny_runs.full], Conditions(samples=4, plans=(OverlapPlan(3),))))
    question = registry.QUESTIONS["overlap"]
    assert question.applies(found)
    (drawing,) = [drawing for heading in question.headings for drawing in heading.figures]
    figure = drawing(found)
    panels = [ax for ax in figure.axes if ax.get_xlabel().startswith("layer")]
    assert len(panels) == 2
    assert panels[0].images[0].get_array().shape == (2, 4)
    unknown = found.measurements.overlap.assign(chance=np.nan, jaccard=np.nan)
    drawing(Findings(found.measurements.replace(overlap=unknown))).draw_without_rendering()
    sentences = sentences_of(question.answered(found).details)
    assert len(sentences) == 2 * 3  # layers, heads and successive queries of each model
    assert all("at random" in sentence and "samples" in sentence for sentence in sentences)
    assert any("the mask that top-3 would choose" in sentence for sentence in sentences)
    (name,) = question.answered(found).tables
    assert name == "overlap"
