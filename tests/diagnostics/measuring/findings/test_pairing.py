"""Which models are compared with each other."""

import pytest

from semdiag.measuring.findings.findings import (
    Findings,
    Pair,
    differences,
    find_pairs,
    pairs_against,
    path_tail,
    rivals,
    seed_names,
    seed_sentence,
    unlearned_sentences,
)
from semdiag.presenting.drawing.panels import panels_of

SOME = [1, 2, 3, 4]
TOPK = {"attention": "topk", "k": 5}


@pytest.fixture
def models(made_up):
    """Call with path=facts: the table of models."""
    return lambda **facts: made_up(*((path, SOME, own) for path, own in facts.items())).models


def test_a_full_and_a_topk_model_of_the_same_run_are_a_pair(models):
    pairs, alone = find_pairs(models(t=TOPK, f={}))
    assert pairs == [Pair("even-pairs, topk-5, seed 1", full="f", counterpart="t")]
    assert alone == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "parity"),
        ("seed", 2),
        ("blocks", 2),
        ("heads", 2),
        ("width", 16),
        ("length", 8),
        ("norm", "post"),
        ("pooling", "cls"),
        ("setting", "learning_rate 0.5, mlp_width 16"),
        ("snapshot", "best"),
    ],
)
def test_models_that_differ_in_more_than_their_attention_are_no_pair(models, name, value):
    assert find_pairs(models(f={}, t={**TOPK, name: value})) == ([], ["f", "t"])


def test_rivals_are_full_models_of_the_same_run_with_other_weights(models):
    named = {"weights_sha256": "a"}
    table = models(
        f=named, copy=named, t={**TOPK, "weights_sha256": "b"}, other={"weights_sha256": "c"}, far={"seed": 2}
    )
    (pair,) = find_pairs(table)[0]
    assert (pair.full, rivals(table, pair)) == ("f", ["other"])


def test_global_tokens_are_part_of_the_attention(models):
    banded = {"attention": "banded", "k": 3}
    table = models(f={"global_tokens": 0}, b={**banded, "global_tokens": 2}, c={**banded, "global_tokens": 0})
    labels = [pair.label for pair in find_pairs(table, None)[0]]
    assert labels == ["even-pairs, banded-3-global-2, seed 1", "even-pairs, banded-3, seed 1"]
    assert differences(table, Pair("", "c", "b")) == ["global_tokens 0 and 2"]


def test_models_that_differ_in_what_no_label_says_are_told_apart_by_their_paths(models):
    table = models(**{"runs/full": {}, "runs/sharp": TOPK, "runs/flat": TOPK, "runs/other": {**TOPK, "k": 3}})
    labels = [pair.label for pair in find_pairs(table)[0]]
    assert labels == [
        "even-pairs, topk-5, seed 1, runs/sharp",
        "even-pairs, topk-5, seed 1, runs/flat",
        "even-pairs, topk-3, seed 1",
    ]
    against = [pair.label for pair in pairs_against(table, "runs/other")]
    assert len(set(against)) == len(against) == 3
    assert sum("runs/sharp" in label for label in against) == 1


def test_a_long_path_is_told_by_its_end_or_whole_if_others_end_alike():
    ends = [f"{folder}/a-checkpoint-with-a-long-name/last.pt" for folder in ("one", "another")]
    assert [path_tail(path, ends) for path in ends] == ends
    assert path_tail(ends[0], ends[:1]) == "…int-with-a-long-name/last.pt"
    assert path_tail("short.pt", ["other/short.pt"]) == "short.pt"


def test_what_is_unknown_of_both_is_the_same(models):
    unknown = {"seed": None, "task": None}
    pairs, alone = find_pairs(models(f=unknown, t={**TOPK, **unknown}))
    assert [(pair.full, pair.counterpart) for pair in pairs] == [("f", "t")]
    assert alone == []


def test_several_counterparts_share_one_full_model(models):
    pairs, alone = find_pairs(models(f={}, a=TOPK, b={**TOPK, "k": 3}))
    assert [(p.label, p.full, p.counterpart) for p in pairs] == [
        ("even-pairs, topk-5, seed 1", "f", "a"),
        ("even-pairs, topk-3, seed 1", "f", "b"),
    ]
    assert alone == []


def test_other_attentions_are_left_out_unless_all_are_asked_for(models):
    table = models(f={}, t=TOPK, b={"attention": "banded", "k": 3}, c={"attention": "banded", "k": 3, "seed": 2})
    assert [pair.counterpart for pair in find_pairs(table)[0]] == ["t"]
    assert find_pairs(table)[1] == []
    assert [pair.counterpart for pair in find_pairs(table, "banded")[0]] == ["b"]
    everything, alone = find_pairs(table, None)
    assert [pair.counterpart for pair in everything] == ["t", "b"]
    assert alone == ["c"]


def test_other_snapshots_are_named_in_the_label(models):
    early = {"snapshot": "initialisation"}
    pairs, _ = find_pairs(models(f=early, t={**TOPK, **early}, g={}, u=TOPK))
    assert [pair.label for pair in pairs] == [
        "even-pairs, topk-5, seed 1, initialisation",
        "even-pairs, topk-5, seed 1",
    ]


def test_without_models_of_these_kinds_there_is_nothing_to_pair(models):
    assert find_pairs(models(b={"attention": "banded", "k": 3})) == ([], [])


@pytest.mark.parametrize(
    ("full", "topk", "samples", "facts", "said"),
    [  # the 97.5th percentile of chance: 54.4% of 500 samples, 51.4% of 5,000, 63.9% of 50
        (0.508, 0.519, 500, {}, ["f", "t"]),
        (0.508, 0.55, 500, {}, ["f"]),
        (1.0, 0.519, 500, {}, ["t"]),
        (0.1, 0.519, 5000, {}, ["f"]),
        (0.6, 0.6, 50, {}, ["f", "t"]),
        (0.55, 0.55, 500, {}, []),
        (0.5, 0.5, 49, {}, []),  # too few to tell
        (float("nan"), 0.5, 500, {}, ["t"]),
        (0.5, 0.5, 500, {"snapshot": "initialisation"}, []),  # not meant to have learned
        (0.5, 0.5, 500, {"source": "hugging face"}, []),
        (0.2, 0.2, 500, {"task": "modular-arithmetic"}, ["f", "t"]),  # one of five
        (0.5, 0.5, 500, {"task": "modular-arithmetic"}, []),
        (0.5, 0.5, 500, {"task": "text-of-mine"}, []),
    ],
)
def test_compared_models_at_chance_are_said_not_to_have_learned(made_up, full, topk, samples, facts, said):
    both = facts | {"samples": samples}
    models = ("f", SOME, both | {"accuracy": full}), ("t", SOME, TOPK | both | {"accuracy": topk})
    found = unlearned_sentences(Findings(made_up(*models)))
    assert len(found) == bool(said)
    for sentence in found:
        named = {"f": ", full, seed 1, last (", "t": ", topk-5, seed 1, last ("}
        assert [model for model, words in named.items() if words in sentence] == said
        assert ("neither of them has learned" if len(said) == 2 else "it has not learned") in sentence


def test_what_is_not_compared_is_not_judged(made_up):
    assert unlearned_sentences(Findings(made_up(("f", SOME, {"samples": 500, "accuracy": 0.5})))) == []


def test_several_long_seeds_are_called_by_letters_in_their_order(models):
    three = models(
        f={"seed": 500_000_000}, t={**TOPK, "seed": 500_000_000},
        g={"seed": 400_000_000}, u={**TOPK, "seed": 400_000_000}, h={"seed": 300_000_000},
    )  # fmt: skip
    assert seed_names(three) == {300_000_000: "A", 400_000_000: "B", 500_000_000: "C"}
    assert [pair.label for pair in find_pairs(three)[0]] == [
        "even-pairs, topk-5, seed C",
        "even-pairs, topk-5, seed B",
    ]
    some = three[three["seed"] != 300_000_000]  # called as among all
    assert find_pairs(some, seeds=seed_names(three))[0] == find_pairs(three)[0]
    assert [panel.title for panel in panels_of(some, seeds=seed_names(three))] == [
        "even-pairs, seed C", "even-pairs, seed B"
    ]  # fmt: skip
    assert "B is 400000000" in seed_sentence(three)


@pytest.mark.parametrize("seeds", [(1, 2), (500_000_000, 500_000_000), (7, 500_000_000)])
def test_one_seed_and_short_ones_are_called_by_themselves(seeds, models):
    both = models(f={"seed": seeds[0]}, g={"seed": seeds[1]})
    assert seed_names(both) == {seed: str(seed) for seed in seeds}
    assert seed_sentence(both) == ""
