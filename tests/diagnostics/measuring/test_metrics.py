"""Every metric against its oracle, a loop over plain numbers, wherever it is shown."""

import math
import statistics
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from semdiag import InputError, capture, measure, watch_attention
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.calls.monitor_alarms import rules_of
from semdiag.measuring.calls.monitor_heads import describe_heads, looked_at
from semdiag.measuring.metrics import METRICS, Metric, in_table, metric_columns, metric_of, monitored
from semdiag.reporting.gate import parse_rule
from semdiag_models import Encoder, ModelConfig

KS = 2, 5
LOGIT = 0.5
KINDS = "full", "topk"
EXACT = {"rel": 1e-9, "abs": 1e-9}


@dataclass(frozen=True)
class Row:
    """One query of one head."""

    scores: list[float]  # of all keys
    kept: list[int]  # keys that it attends to
    query: list[float]
    keys: list[list[float]]
    output: list[float]

    @property
    def ranked(self) -> list[int]:
        """The keys, those with the largest scores first."""
        return sorted(range(len(self.scores)), key=lambda key: -self.scores[key])

    @property
    def weights(self) -> dict[int, float]:
        """The attention weights by key."""
        total = sum(math.exp(self.scores[key]) for key in self.kept)
        return {key: math.exp(self.scores[key]) / total for key in self.kept}


def kept_scores(row):
    return [row.scores[key] for key in row.kept]


def dropped_scores(row):
    return [score for key, score in enumerate(row.scores) if key not in row.kept]


def entropy(row):
    return -sum(p * math.log(p) for p in row.weights.values())


def stability(row):
    largest = max(row.weights.values())
    return 2 * largest * (1 - largest)


def output_rank(rows):
    values = np.linalg.svd([row.output for row in rows], compute_uv=False)
    shares = [float(value) / values.sum() for value in values]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


# The naive reference of each metric: of a row; of the rows of a sample and a key; or of all rows of a head.
# With a k, ``kept`` is the k keys with the largest scores.
ORACLES = {
    "max_logit": lambda row: max(kept_scores(row)),
    "above": lambda rows: sum(max(kept_scores(row)) > LOGIT for row in rows) / len(rows),
    "entropy": entropy,
    "least_entropy": lambda rows: min(map(entropy, rows)),
    "first_weight": lambda row: row.weights.get(0, 0.0),
    "heaviest_key": lambda rows: statistics.mean(max(row.weights.values()) for row in rows),
    "dispersion": lambda row: max(kept_scores(row)) - min(kept_scores(row)),
    "separation": lambda row: min(kept_scores(row)) - max(dropped_scores(row), default=-math.inf),
    "xi": stability,
    "output_rank": output_rank,
    "query_norm": lambda row: math.hypot(*row.query),
    "key_norm": lambda rows, key: math.hypot(*rows[0].keys[key]),
    "largest_weight": lambda row: max(row.weights.values()),
    "weight_kept": lambda row: sum(map(math.exp, kept_scores(row))) / sum(map(math.exp, row.scores)),
    "load": lambda rows, key: sum(key in row.kept for row in rows),
    "received": lambda rows, key: sum(row.weights.get(key, 0.0) for row in rows),
    "keeps_first": lambda row: float(0 in row.kept),
}  # fmt: skip


@cache
def model_of(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ModelConfig(
            3, 2, 12, attention=kind, k=None if kind == "full" else 3, blocks=2, heads=2, width=16
        )
        made = Encoder(config).double().eval()
    made.scale_queries_and_keys(2.0)
    return made


@cache
def inputs():
    return torch.randint(2, (6, 12), generator=torch.Generator().manual_seed(0))


@cache
def calls_of(kind):
    calls = []
    with torch.no_grad(), watch_attention(model_of(kind), calls.append):
        model_of(kind)(inputs())
    return calls


def ks_of(kind):
    """The k of the metrics of a k, which are measured where every key is kept."""
    return KS if kind == "full" else ()


@cache
def measured(kind):
    return measure(model_of(kind), inputs(), k=ks_of(kind), dtype=torch.float64)


@cache
def captured(kind):
    with torch.no_grad(), capture(model_of(kind), k=max(KS)) as calls:
        model_of(kind)(inputs())
    return calls


@cache
def heads_of(kind):
    """Rows by layer and head, of each sample a list."""
    heads = {}
    for call in calls_of(kind):
        scores, outputs = call.scores(torch.float64), call.mixed
        for head in range(scores.shape[1]):
            heads[call.layer, head] = [
                [
                    Row(
                        scores=scores[b, head, i].tolist(),
                        kept=list(range(12)) if call.selected is None else call.selected[b, head, i].tolist(),
                        query=call.q[b, head, i].tolist(),
                        keys=call.k[b, head].tolist(),
                        output=outputs[b, head, i].tolist(),
                    )
                    for i in range(scores.shape[2])
                ]
                for b in range(len(scores))
            ]
    return heads


def values_of(metric, k, samples):
    """The oracle's values of one head: of each query or key by sample, or one of the head."""
    if k is not None:
        samples = [[replace(row, kept=row.ranked[:k]) for row in rows] for rows in samples]
    oracle = ORACLES[metric.name]
    if metric.per == "head":
        return oracle([row for rows in samples for row in rows])
    if metric.per == "key":
        return [oracle(rows, key) for rows in samples for key in range(len(rows[0].keys))]
    return [oracle(row) for rows in samples for row in rows]


def of_one_head(metric, values):
    """What a monitor makes of a head's values."""
    if metric.per == "head":
        return values
    finite = [value for value in values if math.isfinite(value)]
    reductions = {"max": max, "min": min, "mean": statistics.mean, "median": statistics.median}
    return reductions[metric.by_head](finite) if finite else math.nan


def test_every_metric_has_one_oracle():
    assert ORACLES.keys() == METRICS.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METRICS)
def test_measured_columns_are_those_of_the_oracle(name, kind):
    metric = METRICS[name]
    for column, (_, k) in metric_columns([metric] if metric.table else [], ks_of(kind)).items():
        table = getattr(measured(kind), metric.table)
        for (layer, head), samples in heads_of(kind).items():
            values = values_of(metric, k, samples)
            rows = table[(table["layer"] == layer) & (table["head"] == head)]
            if metric.table == "heads":
                assert rows[column].item() == pytest.approx(statistics.mean(values), **EXACT)
            else:
                assert rows.sort_values(["sample", metric.per])[column].tolist() == pytest.approx(values, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METRICS)
def test_a_capture_tells_every_metric_of_rows(name, kind):
    metric = METRICS[name]
    calls = captured(kind)
    if metric.of_rows is None or metric.per == "head":
        with pytest.raises(InputError, match=f"Unknown metric '{name}'"):
            calls.metric(name)
        return
    for k in (None, *KS):
        if not metric.takes(k):
            with pytest.raises(InputError, match="needs a k" if k is None else "takes no k"):
                calls.metric(name, k)
            continue
        table = calls.metric(name, k)
        for (layer, head), samples in heads_of(kind).items():
            rows = table[(table["layer"] == layer) & (table["head"] == head)]
            assert rows[name].tolist() == pytest.approx(values_of(metric, k, samples), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METRICS)
def test_a_monitor_has_every_metric_of_heads_and_alarms_for_it(name, kind):
    metric = METRICS[name]
    for column, (_, k) in metric_columns([metric] if metric.by_head else [], KS).items():
        for call in calls_of(kind):
            for head, row in enumerate(describe_heads(looked_at(counted_rows(call, top=max(KS))), KS, LOGIT)):
                expected = of_one_head(metric, values_of(metric, k, heads_of(kind)[call.layer, head]))
                # norms are in float32, singular values the roots of eigenvalues
                assert row[column] == pytest.approx(expected, rel=1e-5, nan_ok=True), column
        low, high = metric.limits_at(k)
        crossed = high / 2 if math.isfinite(high) else low + 1 if math.isfinite(low) else 1.0
        (rule,) = rules_of({column: crossed}, KS, every=1)
        assert (rule.quantity, rule.threshold) == (column, crossed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METRICS)
def test_values_lie_within_the_limits(name, kind):
    metric = METRICS[name]
    for k in filter(metric.takes, (None, *KS)):
        low, high = metric.limits_at(k)
        for samples in heads_of(kind).values():
            values = values_of(metric, k, samples)
            for value in [values] if metric.per == "head" else values:
                assert low - 1e-12 <= value <= high + 1e-12 or math.isinf(value)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_metric_says_all_that_its_places_need(metric):
    assert (metric.of_rows is None) != (metric.of_call is None)
    assert metric.title
    assert metric.meaning
    assert metric.takes(None) or metric.takes(1)
    if metric.table:
        assert (metric.per == "key") == (metric.table == "loads")
    if metric.gated:  # a rule is about percentiles of rows
        assert metric.table in ("queries", "loads")
        assert parse_rule(f"{metric.name}.p50 < 1").metric == metric.name
    if metric.by_head and metric.of_call:  # computed before the k are known
        assert not metric.takes(1)
    if metric.by_head and metric.of_rows:  # key loads are not sent to the host
        assert metric.per != "key"


def test_columns_and_metrics_name_each_other():
    for column, found in metric_columns(METRICS.values(), KS).items():
        assert metric_of(column) == found
    for column in ("keys", "weight_kept", "entropy_k2", "dispersion_k", "load_k1_k2"):
        assert metric_of(column) is None
    assert {metric.name for table in ("queries", "loads", "heads", "") for metric in in_table(table)} == set(
        METRICS
    )


def test_a_monitor_that_continues_a_file_finds_its_columns_in_their_order():
    columns = [
        "max_logit", "above", "entropy", "least_entropy", "first_weight", "heaviest_key", "dispersion",
        "separation", "xi", "output_rank", "query_norm", "key_norm", "dispersion_k7", "separation_k7",
        "weight_kept_k7",
    ]  # fmt: skip
    assert [column for column in metric_columns(monitored(), (7,)) if column in columns] == columns


def test_a_metric_without_a_function_of_rows_is_computed_of_a_call():
    call = calls_of("full")[0]
    norm = METRICS["query_norm"]
    assert isinstance(norm, Metric)
    rows = counted_rows(call, places=torch.tensor([[[3, 1], [0, -1]]]).expand(6, 2, 2))
    assert norm.of(rows)[:, 0].tolist() == call.q[:, 0, [3, 1]].float().norm(dim=-1).tolist()
