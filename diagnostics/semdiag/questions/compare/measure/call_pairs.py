"""The attention calls of two models on the same batch, compared in pairs as they come."""

from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd

from semdiag.capturing.attention_call import AttentionCall
from semdiag.measuring.calls.batch_rows import SampleNumbers
from semdiag.measuring.calls.scored_rows import NotAvailableError
from semdiag.measuring.table import Table
from semdiag.questions.compare.measure.head_changes import SUMS, head_changes, refusal
from semdiag.questions.compare.measure.kept_calls import KeptCalls, own_copy
from semdiag_models import InputError

COMPARED = Table(
    "compared",
    "One row per sample, layer and head of a model, beside its base. queries: that attend to a key in both. Sums "
    "over these: total_variation of the weights (largest: of one query), δ (dispersion_base, dispersion, moved: "
    "|δ' − δ|; nats), top_queries (that may attend to keys beyond their top-k), overlap of the top-k of these; "
    "squared norms of PV (output), (P' − P)V (by_weights), P'(V' − V) (by_values) and P'V' − PV (change).",
    {
        **dict.fromkeys(("model", "base"), "str"),
        **dict.fromkeys(("sample", "layer", "head"), "int32"),
        **{name: "int64" if name in ("queries", "top_queries") else "float64" for name in SUMS[:-1]},
    },
)


class CallPairs:
    """Keeps the base's calls on a batch, and compares each with the other model's as that comes."""

    def __init__(self, base: str, other: str, top: int) -> None:
        self._base, self._other, self._top = base, other, top
        self._kept, self._numbers = KeptCalls(), SampleNumbers()
        self._running, self._next = "", 0
        self._parts: list[pd.DataFrame] = []
        self.left_out = 0

    def start(self, samples: int) -> None:
        """Begin a batch."""
        self._kept.clear()
        self._numbers.start(samples)
        self._next = 0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Run one of the models inside the context: calls are its own, even if it is part of the other."""
        self._running = name
        try:
            yield
        finally:
            self._running = ""

    def keep(self, call: AttentionCall) -> None:
        """Keep a call of the base."""
        if self._running == "base":
            self._kept.add(call)

    def match(self, call: AttentionCall) -> None:
        """Compare a call of the other model with the base's."""
        if self._running != "other":
            return
        place, self._next = self._next, self._next + 1
        if place >= len(self._kept):
            return  # finish() refuses, and says how many there are
        base, other = self._kept.pop(place), own_copy(call)
        reason = refusal(base, other)
        if reason:
            raise InputError(f"{self._refused} in layer {base.layer} they have {reason}.")
        changes = head_changes(base, other, self._top)
        columns = {name: values.cpu() for name, values in changes.items()}
        if not all(bool(values.isfinite().all()) for values in columns.values()):
            raise InputError(f"{self._refused} in layer {base.layer} a score or a value is not a finite number.")
        self.left_out += int(columns.pop("left_out").sum())
        batch, heads = columns["queries"].shape
        place_of = {"layer": base.layer, "head": list(range(heads)) * batch}
        sample = self._numbers.of(batch).repeat(heads)
        flat = {name: values.flatten().numpy() for name, values in columns.items()}
        self._parts.append(pd.DataFrame({"sample": sample, **place_of, **flat}))

    def finish(self) -> None:
        """End a batch."""
        if self._next != len(self._kept):
            raise InputError(
                f"{self._refused} their attention is called {len(self._kept)} and {self._next} times in a forward."
            )

    def table(self, names: dict[str, str]) -> pd.DataFrame:
        """Return the table ``compared``; rows of the same sample, such as windows, are summed up."""
        calls = pd.concat(self._parts, ignore_index=True) if self._parts else COMPARED.empty()
        calls = calls[calls["queries"] > 0]
        if calls.empty:
            raise NotAvailableError("no query attends to a key in both models")
        statistics = {name: "max" if name == "largest" else "sum" for name in SUMS[:-1]}
        rows = calls.groupby(["sample", "layer", "head"], as_index=False).agg(statistics)
        return COMPARED.of_parts([rows.assign(**names)])

    @property
    def _refused(self) -> str:
        return f"{self._base} and {self._other} cannot be compared:"
