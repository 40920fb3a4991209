"""The metrics of attention, one entry each: what a metric is, how it is computed, and where it is shown.

The collector, captures, the monitor and its alarms, the rules of ``semdiag check``, ``semdiag list metrics`` and
tables of percentiles read :data:`METRICS`. docs/design.md says how to add one.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from semdiag.mathematics.row_statistics import RowStatistics
from semdiag.mathematics.softmax_stability import local_stability_of_weight

if TYPE_CHECKING:
    from semdiag.measuring.calls.counted_rows import CountedRows

NATS = "nats"
SHARE = "share"
Limits = tuple[float, float]
ANY: Limits = (-math.inf, math.inf)
POSITIVE: Limits = (0.0, math.inf)
SHARES: Limits = (0.0, 1.0)


@dataclass(frozen=True, eq=False)
class Metric:
    """A number of every query, key or head of an attention call.

    With a k, it is what the number would be if each query kept its k largest scores; its column is ``NAME_kK``.
    Exactly one of ``of_rows`` and ``of_call`` computes it, (B, H, queries) or (B, H, keys), from a k or None: the
    first on any machine and later, the second where queries and keys still are.
    """

    name: str  # column of tables, and name in rules and alarms
    title: str  # name in words
    unit: str
    meaning: str  # what it is, with the meaning of its sign and of infinite or missing values
    symbol: str = ""  # as in docs/theory.md
    of_rows: Callable[[RowStatistics, int | None], Tensor] | None = None
    of_call: "Callable[[CountedRows, int | None], Tensor] | None" = None
    per: Literal["query", "key", "head"] = "query"  # per head: a number of all its rows together
    limits: Limits | None = POSITIVE  # smallest and largest possible value; None: it needs a k
    limits_of_k: Limits | None = None  # the same with a k; None: it takes none
    table: Literal["queries", "loads", "heads", ""] = ""  # table of Measurements; in ``heads`` stands the mean
    # how a monitor makes one number of the rows of a head; empty: it does not
    by_head: Literal["max", "min", "mean", "median", "share above", "rank", ""] = ""
    gated: bool = False  # whether a rule of ``semdiag check`` may limit its percentiles
    of_dropped: bool = False  # whether only a query that drops a key has it, and dense attention has none
    command: str = ""  # command that shows it

    @property
    def label(self) -> str:
        """The name in words, with the symbol."""
        return f"{self.title} {self.symbol}".rstrip()

    def text(self, value: float) -> str:
        """Return a value with its unit; a share in percent."""
        return f"{value:.0%}" if self.unit == SHARE else f"{value:.3g} {self.unit}"

    def takes(self, k: int | None) -> bool:
        """Return whether there is a number with this k, or without one."""
        return (self.limits if k is None else self.limits_of_k) is not None

    def limits_at(self, k: int | None) -> Limits:
        """Return the smallest and the largest possible value with a k, or without one."""
        limits = self.limits if k is None else self.limits_of_k
        assert limits is not None
        return limits

    def of(self, rows: "CountedRows", k: int | None = None) -> Tensor:
        """Return the metric of the rows of a call."""
        if self.of_call is not None:
            return self.of_call(rows, k)
        assert self.of_rows is not None
        return self.of_rows(rows.statistics, k)


def _largest_score(rows: RowStatistics, k: int | None) -> Tensor:
    return rows.kept_maximum.masked_fill(rows.non_finite > 0, math.inf)


def _entropy(rows: RowStatistics, k: int | None) -> Tensor:
    return rows.entropy


def _largest_weight(rows: RowStatistics, k: int | None) -> Tensor:
    return rows.largest_weight()


# In the order of a monitor's columns: files that a monitor continues have this order.
METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "max_logit", "largest score", NATS, "largest score; infinite where a score is not finite",
            of_rows=_largest_score, limits=ANY, by_head="max",
        ),
        Metric(
            "above", "large scores", SHARE,
            "queries whose largest score exceeds the warning threshold of max_logit, else 50",
            of_rows=_largest_score, per="head", limits=SHARES, by_head="share above",
        ),
        Metric(
            "entropy", "entropy", NATS, "entropy of a query's weights, an attention sink included",
            of_rows=_entropy, table="heads", by_head="mean", command="report",
        ),
        Metric(
            "least_entropy", "least entropy", NATS, "smallest entropy of a query of the head",
            of_rows=_entropy, per="head", by_head="min",
        ),
        Metric(
            "first_weight", "weight on the first key", SHARE,
            "weight of a query on the first key that is not padding",
            of_call=lambda rows, k: rows.first_weight(), limits=SHARES, table="heads", by_head="mean",
            command="report",
        ),
        Metric(
            "heaviest_key", "weight on the heaviest key", SHARE, "mean of the largest weights of the queries",
            of_rows=_largest_weight, per="head", limits=SHARES, by_head="mean",
        ),
        Metric(
            "dispersion", "dispersion", NATS, "largest minus smallest score that a query attends to",
            symbol="δ", of_rows=lambda rows, k: rows.dispersion(k), limits_of_k=POSITIVE, table="queries",
            by_head="median", gated=True, command="dispersion",
        ),
        Metric(
            "separation", "separation", NATS,
            "smallest kept minus largest dropped score; a tie has ≤ 0, a query that drops nothing ∞",
            symbol="Δ", of_rows=lambda rows, k: rows.separation(k), limits=ANY, limits_of_k=POSITIVE,
            table="queries", by_head="median", gated=True, of_dropped=True, command="separation",
        ),
        Metric(
            "xi", "stability", "", "ℓ1 change of a query's weights per change of its scores, for small ones",
            symbol="ξ", of_rows=lambda rows, k: local_stability_of_weight(rows.largest_weight()),
            limits=(0.0, 0.5), by_head="median", command="stability",
        ),
        Metric(
            "output_rank", "effective rank", "", "e to the entropy of the singular values of a head's outputs",
            of_call=lambda rows, k: rows.output_products(), per="head", limits=(1.0, math.inf), by_head="rank",
        ),
        Metric(
            "query_norm", "query norm", "", "norm of a query; missing where only scores are known",
            of_call=lambda rows, k: rows.query_norms(), by_head="max",
        ),
        Metric(
            "key_norm", "key norm", "", "norm of a key; missing where only scores are known",
            of_call=lambda rows, k: rows.key_norms(), per="key", by_head="max",
        ),
        Metric(
            "largest_weight", "largest weight", SHARE, "largest weight of a query on a key",
            of_rows=_largest_weight, limits=SHARES, table="queries", command="report",
        ),
        Metric(
            "weight_kept", "weight kept", SHARE, "weight of a query's k largest scores among all that it may see",
            of_rows=lambda rows, k: rows.mass_kept(k or 0), limits=None, limits_of_k=SHARES, table="queries",
            by_head="median", command="k-sweep",
        ),
        Metric(
            "load", "key load", "queries", "number of queries that attend to a key",
            of_rows=lambda rows, k: rows.key_load(k), per="key", limits_of_k=POSITIVE, table="loads", gated=True,
            command="separation",
        ),
        Metric(
            "received", "weight received", "queries", "sum of the weights that the queries give a key",
            of_rows=lambda rows, k: rows.received, per="key", table="loads",
        ),
        Metric(
            "keeps_first", "first key kept", SHARE, "whether a query keeps the first key that is not padding",
            of_call=lambda rows, k: rows.first_kept(k), limits=SHARES, limits_of_k=SHARES, table="heads",
            command="report",
        ),
    )
}  # fmt: skip


def in_table(table: str) -> list[Metric]:
    """Return the metrics in a table of measurements."""
    return [metric for metric in METRICS.values() if metric.table == table]


def monitored() -> list[Metric]:
    """Return the metrics of which a monitor makes numbers of heads."""
    return [metric for metric in METRICS.values() if metric.by_head]


def metric_columns(metrics: Iterable[Metric], ks: Sequence[int]) -> dict[str, tuple[Metric, int | None]]:
    """Return metrics and their k by column: first those without a k, then those of each k."""
    listed = list(metrics)
    columns: dict[str, tuple[Metric, int | None]] = {m.name: (m, None) for m in listed if m.takes(None)}
    return columns | {f"{m.name}_k{k}": (m, k) for k in ks for m in listed if m.takes(k)}


def metric_of(column: str) -> tuple[Metric, int | None] | None:
    """Return the metric and the k of a column; None if it is no metric's.

    Example:
        >>> metric, k = metric_of("weight_kept_k12")
        >>> metric.label, k
        ('weight kept', 12)
        >>> metric_of("weight_kept"), metric_of("keys"), metric_of("entropy_k3")
        (None, None, None)
    """
    name = column
    k = None
    if suffixed := re.fullmatch(r"(\w+)_k(\d+)", column):
        name = suffixed[1]
        k = int(suffixed[2])
    metric = METRICS.get(name)
    return (metric, k) if metric is not None and metric.takes(k) else None
