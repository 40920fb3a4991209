"""The answer on attention whose keys an indexer chose: what it keeps of dense attention."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from semdiag.measuring.percentiles import percentiles
from semdiag.questions.selections.measure.dense import IndexedAttention, KeptAll
from semdiag.questions.selections.measure.kept_all import WithoutSelection


def dense_table(layers: Sequence[IndexedAttention]) -> list[dict[str, Any]]:
    """Return an entry for each layer: shares of the dense attention's weight, means over queries and heads."""
    return [_entry(layer) for layer in layers]


def _entry(layer: IndexedAttention) -> dict[str, Any]:
    means: dict[str, Any] = dict.fromkeys(("recalled", "recalled_p5", "at_random", "best", "largest_hit", "lost"))
    by_head, rows = None, sum(len(part.best) for part in layer.parts)
    if rows:
        recalled, hit, best, at_random, lost = (torch.cat(each).numpy() for each in zip(*layer.parts, strict=True))
        low = percentiles(recalled.mean(1))["p5"]
        numbers = (recalled.mean(), low, at_random.mean(), best.mean(), hit.mean(), lost.mean())
        means = dict(zip(means, map(float, numbers), strict=True))
        by_head = recalled.mean(0).tolist()
    return {
        "attention": layer.module,
        "chosen_by": layer.chosen_by,
        "rows": rows,
        **means,
        "recalled_by_head": by_head,
        "unlike": layer.unlike,
    }


def without_selection(run: WithoutSelection | None) -> dict[str, Any] | None:
    """Return what the model without selection says of each layer, and what its selections change of its outputs.

    Args:
        run: after all batches; None: it did not run.
    """
    if run is None:
        return None
    layers = [
        {
            "attention": each.module,
            "rows": each.rows,
            "other_keys": each.other_keys,
            "residual": each.residual,
            "over_rounding": each.over_rounding,
            "dense": _is_dense(each),
        }
        for each in run.layers
    ]
    return {
        "reason": run.reason or None,
        "layers": layers,
        "dense": _all_dense([*map(_is_dense, run.layers)]) if layers and not run.reason else None,
        "outputs": None if run.reason else _outputs(run),
    }


def _is_dense(layer: KeptAll) -> bool | None:
    """Return whether a layer is dense attention up to rounding; None if its output is not finite."""
    unknown = layer.other_keys == 0 and np.isnan(layer.over_rounding)
    return None if unknown else layer.other_keys == 0 and layer.over_rounding <= 1


def _all_dense(layers: list[bool | None]) -> bool | None:
    """Return False if a layer is not, else None if one is unknown, else True."""
    return False if False in layers else None if None in layers else True


def _outputs(run: WithoutSelection) -> dict[str, Any] | None:
    """Return what selections change: means per token with a distribution, or with a target."""
    rows = run.outputs.rows
    if not rows:
        return None
    predictions, targets = (sum(row[name] for row in rows) for name in ("predictions", "targets"))
    mean = {
        name: sum(row[name] for row in rows) / number if number else None
        for name, number in (
            ("divergence", predictions), ("changed", predictions), ("loss", targets), ("loss_base", targets)
        )
    }  # fmt: skip
    return {
        "predictions": predictions,
        "divergence": mean["divergence"],
        "changed_share": mean["changed"],
        "targets": targets,
        "loss": mean["loss"],
        "loss_without": mean["loss_base"],
        "output_change": float(np.median([row["output_change"] for row in rows])),
    }
