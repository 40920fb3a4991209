"""One look out of those of several ranks: by hand, its order, its heads, and where a median lies."""

import math
import statistics

import torch

from semdiag.measuring.calls.monitor_heads import Look, Reduction, monitored_columns


def head(module, number, rows, layer=0, occurrence=0, **values):
    place = {"step": 3, "layer": layer, "head": number, "module": module, "occurrence": occurrence, "rows": rows}
    return place | dict.fromkeys(monitored_columns(()), math.nan) | values


def look(step, heads, **parts):
    """A rank's, with a row for each layer's occurrence."""
    rows = {(row["module"], row["occurrence"]): {**row, "entropy": 1.0} for row in heads}
    layers = [
        {name: row[name] for name in ("step", "layer", "module", "occurrence", "rows", "entropy")}
        for row in rows.values()
    ]
    return Look(step, layers, heads, parts)


def reduced(*ranks):
    return Reduction()([look(3, heads) for heads in ranks])[1]


def test_two_ranks_by_hand():
    """Of 1 and 3 rows: the larger maximum, the smaller minimum, (1 · 2 + 3 · 6) / 4 = 5."""
    (found,) = reduced(
        [head("a", 0, 1, max_logit=7.0, least_entropy=0.5, entropy=2.0, xi=0.25)],
        [head("a", 0, 3, max_logit=math.inf, least_entropy=0.25, entropy=6.0)],
    )
    assert (found["rows"], found["max_logit"], found["least_entropy"]) == (4, math.inf, 0.25)
    assert (found["entropy"], found["xi"]) == (5.0, 0.25)  # xi: the other rank has none
    assert math.isnan(found["separation"])


def test_the_order_is_that_of_one_process_and_does_not_depend_on_who_sees_what():
    one = [head("a", 0, 1), head("a", 1, 1), head("b", 0, 1, layer=1), head("a", 0, 1, occurrence=1)]
    found = reduced(one[:2], one)
    assert [(row["module"], row["occurrence"], row["head"], row["rows"]) for row in found] == [
        ("a", 0, 0, 2),
        ("a", 0, 1, 2),
        ("b", 0, 0, 1),
        ("a", 1, 0, 1),
    ]


def test_ranks_that_hold_other_weights_have_other_heads_whose_numbers_stay():
    reduction, heads = Reduction(), [head("a", 0, 5), head("a", 1, 5)]
    first, second = ([look(step, heads, a=part) for part in ("x", "y", "x")] for step in (0, 1))
    for looks, numbers, rows in (
        (first, [0, 1, 2, 3], [10, 10, 5, 5]),
        ([look(1, []), second[1], look(1, [])], [2, 3], [5, 5]),
    ):
        found = reduction(looks)[1]
        assert [row["head"] for row in found] == numbers
        assert [row["rows"] for row in found] == rows


def test_modules_of_the_same_number_in_different_ranks_are_numbered_anew():
    for table in Reduction()([look(0, [head(name, 0, 1)]) for name in "ab"]):
        assert [(row["module"], row["layer"]) for row in table] == [("a", 0), ("b", 1)]


def test_ranks_without_a_row_have_none():
    assert Reduction()([look(0, []), look(0, [])]) == ([], [])


def test_a_median_of_all_rows_lies_where_the_reduced_one_does():
    """The bound that the docstring states, for medians of any split of any numbers."""
    generator, known, ranks = torch.Generator().manual_seed(0), [], ([], [])
    for number in range(200):
        values = torch.randn(30, generator=generator, dtype=torch.float64).exp().tolist()
        cut = int(torch.randint(1, 29, (), generator=generator))
        parts = values[:cut], values[cut:]
        known.append((statistics.median(values), [statistics.median(part) for part in parts]))
        for rank, part, median in zip(ranks, parts, known[-1][1], strict=True):
            rank.append(head("a", number, len(part), xi=median))
    for (median, medians), found in zip(known, reduced(*ranks), strict=True):
        for each in (median, found["xi"]):
            assert min(medians) * (1 - 1e-14) <= each <= max(medians) * (1 + 1e-14)
