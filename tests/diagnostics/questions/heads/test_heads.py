"""What every head does, on queries made up by hand."""

import numpy as np
import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.questions.heads import first_k, head_table, heads_glance, outlying_heads


def made(attention, kept, **columns):
    """One layer, two heads, three queries of three keys; head 1 has twice the numbers of head 0."""
    place = pd.MultiIndex.from_product([[0], [0], [0, 1], range(3)], names=["sample", "layer", "head", "query"])
    rows = place.to_frame(index=False)
    queries = rows.assign(
        model=attention, keys=3, kept=kept, dispersion=(rows["head"] + 1) * (rows["query"] + 1.0)
    )
    for name, value in columns.items():
        queries[name] = value * (rows["head"] + 1)
    loads = rows.rename(columns={"query": "key"}).assign(model=attention, load=3)
    models = pd.DataFrame(
        {"model": [attention], "source": ["semdiag"], "attention": [attention], "task": ["parity"]}
    )
    nothing = pd.DataFrame({"model": []})
    heads = {"model": attention, "layer": 0, "head": [1, 0], "queries": 3, "entropy": [0.2, 0.1]}
    heads |= {"first_weight": [0.75, 0.5], "keeps_first": [0.0, 1.0], "keeps_first_k2": [2 / 3, 1.0]}
    return Measurements(models, queries, loads, nothing, nothing, heads=pd.DataFrame(heads))


def test_a_model_with_a_mask_is_described_by_its_own_load():
    found = Findings(made("topk", 2))
    table = found(head_table)
    assert table[["layer", "head"]].values.tolist() == [[0, 0], [0, 1]]
    assert table["dispersion"].tolist() == [2.0, 4.0]
    assert table["keeps_first"].tolist() == [1.0, 0.0]
    assert "weight_kept" not in table
    assert first_k(found) is None


def test_a_model_that_keeps_every_key_by_that_of_its_largest_scores():
    table = Findings(made("full", 3, dispersion_k2=1.0, weight_kept_k2=0.25))(head_table)
    assert table["keeps_first"].tolist() == pytest.approx([1.0, 2 / 3])
    assert table["weight_kept"].tolist() == [0.25, 0.5]


def test_without_a_k_nothing_is_said_of_its_first_key():
    table = Findings(made("full", 3))(head_table)
    assert table["keeps_first"].isna().all()


def test_scores_that_are_not_finite_have_no_part_in_the_median():
    found = made("topk", 2)
    found.queries.loc[0, "dispersion"] = np.inf
    assert Findings(found)(head_table)["dispersion"].tolist() == [2.5, 4.0]


def test_entropy_and_weight_on_the_first_key_stand_beside_the_others():
    found = made("topk", 2)
    table = Findings(found)(head_table)
    assert table[["head", "entropy", "first_weight"]].values.tolist() == [[0, 0.1, 0.5], [1, 0.2, 0.75]]
    glance = heads_glance(Findings(found))
    assert glance.number == "62%"  # half of 50 and 75, to even
    assert glance.words.endswith("mean over 2 heads; the most is 75%, head 1 of layer 0")


def test_of_several_models_no_head_is_named_without_its_model():
    one, other = made("topk", 2), made("full", 2)
    other.heads["first_weight"] /= 2
    glance = heads_glance(Findings(Measurements.concat([one, other])))
    assert glance.number == "31 to 62%"
    assert glance.words.endswith("of each of 2 models")


def test_of_measurements_of_an_older_version_less_is_known():
    found = made("topk", 2)
    whole = found.heads
    older = Findings(found.replace(heads=whole[["model", "layer", "head", "queries", "entropy", "first_weight"]]))
    assert older(head_table)["keeps_first"].isna().all()
    oldest = Findings(found.replace(heads=whole.iloc[:0]))
    assert "entropy" not in oldest(head_table)
    assert oldest(head_table)["keeps_first"].isna().all()
    assert heads_glance(oldest).number == "2 heads"


def test_the_heads_at_the_ends_are_named_each_once():
    found = made("topk", 2)
    first, second = Findings(found)(outlying_heads)
    most = (
        "scores furthest apart (median δ 4 nats), most weight on the first key (75%), most even (entropy 0.2 nats)"
    )
    assert first == (0, 1, most)
    assert second == (0, 0, "scores closest together (median δ 2 nats), most focused (entropy 0.1 nats)")
    one = found.replace(queries=found.queries[found.queries["head"] == 0])
    assert Findings(one)(outlying_heads) == []
