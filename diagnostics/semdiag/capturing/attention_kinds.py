"""Kinds of attention as the tables name them: the trainer's, and those that external models' masks show."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from semdiag.mathematics.attention_rows import AttentionRows, fixed_mask_rows, heavy_hitter_rows
from semdiag_models import ATTENTIONS, AttentionKind

if TYPE_CHECKING:
    import pandas as pd  # takes half a second, and some commands need no table

# Masks of external models allow every key, the keys up to the query's position, or another set that ignores the
# scores.
KINDS = {
    **ATTENTIONS,
    "causal": AttentionKind("every query attends to the keys up to its own position", "all"),
    "masked": AttentionKind("every query attends to the keys that its mask allows", "all"),
}
DENSE = tuple(name for name, kind in KINDS.items() if kind.dense)
FIXED_MASKS = tuple(name for name, kind in KINDS.items() if kind.keeps in ("all", "fixed"))
HEAVY_HITTERS = tuple(name for name, kind in KINDS.items() if kind.keeps == "largest")
BOUNDED = tuple(name for name, kind in KINDS.items() if kind.has_bounds)
SCORED = tuple(name for name, kind in KINDS.items() if kind.ranks_scores)
# These look for the largest scores by hashes or clusters, without computing all.
APPROXIMATE = tuple(name for name, kind in KINDS.items() if kind.input_dependent and not kind.follows_scores)
CHANGING = tuple(name for name, kind in KINDS.items() if kind.input_dependent)
# An external model was not made by semdiag_models or the paper's code: only its attention is known.
EXTERNAL_SOURCES = ("hugging face", "factory", "module")


def external(models: "pd.DataFrame") -> "pd.Series[bool]":
    """Return whether each model is external: only its attention is known."""
    return models["source"].isin(EXTERNAL_SOURCES)


def mask_kind(keys: Tensor, reached: Tensor, queries: Tensor | None, places: Tensor | None = None) -> str:
    """Return the kind of a mask, by how many keys its queries may attend to."""
    counts, whole = keys.cpu().numpy(), reached.any(1).sum(-1).cpu().numpy()
    real = np.ones((counts.shape[0], 1, counts.shape[2]), bool) if queries is None else queries.cpu().numpy()
    real = real if real.ndim == counts.ndim else real[:, None]
    if (~real | (counts == whole[:, None, None])).all():
        return "full"
    both = np.broadcast_to(real[..., 1:] & real[..., :-1], counts[..., 1:].shape)
    rises = np.diff(counts, axis=-1)[both]
    steps = 1 if places is None else np.diff(places.cpu().numpy(), axis=-1)[both]
    return "causal" if len(rises) and (rises == steps).all() else "masked"


def joint_kind(kinds: set[str]) -> str:
    """Return the kind that all layers have in common, else ``masked``."""
    return next(iter(kinds)) if len(kinds) == 1 else "masked"


def rows_of(kind: str, dispersion: Tensor, separation: Tensor, kept: Tensor) -> AttentionRows | None:
    """Return the rows for the bounds of a kind of attention; None for a kind that no bound covers."""
    if kind in FIXED_MASKS:
        return fixed_mask_rows(dispersion, kept)
    if kind in HEAVY_HITTERS:
        return heavy_hitter_rows(dispersion, separation, kept)
    return None
