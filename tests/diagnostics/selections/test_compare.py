"""Two selections compared: beside loops over rows, in every layout."""

import math
import random

import numpy as np
import pytest
import torch

from semdiag import InputError
from semdiag.mathematics.rounding import FORMATS
from semdiag.questions.selections.answer import comparison_summary
from semdiag.selections.compare import compare_selections
from semdiag.selections.files import SelectionFile


def selection(indices, name="a.npz", **known):
    given = {key: torch.as_tensor(value) for key, value in known.items()}
    return SelectionFile(name, torch.as_tensor(indices), **given)


def right(scores, chosen, name):
    """Whether a set is a top-k of rounded scores, when two engines have rounded them: by its definition."""
    kind = FORMATS[name]
    unit, subnormal = 2.0**-kind.digits, 2.0 ** (kind.exponent - kind.digits + 1)
    rest = [score for key, score in enumerate(scores) if key not in chosen]
    if len(chosen) < K:
        return False
    low, high = min(scores[key] for key in chosen), max(rest)
    return high - low <= 2 * (unit * abs(high) + unit * abs(low) + subnormal)


K, N = 3, 8


def naive(own, other, scores, weights):
    """Overlap, class and weight lost of one row."""
    first, second = [list(dict.fromkeys(key for key in row if key >= 0)) for row in (own, other)]
    common = set(first) & set(second)
    overlap = len(common) / max(len(first), len(second)) if first or second else 1.0
    same = (
        "same"
        if overlap == 1
        else "numeric"
        if all(right(scores, s, "bfloat16") for s in (first, second))
        else "bug"
    )
    total = sum(weights[own.index(key)] for key in first)
    lost = sum(weights[own.index(key)] for key in first if key not in second) / total if total else math.nan
    return overlap, same, lost


def test_rows_are_what_loops_say():
    draw = random.Random(5)
    shape = 300, 2
    levels = [1.0, 1.002, 1.005, 1.01, 1.03, 2.0, 0.0]
    scores = [[[draw.choice(levels) for _ in range(N)] for _ in range(2)] for _ in range(300)]
    rows = [[], []]
    for token, layer in np.ndindex(shape):
        order = sorted(range(N), key=lambda key, own=scores[token][layer]: (-own[key], draw.random()))
        for each in rows:
            keys = draw.choice(
                (order[:K], order[:K], [*order[: K - 1], order[K]], draw.sample([*range(N), -1], K))
            )
            if draw.random() < 0.1:
                keys[0] = keys[1]
            each.append(draw.sample(keys, K))
    first, second = (np.array(each).reshape(*shape, K) for each in rows)
    weights = [[[draw.random() for _ in range(K)] for _ in range(2)] for _ in range(300)]
    known = {"scores": np.array(scores, np.float32), "weights": np.array(weights)}
    found = compare_selections(selection(first, **known), selection(second), "bfloat16")
    expected = [
        naive(own, other, scores[i // 2][i % 2], weights[i // 2][i % 2])
        for i, (own, other) in enumerate(zip(*rows, strict=True))
    ]
    table = found.rows
    assert table["token"].tolist() == [i // 2 for i in range(600)]
    assert table["layer"].tolist() == [i % 2 for i in range(600)]
    assert table["class"].tolist() == [row[1] for row in expected]
    assert min(table["class"].value_counts()[["same", "numeric", "bug"]]) > 30
    for column, place in (("overlap", 0), ("lost", 2)):  # float32 weights: sums of three
        np.testing.assert_allclose(table[column], [row[place] for row in expected], rtol=0, atol=1e-6)
    twice = [sum(len({k for k in row if k >= 0}) < sum(k >= 0 for k in row) for row in each) for each in rows]
    assert found.repeats == tuple(twice)
    assert min(twice) > 0


def test_two_engines_that_round_the_same_scores_differ_by_rounding_alone():
    """The theorem of docs/theory.md#rounded-scores, for two engines that break ties each in its own way."""
    generator = torch.Generator().manual_seed(0)
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        true = torch.randn(400, 2, 32, generator=generator) * 2
        rounded = true.to(getattr(torch, name)).float()
        first = rounded.argsort(dim=-1, descending=True, stable=True)[..., :8]
        second = 31 - rounded.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :8]
        found = compare_selections(selection(first, scores=rounded), selection(second), name)
        counts = found.rows["class"].value_counts()
        assert counts["bug"] == counts["unexplained"] == 0
        assert counts["numeric"] > 0, name
        own = true.argsort(dim=-1, descending=True)[..., :8]  # another engine, in full precision
        found = compare_selections(selection(first, scores=rounded), selection(own), name)
        assert found.rows["class"].value_counts()["bug"] == 0


def test_a_wrong_engine_is_a_bug_though_the_other_one_is_right():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0]]])
    wrong, fine = [[[0, 3]]], [[[0, 1]]]
    for first, second in ((wrong, fine), (fine, wrong)):
        for known in ({"first": scores}, {"second": scores}):
            a = selection(first, **({"scores": known["first"]} if "first" in known else {}))
            b = selection(second, **({"scores": known["second"]} if "second" in known else {}))
            assert compare_selections(a, b).rows["class"].tolist() == ["bug"]


def test_scores_that_differ_are_told_from_selections_that_do():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0]], [[5.0, 4.0, 3.0, 2.0]]])
    others = torch.tensor([[[5.0, 2.0, 3.0, 4.0]], [[5.0, 4.0, 3.0, 2.0]]])
    first, second = [[[0, 1]], [[0, 1]]], [[[0, 3]], [[0, 3]]]
    found = compare_selections(selection(first, scores=scores), selection(second, scores=others))
    assert found.rows["class"].tolist() == ["bug", "bug"]
    assert found.by_own_scores == 1
    assert compare_selections(selection(first, scores=scores), selection(second)).by_own_scores is None
    assert compare_selections(selection(first, scores=scores), selection(first, scores=others)).by_own_scores == 0


@pytest.mark.parametrize("mask", [-math.inf, torch.finfo(torch.float32).min])
def test_a_key_that_one_side_forbids_is_never_rounding(mask):
    """A mask off by one: every query loses its last key, the first ones with a tie behind it."""
    scores = torch.randn(24, 1, 24, generator=torch.Generator().manual_seed(0)).relu()
    later = torch.arange(24) > torch.arange(24)[:, None]
    right = scores.masked_fill(later[:, None], mask)
    off_by_one = scores.masked_fill((later | torch.eye(24, dtype=torch.bool))[:, None], mask)
    first, second = (each.topk(4, dim=-1).indices for each in (right, off_by_one))
    found = compare_selections(selection(first, scores=right), selection(second, scores=off_by_one))
    held = (first == torch.arange(24)[:, None, None]).any(-1).flatten()
    of_rows = found.rows["class"].to_numpy()
    assert 8 < int(held.sum()) < 24
    assert (of_rows[held.numpy()] == "bug").all()
    assert found.unexplained["token"].tolist() == held.nonzero().flatten().tolist()


def test_scores_that_are_not_each_others_rounding_explain_nothing():
    """Both choices are near ties by both scores, whose numbers are others."""
    near = torch.tensor([[[5.0, 5.001, 0.0]]])
    found = compare_selections(selection([[[0]]], scores=near), selection([[[1]]], scores=near + 3), "bfloat16")
    assert found.rows["class"].tolist() == ["bug"]
    found = compare_selections(selection([[[0]]], scores=near), selection([[[1]]], scores=near + 0.01), "bfloat16")
    assert found.rows["class"].tolist() == ["numeric"]


def test_without_scores_differences_are_unexplained():
    found = compare_selections(selection([[[0, 1]], [[2, 1]]]), selection([[[1, 0]], [[2, 3]]]))
    assert found.rows["class"].tolist() == ["same", "unexplained"]
    assert found.weight_of == ""
    assert found.rows["lost"].isna().all()


def test_weight_of_scores_is_their_softmax_and_of_b_where_a_has_none():
    scores = torch.tensor([[[1.0, 2.0, 0.0]]])
    found = compare_selections(selection([[[0, 1]]], scores=scores), selection([[[2, 1]]]))
    assert found.rows["lost"][0] == pytest.approx(1 / (1 + math.e), abs=1e-12)
    found = compare_selections(selection([[[2, 1]]]), selection([[[0, 1]]], scores=scores))
    assert found.rows["lost"][0] == pytest.approx(1 / (1 + math.e), abs=1e-12)
    assert found.weight_of == "softmax of the scores of B"


# Layouts


def random_choices(seed, tokens=60, layers=4, n=32, k=4):
    draw = np.random.default_rng(seed)
    return draw.random((tokens, layers, n)).argsort(-1)[..., :k]


def test_every_layout_is_the_same_selection():
    whole = random_choices(0)
    usual = selection(whole)
    others = {
        "batch,sequence,layers": whole.reshape(5, 12, 4, 4),
        "layers,tokens": whole.transpose(1, 0, 2),
        "layers,batch,sequence": whole.reshape(5, 12, 4, 4).transpose(2, 0, 1, 3),
        "": whole.reshape(5, 12, 4, 4),
    }
    for layout, indices in others.items():
        found = compare_selections(usual, selection(indices.copy()), layouts=("", layout))
        assert (found.rows["overlap"] == 1).all(), layout
        assert (found.tokens, found.rows["layer"].max()) == (60, 3)
    heads = selection(random_choices(1, layers=6).reshape(60, 2, 3, 4))
    found = compare_selections(heads, heads, layouts=("tokens,layers,heads",) * 2)
    assert found.rows[["layer", "head"]].drop_duplicates().values.tolist() == [
        [i, j] for i in (0, 1) for j in (0, 1, 2)
    ]


def test_a_padded_batch_is_the_packed_tokens():
    packed = random_choices(2, tokens=9)
    padded = np.full((2, 6, 4, 4), -1)
    padded[0], padded[1, 3:] = packed[:6], packed[6:]
    found = compare_selections(selection(packed), selection(padded, lengths=[6, 3], starts=[0, 3]))
    assert (found.rows["overlap"] == 1).all()
    with pytest.raises(InputError, match="differ in tokens: 9 and 12"):
        compare_selections(selection(packed), selection(padded))


# The answer


def test_the_summary_names_the_first_layer_and_counts_every_class():
    scores = torch.tensor([9.0, 8.0, 7.0, 1.0]).expand(5, 3, 4)
    first = np.tile([0, 1], (5, 3, 1))
    second = first.copy()
    second[1, 1], second[1, 2], second[4, 2] = (0, 3), (3, 2), (1, 0)
    found = comparison_summary(
        [compare_selections(selection(first, scores=scores), selection(second))], "a", "b", {}, {}
    )
    (entry,) = found["results"]
    assert (entry["first_layer"], entry["changed"], entry["passed"]) == (1, 2, False)
    assert entry["classes"] == {"same": 13, "numeric": 0, "bug": 2, "unexplained": 0}
    assert [(row["changed"], row["first"], row["bug"]) for row in entry["layers"]] == [
        (0, 0, 0),
        (1, 1, 1),
        (1, 0, 1),
    ]
    assert (entry["worst"]["token"], entry["worst"]["layer"], entry["worst"]["overlap"]) == (1, 2, 0.0)
    assert entry["lost"]["largest"] == pytest.approx(1.0, abs=1e-12)
    alike = [compare_selections(selection(first), selection(first))]
    same = comparison_summary(alike, "a", "a", {}, {})["results"][0]
    assert (same["first_layer"], same["changed"], same["passed"], same["overlap"]) == (None, 0, True, 1.0)


# Bad input

ONE, FOUR = [[[0, 1]], [[2, 3]]], torch.zeros(2, 1, 4)


@pytest.mark.parametrize(
    ("first", "second", "layouts", "said"),
    [
        (selection(ONE), selection([[[0]], [[2]]]), ("", ""), "differ in k: 2 and 1"),
        (selection(ONE), selection(ONE[:1]), ("", ""), "differ in tokens: 2 and 1. Are they"),
        (selection(ONE), selection([[[0, 1], [0, 1]]] * 2), ("", ""), "differ in layers: 1 and 2"),
        (selection(ONE), selection(np.array(ONE, np.int32)), ("", ""), "types of indices: int64 and int32"),
        (selection(ONE), selection(np.array(ONE, float)), ("", ""), "indices must be whole numbers"),
        (selection(ONE, scores=FOUR), selection(ONE, scores=torch.zeros(2, 1, 5)), ("", ""), "4 and 5"),
        (selection(ONE, scores=FOUR), selection(ONE, scores=FOUR.double()), ("", ""), "type of scores"),
        (selection(ONE, scores=FOUR * math.nan), selection(ONE), ("", ""), "a.npz: the scores hold NaN"),
        (selection(ONE, scores=FOUR), selection([[[0, 9]], [[0, 9]]]), ("", ""), "names key 9"),
        (selection([[[0, 9]], [[0, 9]]], scores=FOUR), selection(ONE), ("", ""), "names key 9"),
        (selection(ONE, weights=torch.tensor([[[-1.0, 0]], [[1, 1]]])), selection(ONE), ("", ""), "not negative"),
        (selection(ONE, weights=torch.ones(2, 1, 3)), selection(ONE), ("", ""), "one for each index"),
        (selection(ONE, tokens=[1, 2]), selection(ONE, tokens=[1, 3]), ("", ""), "their ids differ"),
        (selection(ONE, tokens=[1, 2]), selection(ONE, tokens=[2, 1]), ("", ""), "same tokens in another order"),
        (selection(ONE, tokens=[1]), selection(ONE), ("", ""), "tokens holds 1 ids"),
        (selection(ONE, lengths=[3]), selection(ONE), ("", ""), "lengths and starts must lie within"),
        (selection(ONE, lengths=[1, 1]), selection(ONE), ("", ""), "one number for each of 1 sequences"),
        (selection(ONE), selection(ONE), ("tokens", ""), "indices have 2 dimensions before k"),
        (selection(ONE), selection(ONE), ("tokens,tokens", ""), "indices have 2 dimensions before k"),
        (selection(ONE), selection(ONE), ("layers,heads", ""), "indices have 2 dimensions before k"),
        (selection(ONE), selection(ONE), ("tokens,experts", ""), "Got 'tokens,experts'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(first, second, layouts, said):
    with pytest.raises(InputError, match=said) as refused:
        compare_selections(first, second, layouts=layouts)
    assert "\n" not in str(refused.value)
