"""Statistics of score rows against loops over rows and keys, whatever the strips that the scores are cut into."""

import functools
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from semdiag.mathematics import row_statistics as module
from semdiag.mathematics import score_strips
from semdiag.mathematics.row_statistics import row_statistics

PER_QUERY = (
    *("keys", "kept", "maximum", "minimum", "log_sum_exp"),
    *("kept_maximum", "kept_minimum", "kept_log_sum_exp", "dropped_maximum"),
)
TOP = 4


def naive(
    q,
    k,
    scale,
    allowed=None,
    selected=None,
    queries=None,
    top=0,
    bias=None,
    softcap=None,
    sinks=None,
    causal=False,
    first_query=0,
):
    """The definitions, read off one row at a time; ties go to the lower key position."""
    batch, heads, q_length, width = q.shape
    k_length = k.shape[2]
    shape = batch, heads, q_length
    allowed = torch.ones(1, dtype=torch.bool) if allowed is None else allowed
    allowed = allowed.expand(*shape, k_length)
    bias = torch.zeros(1) if bias is None else bias
    bias = bias.expand(*shape, k_length)
    shared = heads // k.shape[1]
    found = {name: torch.zeros(shape, dtype=torch.float64) for name in PER_QUERY}
    for quantity in ("dispersion", "separation"):
        for kept in (None, *range(1, top + 1)):
            found[quantity, kept] = torch.zeros(shape, dtype=torch.float64)
    found["largest_weight"], found["entropy"] = torch.zeros(2, *shape, dtype=torch.float64)
    for kept in range(1, top + 1):
        found["mass", kept] = torch.zeros(shape, dtype=torch.float64)
    for kept in (None, *range(1, top + 1)):
        found["load", kept] = torch.zeros(batch, heads, k_length, dtype=torch.int64)
    found["top"] = torch.full((*shape, top + 1), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(q_length):
                at = b, h, i
                sink = 0.0 if sinks is None else math.exp(sinks[h])
                z = {
                    j: scale * sum(float(q[b, h, i, d]) * float(k[b, h // shared, j, d]) for d in range(width))
                    for j in range(k_length)
                    if allowed[b, h, i, j] and not (causal and j > first_query + i)
                }
                if softcap is not None:
                    z = {j: softcap * math.tanh(score / softcap) for j, score in z.items()}
                z = {j: score + float(bias[b, h, i, j]) for j, score in z.items()}
                own = list(z) if selected is None else [j for j in selected[at].tolist() if j >= 0]
                best = sorted(z, key=lambda j: (-z[j], j))
                for kept in (None, *range(1, top + 1)):
                    inside = own if kept is None else best[:kept]
                    outside = [z[j] for j in z if j not in inside]
                    scores = [z[j] for j in inside]
                    low, high = min(scores, default=math.inf), max(scores, default=-math.inf)
                    found["dispersion", kept][at] = high - low if inside else math.nan
                    gap = low - max(outside) if outside else math.inf
                    found["separation", kept][at] = gap if inside else math.nan
                    if kept is None:
                        found["kept"][at], found["kept_maximum"][at], found["kept_minimum"][at] = (
                            len(own),
                            high,
                            low,
                        )
                        found["dropped_maximum"][at] = max(outside, default=-math.inf)
                        mass = sum(math.exp(score - high) for score in scores) + sink * math.exp(-high)
                        weights = [math.exp(score - high) / mass for score in scores]
                        weights += [sink * math.exp(-high) / mass] if sink and inside else []
                        found["entropy"][at] = -sum(p * math.log(p) for p in weights) if inside else math.nan
                        found["kept_log_sum_exp"][at] = high + math.log(mass) if inside else -math.inf
                        found["largest_weight"][at] = 1 / mass if inside else math.nan
                    if queries is None or queries[b, i]:
                        for j in inside:
                            found["load", kept][b, h, j] += 1
                found["keys"][at] = len(z)
                found["maximum"][at] = max(z.values(), default=-math.inf)
                found["minimum"][at] = min(z.values(), default=math.inf)
                largest = found["maximum"][at].item()
                total = sum(math.exp(score - largest) for score in z.values()) + sink * math.exp(-largest)
                for kept in range(1, top + 1):
                    share = sum(math.exp(z[j] - largest) for j in best[:kept]) / total if z else math.nan
                    found["mass", kept][at] = share
                found["log_sum_exp"][at] = largest + math.log(total) if z else -math.inf
                for place, j in enumerate(best[: top + 1]):
                    found["top"][(*at, place)] = z[j]
    return found


@functools.cache
def naive_case(case):
    return naive(**CASES[case](whole), scale=1.0, top=TOP)


def assert_as_defined(top=TOP, expected=None, **arguments):
    expected = expected or naive(**arguments, top=top)
    found = row_statistics(**arguments, top=top)
    close = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
    for name in (*PER_QUERY, "top"):
        torch.testing.assert_close(getattr(found, name).double(), expected[name], **close, msg=name)
    torch.testing.assert_close(found.largest_weight().double(), expected["largest_weight"], **close)
    # The entropy is a difference of terms as large as the scores.
    torch.testing.assert_close(found.entropy.double(), expected["entropy"], rtol=0, atol=1e-11, equal_nan=True)
    for kept in range(1, top + 1):
        torch.testing.assert_close(found.mass_kept(kept).double(), expected["mass", kept], **close)
    for kept in (None, *range(1, top + 1)):
        torch.testing.assert_close(found.dispersion(kept), expected["dispersion", kept], **close)
        torch.testing.assert_close(found.separation(kept), expected["separation", kept], **close)
        assert torch.equal(found.key_load(kept), expected["load", kept]), f"load, k={kept}"
    assert found.keys.shape == arguments["q"].shape[:3]
    assert not found.non_finite.any()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(*shape, seed=0):
    """Small whole numbers: their dot products are exact and full of ties."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).double()


def some(*shape, seed=0, share=0.6):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


BATCH, HEADS, LENGTH, WIDTH = 3, 2, 6, 4
SHAPE = BATCH, HEADS, LENGTH, WIDTH


def with_pad(numbers):
    lengths = torch.tensor([6, 4, 1])
    valid = torch.arange(LENGTH) < lengths[:, None]
    return {"q": numbers(*SHAPE), "k": numbers(*SHAPE, seed=1), "allowed": valid[:, None, None], "queries": valid}


def selecting(numbers):
    """Distinct positions in any order, with -1 among them, and one query without any."""
    order = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)).argsort(-1)
    selected = order[..., :3].masked_fill(some(BATCH, HEADS, LENGTH, 3, seed=4, share=0.3), -1)
    selected[1, 0, 2] = -1
    selected[0, 1, 5] = torch.tensor([-1, 0, -1])
    return {"q": numbers(*SHAPE), "k": numbers(*SHAPE, seed=1), "selected": selected}


def selecting_all(numbers):
    everything = torch.arange(LENGTH).expand(BATCH, HEADS, LENGTH, LENGTH).clone()
    return {"q": numbers(*SHAPE), "k": numbers(*SHAPE, seed=1), "selected": everything}


def selecting_among_valid(numbers):
    case = with_pad(numbers)
    block = torch.arange(LENGTH) // 3 * 3
    selected = (block[:, None] + torch.arange(3)).expand(BATCH, HEADS, -1, -1)
    there = case["allowed"].expand(BATCH, HEADS, LENGTH, LENGTH).gather(3, selected)
    return {**case, "selected": selected.masked_fill(~there, -1)}


def masked(mask):
    return lambda numbers: {"q": numbers(*SHAPE), "k": numbers(*SHAPE, seed=1), "allowed": mask}


def sized(q_length, k_length):
    return lambda numbers: {
        "q": numbers(BATCH, HEADS, q_length, WIDTH),
        "k": numbers(BATCH, HEADS, k_length, WIDTH, seed=1),
    }


def parts(**more):
    """A grouped, causal call with everything that external models add to their scores."""

    def case(numbers):
        found = {"q": numbers(2, 4, 5, WIDTH), "k": numbers(2, 2, 7, WIDTH, seed=1)}
        return {**found, **{name: value(numbers) if callable(value) else value for name, value in more.items()}}

    return case


_CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
_NO_KEYS = some(BATCH, HEADS, LENGTH, LENGTH, seed=5)
_NO_KEYS[1, 0, 3] = _NO_KEYS[0, 1, 0] = _NO_KEYS[2, :, 5] = False
CASES = {
    "every key": sized(LENGTH, LENGTH),
    "fewer queries than keys": sized(2, 7),
    "more queries than keys": sized(7, 2),
    "one key": sized(LENGTH, 1),
    "one query": sized(1, LENGTH),
    "PAD": with_pad,
    "causal, two axes": masked(_CAUSAL),
    "causal, four axes": masked(_CAUSAL[None, None]),
    "another mask for each head": masked(some(1, HEADS, LENGTH, LENGTH, seed=6)),
    "another mask for each sample": masked(some(BATCH, 1, LENGTH, LENGTH, seed=7)),
    "queries with all keys or none": masked(some(BATCH, 1, LENGTH, 1, seed=8)),
    "queries without keys": masked(_NO_KEYS),
    "grouped heads": parts(),
    "one key head": lambda numbers: {"q": numbers(*SHAPE), "k": numbers(BATCH, 1, 7, WIDTH, seed=1)},
    "causal": parts(causal=True),
    "causal, after a cache": parts(causal=True, first_query=2),
    "causal, more queries than keys": lambda n: {"q": n(1, 2, 7, 3), "k": n(1, 2, 4, 3), "causal": True},
    "causal with PAD on the left": parts(causal=True, allowed=torch.arange(7)[None, None, None] > 1),
    "causal with another mask": parts(causal=True, first_query=1, allowed=some(2, 1, 5, 7, seed=2)),
    "bias of each head": parts(bias=lambda numbers: numbers(1, 4, 5, 7, seed=2)),
    "bias of each key, causal": parts(bias=lambda numbers: numbers(2, 1, 1, 7, seed=2), causal=True),
    "soft cap": parts(softcap=0.8),
    "sinks": parts(sinks=torch.tensor([-1.0, 0.0, 2.0, 30.0], dtype=torch.float64)),
    "all at once": parts(
        bias=lambda numbers: numbers(2, 4, 5, 7, seed=2),
        softcap=1.5,
        sinks=torch.tensor([0.5, -0.5, 0.0, 1.0], dtype=torch.float64),
        causal=True,
        first_query=2,
        allowed=some(2, 1, 5, 7, seed=2),
        queries=some(2, 5, seed=3),
    ),
    "sinks, selected": lambda numbers: {**selecting(numbers), "sinks": torch.tensor([0.3, -2.0])},
    "selected": selecting,
    "all selected": selecting_all,
    "selected among valid": selecting_among_valid,
}
ROW = HEADS * LENGTH
STRIPS = (1, ROW, 2 * ROW, 4 * ROW, ROW * LENGTH, 2 * ROW * LENGTH, 2**20)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("numbers", [normal, whole])
def test_every_statistic_is_as_defined(case, numbers):
    assert_as_defined(**CASES[case](numbers), scale=-0.7 if numbers is normal else 1.0)


@pytest.mark.parametrize(
    "strip", [1, 4 * ROW, 2 * ROW * LENGTH]
)  # a row, four queries of six, two samples of three
@pytest.mark.parametrize("case", CASES)
def test_strips_change_nothing(case, strip, monkeypatch):
    monkeypatch.setattr(module, "_STRIP", strip)
    assert_as_defined(**CASES[case](whole), scale=1.0, expected=naive_case(case))


@pytest.mark.parametrize("strip", STRIPS)
@pytest.mark.parametrize("first_query", [0, 3])
def test_causal_strips_leave_out_the_future_and_nothing_else(strip, first_query, monkeypatch):
    monkeypatch.setattr(module, "_STRIP", strip)
    monkeypatch.setattr(score_strips, "_LONG", 1)
    q, k = normal(*SHAPE), normal(BATCH, HEADS, LENGTH + first_query, WIDTH, seed=1)
    past = torch.arange(LENGTH + first_query) <= torch.arange(first_query, LENGTH + first_query)[:, None]
    found = row_statistics(q, k, 0.7, top=3, causal=True, first_query=first_query)
    for name, expected in vars(row_statistics(q, k, 0.7, allowed=past, top=3)).items():
        torch.testing.assert_close(getattr(found, name), expected, rtol=1e-13, atol=1e-13, msg=name)
    assert torch.equal(found.key_load(2), row_statistics(q, k, 0.7, allowed=past, top=3).key_load(2))


@pytest.mark.parametrize("strip", [1, 2**20])
@pytest.mark.parametrize("case", CASES)
def test_some_queries_of_every_head_have_the_rows_of_the_whole(case, strip, monkeypatch):
    given = CASES[case](whole)
    (batch, heads, length, _), none = given["q"].shape, torch.tensor(-1)
    order = torch.rand(batch, heads, length, generator=torch.Generator().manual_seed(9)).argsort(-1)
    places = torch.where(order < max(1, length - 2), order, none)  # two of them are none
    expected = row_statistics(scale=1.0, top=TOP, **given)
    monkeypatch.setattr(module, "_STRIP", strip)
    found = row_statistics(scale=1.0, top=TOP, places=places, **given)
    for name in (*PER_QUERY, "entropy", "top"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        there = places if ours.ndim == 3 else places[..., None].expand_as(ours)
        theirs = theirs.gather(2, there.clamp(min=0))[there >= 0]
        torch.testing.assert_close(ours[there >= 0], theirs, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)
    # The loads of the others are those of a call in which they do not count.
    counted = given.pop("queries", None)
    alone = torch.zeros_like(expected.load)
    for h in range(heads):
        only = torch.zeros(batch, length, dtype=torch.bool)
        for b, i in (places[:, h] >= 0).nonzero().tolist():
            only[b, places[b, h, i]] = counted is None or counted[b, places[b, h, i]]
        alone[:, h] = row_statistics(scale=1.0, queries=only, **given).load[:, h]
    assert torch.equal(found.load, alone)


def test_a_sink_takes_weight_and_no_part_in_ranges_and_gaps():
    scores = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    found = of_scores(scores, top=1, sinks=torch.tensor([math.log(4)]))  # weights 3/8, 1/8 and the sink's 1/2
    assert found.largest_weight().item() == pytest.approx(3 / 8)
    assert found.mass_kept(1).item() == pytest.approx(3 / 8)
    assert found.dispersion().item() == found.separation(1).item() == pytest.approx(math.log(3))
    assert found.keys.item() == 2
    entropy = -sum(p * math.log(p) for p in (3 / 8, 1 / 8, 1 / 2))
    assert found.entropy.item() == pytest.approx(entropy)


def test_autocast_and_gradients_leave_the_statistics_alone():
    q, k = normal(*SHAPE).float().requires_grad_(), normal(*SHAPE, seed=1).float()
    expected = row_statistics(q.detach(), k, 0.3, top=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = row_statistics(q, k, 0.3, top=2)
    for name, value in vars(expected).items():
        assert torch.equal(getattr(found, name), value), name
        assert not getattr(found, name).requires_grad


@pytest.mark.parametrize("inside", [False, True])
def test_statistics_are_ordinary_tensors(inside):
    with torch.inference_mode(inside):
        found = row_statistics(normal(*SHAPE), normal(*SHAPE, seed=1), 1.0, top=2)
    for name in ("top", "minimum", "load", "top_load", "entropy"):
        assert inside or not getattr(found, name).is_inference(), name


def test_strips_are_cut_as_small_as_asked_for(monkeypatch):
    monkeypatch.setattr(module, "_STRIP", 2 * ROW)
    watch = _Allocations()
    with watch:
        row_statistics(normal(*SHAPE), normal(*SHAPE, seed=1), scale=1.0, top=1)
    assert 0 < watch.largest <= max(2 * ROW, math.prod(SHAPE))


@pytest.mark.parametrize("top", [0, 1, LENGTH - 1, LENGTH, LENGTH + 3])
def test_counterfactuals_may_ask_for_more_than_there_are_keys(top):
    for case in ("every key", "PAD", "queries without keys"):
        assert_as_defined(**CASES[case](whole), scale=1.0, top=top)


@pytest.mark.parametrize("strip", STRIPS)
def test_equal_scores_go_to_the_lower_position(strip, monkeypatch):
    monkeypatch.setattr(module, "_STRIP", strip)
    zeros = torch.zeros(*SHAPE, dtype=torch.float64)
    found = row_statistics(zeros, zeros, scale=1.0, top=LENGTH)
    everyone, none = torch.full((BATCH, HEADS, LENGTH), LENGTH), torch.zeros(BATCH, HEADS, LENGTH)
    for k in range(1, LENGTH + 1):
        assert torch.equal(found.key_load(k), everyone * (torch.arange(LENGTH) < k))
        assert torch.equal(found.dispersion(k), none.double())
        assert (found.separation(k) == (0 if k < LENGTH else math.inf)).all()


def test_ties_in_long_rows_go_to_the_lower_position():
    scores = torch.randint(2, (3, 1000), generator=torch.Generator().manual_seed(0)).double()
    found = of_scores(scores, top=700)
    order = [sorted(range(1000), key=lambda j, row=row: (-row[j], j)) for row in scores.tolist()]
    for k in (1, 17, 400, 700):
        loads = torch.zeros(1000, dtype=torch.int64)
        for best in order:
            loads[best[:k]] += 1
        assert torch.equal(found.key_load(k)[0, 0], loads)


def test_of_equal_scores_the_allowed_come_before_the_masked():
    zeros = torch.zeros(1, 1, 2, 1)
    keys = torch.zeros(1, 1, 4, 1)
    found = row_statistics(zeros, keys, 1.0, allowed=torch.tensor([False, True, False, True]), top=3)
    assert [found.key_load(k).tolist() for k in (1, 2, 3)] == [
        [[[0, 2, 0, 0]]],
        [[[0, 2, 0, 2]]],
        [[[0, 2, 0, 2]]],
    ]


def test_a_case_by_hand():
    scores = torch.tensor([[5.0, 1.0, 4.0, -2.0]])
    found = of_scores(scores, top=3)
    assert found.dispersion().item() == 7
    assert [found.dispersion(k).item() for k in (1, 2, 3)] == [0, 1, 4]
    assert [found.separation(k).item() for k in (1, 2, 3)] == [1, 3, 3]
    assert found.separation().item() == math.inf
    assert found.key_load(2).tolist() == [[[1, 0, 1, 0]]]
    own = of_scores(scores, selected=torch.tensor([[[[1, 2, -1]]]]))
    assert (own.dispersion().item(), own.separation().item()) == (3, -4)
    assert own.key_load().tolist() == [[[0, 1, 1, 0]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype):
    q, k = (10 * normal(*SHAPE)).to(dtype), normal(*SHAPE, seed=9).to(dtype)
    found, expected = row_statistics(q, k, 0.3, top=2), row_statistics(q.float(), k.float(), 0.3, top=2)
    assert found.maximum.dtype == found.dispersion(2).dtype == torch.float32
    assert torch.equal(found.dispersion(), expected.dispersion())
    assert torch.equal(found.separation(2), expected.separation(2))
    rounded = row_statistics(q.double(), k.double(), 0.3).dispersion()
    torch.testing.assert_close(found.dispersion().double(), rounded, rtol=1e-5, atol=1e-5)


def test_precision_is_that_of_the_queries():
    for dtype in (torch.float32, torch.float64):
        assert row_statistics(normal(*SHAPE).to(dtype), normal(*SHAPE).to(dtype), 1.0).log_sum_exp.dtype == dtype


@pytest.mark.parametrize("strip", STRIPS)
def test_scores_that_are_not_finite_are_counted_where_they_are_allowed(strip, monkeypatch):
    monkeypatch.setattr(module, "_STRIP", strip)
    q, k = normal(*SHAPE), normal(*SHAPE, seed=1)
    q[0, 1, 2, 0], k[1, 0, 4, 3] = math.nan, math.inf
    assert row_statistics(q, k, 1.0).non_finite[0, 1].tolist() == [0, 0, LENGTH, 0, 0, 0]
    assert row_statistics(q, k, 1.0).non_finite[1, 0].tolist() == [1] * LENGTH
    allowed = torch.arange(LENGTH) != 4
    masked = row_statistics(q, k, 1.0, allowed=allowed, top=2)
    assert masked.non_finite.sum().item() == LENGTH - 1
    assert masked.dispersion()[1].isfinite().all()
    assert masked.dispersion()[0, 1].isnan().tolist() == [False, False, True, False, False, False]


def test_queries_that_do_not_count_put_no_load_on_keys():
    queries = torch.tensor([[True] * 6, [False] * 6, [True, False] * 3])
    found = row_statistics(normal(*SHAPE), normal(*SHAPE, seed=1), 1.0, queries=queries, top=2)
    assert found.key_load().tolist() == [[[n] * 6] * 2 for n in (6, 0, 3)]
    assert found.key_load(2).sum(-1).tolist() == [[2 * n] * 2 for n in (6, 0, 3)]
    assert found.dispersion()[1].isfinite().all()


@pytest.mark.parametrize("k", [0, 3, -1])
@pytest.mark.parametrize("quantity", ["dispersion", "separation", "key_load"])
def test_a_k_that_was_not_asked_for_is_refused(quantity, k):
    found = row_statistics(normal(*SHAPE), normal(*SHAPE), 1.0, top=2)
    with pytest.raises(ValueError, match=rf"^k must lie in 1 … 2, the K these statistics hold. Got k={k}\.$"):
        getattr(found, quantity)(k)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^top must not be negative. Got top=-1\.$"):
        row_statistics(normal(*SHAPE), normal(*SHAPE), 1.0, top=-1)
    for other in ((BATCH, HEADS, LENGTH, 5), (BATCH, 3, LENGTH, WIDTH), (1, HEADS, LENGTH, WIDTH)):
        with pytest.raises(
            ValueError,
            match=r"q and k must agree in batch, width and heads \(those of k may be a divisor\). Got \(3, 2, 6, ",
        ):
            row_statistics(normal(*SHAPE), normal(*other), 1.0)
    for q_length, k_length in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match=r"^There must be at least one query and one key. Got \(1, 1, "):
            row_statistics(normal(1, 1, q_length, 2), normal(1, 1, k_length, 2), 1.0)


def of_scores(scores, scale=1.0, **arguments):
    """Statistics of a given (Lq, Lk) table of scores: the keys are unit vectors."""
    keys = torch.eye(scores.shape[1], dtype=scores.dtype)
    return row_statistics(scores[None, None], keys[None, None], scale, **arguments)


@st.composite
def tables(draw, distinct=False):
    """Scores (Lq, Lk): whole numbers, so that sums and differences are exact."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    row = st.lists(st.integers(-30, 30), min_size=columns, max_size=columns, unique=distinct)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)), dtype=torch.float64)


@pytest.mark.slow
@given(tables(), st.integers(-1000, 1000))
def test_shifting_rows_leaves_dispersion_and_separation_unchanged(scores, shift):
    shifts = shift * torch.arange(1, len(scores) + 1)[:, None]
    found, shifted = of_scores(scores, top=4), of_scores(scores + shifts, top=4)
    for k in (None, 1, 2, 3, 4):
        assert torch.equal(found.dispersion(k), shifted.dispersion(k))
        assert torch.equal(found.separation(k), shifted.separation(k))
        assert torch.equal(found.key_load(k), shifted.key_load(k))


@pytest.mark.slow
@given(tables(distinct=True), st.data())
def test_permuting_keys_permutes_loads(scores, data):
    order = data.draw(st.permutations(range(scores.shape[1])))
    found, permuted = of_scores(scores, top=4), of_scores(scores[:, order], top=4)
    for k in (1, 2, 3, 4):
        assert torch.equal(found.key_load(k)[..., order], permuted.key_load(k))
        assert torch.equal(found.dispersion(k), permuted.dispersion(k))
        assert torch.equal(found.separation(k), permuted.separation(k))


@given(tables())
def test_more_heavy_hitters_have_no_smaller_dispersion_up_to_that_of_all_keys(scores):
    keys = scores.shape[1]
    found = of_scores(scores, top=keys)
    dispersions = torch.stack([found.dispersion(k) for k in range(1, keys + 1)])
    assert (dispersions[0] == 0).all()
    assert (dispersions.diff(dim=0) >= 0).all()
    assert torch.equal(dispersions[-1], found.dispersion())
    assert all((found.separation(k) >= 0).all() for k in range(1, keys + 1))


@pytest.mark.slow
@given(tables(), st.data())
def test_loads_add_up_to_the_keys_that_are_kept(scores, data):
    rows, columns = scores.shape
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)))
    found = of_scores(scores, allowed=allowed.view(rows, columns), top=columns + 1)
    assert found.key_load().sum() == found.kept.sum() == allowed.sum()
    for k in range(1, columns + 2):
        assert found.key_load(k).sum() == found.keys.clamp(max=k).sum()
        assert (found.key_load(k) <= found.key_load()).all()


@pytest.mark.slow
@given(tables(), st.data())
def test_entropy_and_mass_kept_stay_in_their_ranges(scores, data):
    rows, columns = scores.shape
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)))
    found = of_scores(scores, allowed=allowed.view(rows, columns), top=columns)
    some = found.keys > 0
    assert torch.equal(found.entropy.isnan(), ~some)
    assert (found.entropy[some] >= 0).all()
    assert (found.entropy[some] <= found.keys[some].double().log() + 1e-12).all()
    masses = torch.stack([found.mass_kept(k)[some] for k in range(1, columns + 1)])
    assert ((masses > 0) & (masses <= 1)).all()
    # A mass is exp(a difference of logsumexps), which are at most 32 in size and off by (32 + 9) eps each.
    assert (masses.diff(dim=0) >= -4 * 41 * torch.finfo(torch.float64).eps).all()
    torch.testing.assert_close(masses[-1], torch.ones_like(masses[-1]))
    torch.testing.assert_close(masses[0], found.largest_weight()[some])


@pytest.mark.slow
@given(tables(), st.integers(0, 6))
def test_a_positive_scale_scales_dispersion_and_separation(scores, exponent):
    scale = 2.0 ** (exponent - 3)
    found, scaled = of_scores(scores, top=3), of_scores(scores, scale=scale, top=3)
    for k in (None, 1, 2, 3):
        assert torch.equal(scale * found.dispersion(k), scaled.dispersion(k))
        assert torch.equal(scale * found.separation(k), scaled.separation(k))
        assert torch.equal(found.key_load(k), scaled.key_load(k))


class _Allocations(TorchDispatchMode):
    """Watches every tensor that is made: the largest, and the most bytes alive at a time."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = 0
        self._alive = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        made = function(*arguments, **(named or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._alive.append(weakref.ref(tensor))
                if not tensor._is_view():
                    self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        self._alive = [reference for reference in self._alive if reference() is not None]
        storages = [reference().untyped_storage() for reference in self._alive]
        self.peak = max(self.peak, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        return made


@pytest.mark.slow
def test_nothing_as_large_as_all_scores_is_ever_held():
    length, generator = 8192, torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, length, 16, generator=generator).unbind()
    selected = torch.arange(length)[None, None, :, None].clone()
    with _Allocations() as watch:
        row_statistics(q, k, 0.25, selected=selected, top=8)
    assert 2**20 <= watch.largest <= length**2 // 16  # of strips of 2²¹ scores
    assert watch.peak <= 4 * length**2 // 5  # a fifth of all scores, in bytes
