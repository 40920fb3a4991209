"""Row statistics by compiled kernels against those by torch in double precision, and against sorting in Python."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from semdiag.mathematics import compiled_rows, row_kernels
from semdiag.mathematics import row_statistics as module
from semdiag.mathematics.row_statistics import row_statistics
from semdiag_models.kernels import largest_kernels, selected_kernels

NO_ORDER = np.empty((0, 0, 0, 0), np.int32)
EPS = torch.finfo(torch.float32).eps
EXACT = (
    "keys",
    "kept",
    "non_finite",
    "maximum",
    "minimum",
    "kept_maximum",
    "kept_minimum",
    "dropped_maximum",
    "top",
)


def numbers(*shape, seed=0, spread=3):
    """Whole numbers: their dot products are exact in single precision, too, and there are ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-spread, spread + 1, shape, generator=generator).float()


def some(*shape, seed=0, share=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.fixture
def kernels(monkeypatch):
    """Every call in single precision is read by kernels; the list says of each strip whether they read it."""
    read, read_strip = [], compiled_rows.read_strip
    monkeypatch.setattr(module, "_MANY", 0)
    monkeypatch.setattr(module, "_LONG", 0)
    monkeypatch.setattr(compiled_rows, "read_strip", lambda *of: read.append(read_strip(*of)) or read[-1])
    return read


def assert_as_in_double(q, k, top=4, **more):
    """Against torch in double precision; sums of n weights in single precision are off by (3 + 10) eps at most.

    A weight is off by 3 eps: 2 of its own, 1 of z - max z. At most 1,024 weights are added in single precision, in
    any order: by 1,024 / 2 eps in the worst case, by sqrt(1,024) / 3 as a rule, all weights being positive.
    """
    found = row_statistics(q, k, 1.0, top=top, **more)
    expected = row_statistics(q.double(), k.double(), 1.0, top=top, **more)
    for name in EXACT:
        ours, theirs = getattr(found, name).double(), getattr(expected, name).double()
        assert torch.equal(ours, theirs), name
    largest = expected.top.clamp(min=-1e30).abs().max().item()
    for name in ("log_sum_exp", "kept_log_sum_exp", "entropy"):
        ours, theirs = getattr(found, name).double(), getattr(expected, name)
        close = {"rtol": 0, "atol": 13 * EPS + 2 * EPS * largest, "equal_nan": True}
        torch.testing.assert_close(ours, theirs, **close, msg=name)
    for kept in (None, *range(1, top + 1)):
        assert torch.equal(found.key_load(kept), expected.key_load(kept)), f"load, k={kept}"
    return found


def call(batch=2, heads=2, queries=5, keys=300, width=3, shared=1):
    return {"q": numbers(batch, heads, queries, width), "k": numbers(batch, heads // shared, keys, width, seed=1)}


BIAS = numbers(2, 1, 5, 300, seed=4)
CALLS = {
    "every key": call(),
    "few keys": call(keys=7),
    "one key": call(keys=1),
    "as many keys as groups": call(keys=128),
    "long rows": call(keys=5000, queries=3),
    "causal": {**call(queries=300), "causal": True},
    "causal, after a cache": {**call(queries=20), "causal": True, "first_query": 270},
    "causal with PAD on the left": {**call(queries=300), "causal": True, "allowed": torch.arange(300) > 40},
    "a mask of all heads": {**call(), "allowed": some(2, 1, 5, 300)},
    "a mask of each head": {**call(), "allowed": some(2, 2, 5, 300)},
    "few keys allowed": {**call(), "allowed": some(2, 2, 5, 300, share=0.01)},
    "queries with all keys or none": {**call(), "allowed": some(2, 1, 5, 1)},
    "queries that do not count": {**call(), "queries": some(2, 5)},
    "grouped heads": call(heads=4, shared=2),
    "bias": {**call(), "bias": BIAS},
    "sinks": {**call(), "sinks": torch.tensor([1.0, -2.0])},
    "some queries of each head": {
        **call(queries=300),
        "causal": True,
        "places": torch.tensor([5, 299, 0, 17, -1]).expand(2, 2, 5),
    },
}


@pytest.mark.processor
@pytest.mark.parametrize("top", [0, 1, 33, 200])
@pytest.mark.parametrize("name", CALLS)
def test_statistics_are_those_of_torch(name, top, kernels):
    assert_as_in_double(**CALLS[name], top=top)
    assert kernels
    assert all(kernels)


@pytest.mark.processor
@pytest.mark.parametrize("strip", [1, 3000, 2**20])
@pytest.mark.parametrize("name", ["causal", "a mask of each head", "grouped heads", "some queries of each head"])
def test_strips_change_nothing(name, strip, kernels, monkeypatch):
    monkeypatch.setattr(module, "_STRIP", strip)
    assert_as_in_double(**CALLS[name], top=5)
    assert all(kernels)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads, kernels):
    before = torch.get_num_threads()
    found = []
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            found.append(row_statistics(**CALLS["causal"], scale=1.0, top=9))
    finally:
        torch.set_num_threads(before)
    for name, values in vars(found[0]).items():
        assert torch.equal(values, getattr(found[1], name)), name


def rows_read(scores, count):
    """Values and positions as the kernels find them in rows (r, n), of which -inf is no key."""
    allowed = scores > -math.inf
    rows = compiled_rows.empty_rows((1, 1, len(scores)), count)
    written = {name: values.numpy() for name, values in rows.items()}
    written.setdefault("order", NO_ORDER)
    for masked in (True, False):
        if masked:
            rows["keys"][0, 0] = allowed.sum(-1)
        elif not bool(allowed.all()):
            continue
        mask = allowed[None, None].numpy() if masked else None
        values = scores[None, None].numpy()
        assert row_kernels.read_rows(values, mask, 0, len(scores), (0, 0, 0), **written)
        yield rows


def assert_largest(scores, count):
    for rows in rows_read(scores, count):
        for i, row in enumerate(scores.tolist()):
            best = sorted((j for j in range(len(row)) if row[j] > -math.inf), key=lambda j, row=row: (-row[j], j))
            there = min(count, len(best))
            assert rows["order"][0, 0, i, :there].tolist() == best[:there]
            values = [row[j] for j in best[: count + 1]]
            assert rows["top"][0, 0, i].tolist() == values + [-math.inf] * (count + 1 - len(values))
            if best:
                assert rows["minimum"][0, 0, i] == row[best[-1]]


@pytest.mark.parametrize("keys", [0, 1, 32, 33, 34, 60, 1500])
@pytest.mark.parametrize("largest", [1.0, 3.4e38, -3.4e38, 1e-44])
def test_keys_that_a_mask_leaves_in_rows_with_few_and_extreme_scores(keys, largest):
    generator = torch.Generator().manual_seed(keys)
    scores = largest * torch.rand(3, 1500, generator=generator)
    scores[1] *= -1
    hidden = torch.stack([torch.randperm(1500, generator=generator) for _ in range(3)]) >= keys
    for count in (1, 33, 300):
        assert_largest(scores.masked_fill(hidden, -torch.inf), count)
        assert_largest(torch.round(10 * (scores / largest)).masked_fill(hidden, -torch.inf), count)  # with ties


@pytest.mark.processor
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0, 300.0, 3e38])
@pytest.mark.parametrize("length", [1, 5, 1024, 1025, 20_000])
def test_sums_of_weights_in_double_precision(length, spread):
    """Σ e and Σ p z; each weight is off by 3 eps, a sum of 1,024 of them by 10 eps more (see above)."""
    scores = spread * (torch.rand(3, length, generator=torch.Generator().manual_seed(1)) - 0.7)
    rows = next(rows_read(scores, 0))
    z = scores.double().numpy()
    x = z - z.max(1, keepdims=True)
    weights = np.exp(x)
    total = weights.sum(1)
    np.testing.assert_allclose(1 / rows["largest_weight"][0, 0].double().numpy(), total, rtol=13 * EPS)
    mean = (weights / total[:, None] * z).sum(1)
    spread_of_weights = (weights / total[:, None] * np.abs(x)).sum(1)
    atol = 26 * EPS * spread_of_weights + EPS * np.abs(z).max(1)
    assert (np.abs(rows["mean"][0, 0].numpy() - mean) <= atol).all()


@pytest.mark.parametrize("far", [-1e30, -3.4e38])
def test_keys_far_below_the_others_add_nothing_to_the_entropy(far, kernels):
    """Of weight 0, and 0 · z must be 0: a weight of 1e-38 times 3.4e38 is none."""
    bias = torch.full((1, 1, 1, 300), far)
    bias[..., 7:9] = 0.0
    zeros = torch.zeros(1, 1, 300, 1)
    found = row_statistics(zeros[:, :, :1], zeros, 1.0, bias=bias)
    assert kernels == [True]
    assert found.entropy.item() == pytest.approx(math.log(2), rel=1e-6)
    assert found.dispersion().item() == pytest.approx(-far)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_found(odd):
    scores = torch.randn(1, 1, 3, 300, generator=torch.Generator().manual_seed(0))
    rows = compiled_rows.empty_rows((1, 1, 3), 0)
    rows["keys"] += 300
    written = {name: values.numpy() for name, values in rows.items()} | {"order": NO_ORDER}
    for place, finite in ((None, True), ((0, 0, 1, 250), False)):
        if place:
            scores[place] = odd
        assert row_kernels.read_rows(scores.numpy(), None, 0, 3, (0, 0, 0), **written) is finite


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_strips_with_scores_that_are_not_finite_are_left_to_torch(odd, kernels, monkeypatch):
    given = call(queries=40)
    given["k"][1, 0, 200, 0] = odd
    found = row_statistics(**given, scale=1.0, top=5)
    assert kernels == [False]
    monkeypatch.setattr(module, "_STRIP", 40 * 300)
    parts = row_statistics(**given, scale=1.0, top=5)
    assert sorted(kernels[1:]) == [False, True, True, True]
    monkeypatch.setattr(module, "_MANY", math.inf)
    expected = row_statistics(**given, scale=1.0, top=5)
    assert expected.non_finite.any()
    for name, values in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), values, rtol=0, atol=0, equal_nan=True, msg=name)
        close = {"rtol": 0, "atol": 0 if name in (*EXACT, "load", "top_load") else 100 * EPS, "equal_nan": True}
        torch.testing.assert_close(getattr(parts, name), values, **close, msg=name)


def test_short_calls_other_precisions_and_selections_are_read_by_torch(kernels, monkeypatch):
    given = call()
    row_statistics(given["q"].double(), given["k"].double(), 1.0)
    row_statistics(**given, scale=1.0, selected=torch.zeros(2, 2, 5, 1, dtype=torch.int64))
    for name, least in (("_MANY", 2 * 2 * 5 * 300), ("_LONG", 300)):
        monkeypatch.setattr(module, name, least + 1)
        row_statistics(**given, scale=1.0)
        assert not kernels
        monkeypatch.setattr(module, name, least)
    row_statistics(**given, scale=1.0)
    assert kernels == [True]


def test_without_numba_torch_reads_everything(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "semdiag.mathematics.compiled_rows", None)  # as if it could not be imported
    assert_as_in_double(**CALLS["causal"])
    assert not kernels


def test_numba_is_imported_by_long_calls_alone():
    script = """
import sys, torch, semdiag
for length, wanted in ((64, False), (1600, True)):
    semdiag.row_statistics(*torch.ones(2, 1, 1, length, 4), scale=1.0)
    assert ("numba" in sys.modules) is wanted, length
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "kernel",
    [
        row_kernels.read_rows,
        row_kernels.count_ranks,
        largest_kernels._read,
        selected_kernels._mix,
        selected_kernels._differentiate,
    ],
)
def test_each_kernel_kept_on_disk_has_one_signature(kernel):
    """Numba numbers the files of several: two processes that compile two of them at once would mix them up."""
    assert len(kernel.signatures) == 1
    with pytest.raises(TypeError, match="No matching definition"):
        kernel(*(np.zeros((1, 1, 1, 1)) for _ in kernel.signatures[0]))
