"""The tables of masks under noise, from sums over the draws, batch by batch."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from semdiag.mathematics.mask_stability import predicted_agreement
from semdiag.measuring.table import Table
from semdiag.questions.mask_stability.measure.mask_rows import RowChanges

MASKS = Table(
    "masks",
    "One row per noise level and query that drops a key.",
    {
        "model": "str",
        "level": "float64",
        **dict.fromkeys(("sample", "layer", "head", "query", "kept", "draws"), "int32"),
        "separation": "float64",
        **dict.fromkeys(("agreement", "exact", "certified"), "float32"),
        "certified_changed": "int32",
        **dict.fromkeys(("predicted", "swing_sd", "response"), "float32"),
    },
)
NOISE_EFFECTS = Table(
    "noise_effects",
    "One row per noise level and sample: what the noise does to the output.",
    {
        "model": "str",
        "level": "float64",
        "sample": "int32",
        **dict.fromkeys(("logit_change", "flipped", "correct_before", "correct_after"), "float64"),
    },
)


class MaskSums:
    """Sums over the draws of changes of masks, layer by layer."""

    def __init__(self) -> None:
        self._rows: dict[int, list[dict[str, Tensor]]] = {}  # by layer, one entry per batch
        self._swings: dict[int, Tensor] = {}  # by layer: (3, levels, heads) count, Σ, Σ²

    def add(self, layer: int, changes: RowChanges) -> None:
        """Add one attention call."""
        self._rows.setdefault(layer, []).append(
            {
                "counted": changes.counted,
                "separation": changes.separation,
                "agreement": changes.common.sum(0, dtype=torch.int32),
                "changed": changes.changed.sum(0, dtype=torch.int32),
                "certified": changes.certified.sum(0, dtype=torch.int32),
                "certified_changed": (changes.changed & changes.certified).sum(0, dtype=torch.int32),
                "response": changes.response,
                "kept": changes.kept,
            }
        )
        sums = _swing_sums(changes)
        self._swings[layer] = self._swings[layer] + sums if layer in self._swings else sums

    def leave_out(self, layers: Collection[int]) -> None:
        """Drop the sums of these layers."""
        for layer in layers:
            del self._rows[layer]

    def table(self, model: str, levels: Sequence[float], draws: int) -> pd.DataFrame:
        """Return the table ``masks``."""
        parts = []
        for layer, batches in sorted(self._rows.items()):
            most = max(b["counted"].shape[-1] for b in batches)  # rows that pad a shorter batch do not count
            joined = {
                name: torch.cat([F.pad(b[name], (0, most - b[name].shape[-1])) for b in batches], -3).cpu()
                for name in batches[0]
            }
            count, total, squares = self._swings[layer].cpu()
            spread = (squares / count - (total / count).square()).clamp(min=0).sqrt()  # (levels, heads)
            counted = joined["counted"]
            sample, head, query = (where.to(torch.int32).numpy() for where in counted.nonzero(as_tuple=True))
            separation, kept = joined["separation"][counted].double(), joined["kept"][counted]
            for at, level in enumerate(levels):
                sums = {name: values[at][counted].double() for name, values in joined.items() if values.ndim == 4}
                sd = spread[at][torch.from_numpy(head).long()]
                columns = {
                    "sample": sample, "layer": np.int32(layer), "head": head, "query": query, "level": level,
                    "kept": kept.to(torch.int32), "draws": np.int32(draws), "separation": separation,
                    "agreement": sums["agreement"] / (draws * kept), "exact": 1 - sums["changed"] / draws,
                    "certified": sums["certified"] / draws, "certified_changed": sums["certified_changed"],
                    "predicted": predicted_agreement(separation, sd), "swing_sd": sd, "response": sums["response"],
                }  # fmt: skip
                parts.append(pd.DataFrame({"model": model, **columns}))
        return MASKS.of_parts(parts)


def _swing_sums(changes: RowChanges) -> Tensor:
    """Return count, sum and sum of squares of the counted rows' swings, per level and head: (3, N, H)."""
    counted = changes.counted
    swing = changes.swing.where(counted, 0.0).double()
    draws, levels = swing.shape[:2]
    count = (draws * counted.sum((0, 2))).expand(levels, -1)
    return torch.stack([count.double(), swing.sum((0, 2, 4)), swing.square_().sum((0, 2, 4))])


def effects_table(
    model: str, outputs: Sequence[Mapping[str, Tensor]], levels: Sequence[float], labels: Tensor | None
) -> pd.DataFrame:
    """Return the table ``noise_effects``."""
    if not outputs:
        return NOISE_EFFECTS.empty()
    change, flipped, before, after = (torch.cat([part[name] for part in outputs], -1) for name in outputs[0])
    count = len(before)
    truth = torch.full((count,), torch.nan) if labels is None else labels[:count].cpu().double()
    known = 1.0 if labels is not None else float("nan")
    parts = []
    for at, level in enumerate(levels):
        columns = {
            "level": level,
            "sample": np.arange(count, dtype=np.int32),
            "logit_change": change[at],
            "flipped": flipped[at],
            "correct_before": (before == truth).double() * known,
            "correct_after": (after[:, at] == truth).double().mean(0) * known,
        }
        parts.append(pd.DataFrame({"model": model, **columns}))
    return NOISE_EFFECTS.of_parts(parts)
