"""Number the layers of a model that attend, and sum up what the capture knows of each."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.attention_kinds import joint_kind, mask_kind
from semdiag.capturing.audit import Audit
from semdiag.measuring.calls.counted_rows import CountedRows
from semdiag.measuring.calls.residual import recomputation_residual
from semdiag.measuring.tables import CALLS, REMARKS, RESIDUALS, SKIPPED


@dataclass
class Layer:
    """What is known of one attention layer: a module, and which of its calls in a forward pass."""

    number: int  # position in the order of first calls
    mechanism: str  # the adapter that saw it
    kinds: set[str] = field(default_factory=set)  # kinds of its masks so far
    heads: int = 0  # number of query heads
    key_heads: int = 0  # number of key heads
    width: int | None = None  # of a head; None where the scores alone are known
    longest: int = 0  # largest number of keys
    calls: int = 0  # number of calls so far
    residual: float = 0.0  # largest so far, relative to the largest output; NaN if one was NaN
    residual_over_rounding: float = 0.0  # the same, in units of the possible effect of rounding
    rounding: float = 0.0  # largest possible effect of rounding so far, relative to the largest output

    def add(self, call: AttentionCall, kind: str, generator: torch.Generator) -> None:
        """Record a call; the generator draws the rows on which the residual is checked."""
        residual = recomputation_residual(call, generator)  # first: a call for which it fails does not count
        self.kinds.add(kind)
        self.heads, self.key_heads = call.q.shape[1], call.k.shape[1]
        self.width = call.q.shape[3] if call.factored else None
        self.longest = max(self.longest, call.k.shape[2])
        self.calls += 1
        self.residual = float(np.maximum(self.residual, residual.residual))  # keeps a NaN
        self.residual_over_rounding = float(np.maximum(self.residual_over_rounding, residual.over_rounding))
        self.rounding = float(np.maximum(self.rounding, residual.rounding))


class Layers:
    """Numbers layers in the order of first calls; a module called twice per forward pass is two layers."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Layer] = {}
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, rows: CountedRows) -> int:
        """Record a call; return the number of its layer."""
        call = rows.call
        name = call.module, call.occurrence
        place = self._places.get(name) or Layer(len(self._places), call.mechanism)
        kind = mask_kind(rows.statistics.keys, rows.keys, rows.queries, rows.places)
        place.add(call, kind, self._generator)
        self._places[name] = place
        return place.number

    @property
    def modules(self) -> set[str]:
        """Names of the modules."""
        return {module for module, _ in self._places}

    @property
    def kind(self) -> str:
        """The kind of all layers' masks together."""
        return joint_kind({kind for place in self._places.values() for kind in place.kinds})

    def largest(self, name: str) -> float:
        """Return the largest value of an attribute of :class:`Layer` over all layers; NaN if one is NaN."""
        return float(np.max([getattr(place, name) for place in self._places.values()]))

    def table(self, model: str) -> pd.DataFrame:
        """Return the table ``calls`` of :class:`~semdiag.measuring.measurements.Measurements`."""
        shared = ("mechanism", "heads", "key_heads", "width", "calls", *RESIDUALS)
        rows = [
            {"model": model, "layer": place.number, "module": module, "occurrence": occurrence}
            | {"mask": joint_kind(place.kinds)}
            | {name: getattr(place, name) for name in shared}
            for (module, occurrence), place in self._places.items()
        ]
        return CALLS.of_rows(rows)


def skipped_table(model: str, audit: Audit, captured: set[str]) -> pd.DataFrame:
    """Return the table ``skipped``: what looks like attention but was not captured, and modules never called."""
    rows = [{"model": model, **seen._asdict(), "times": times} for seen, times in audit.skipped.items()]
    reached = captured | {seen.module for seen in audit.skipped}
    idle = [name for name in audit.modules if name not in reached]
    rows += [{"model": model, "module": n, "operation": "", "reason": "never called", "times": 0} for n in idle]
    return SKIPPED.of_rows(rows)


def remarks_table(model: str, audit: Audit) -> pd.DataFrame:
    """Return the table ``remarks``: what readers should know about the captured attention."""
    rows = [{"model": model, **remark.to_dict(), "times": times} for remark, times in audit.remarks.items()]
    return REMARKS.of_rows(rows)
