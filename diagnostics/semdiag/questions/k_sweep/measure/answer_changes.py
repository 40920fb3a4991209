"""How far two answers of models to the same batch are apart: divergence, losses, predictions, norms."""

import math

import torch
from torch import Tensor

from semdiag.mathematics.predicted_classes import predicted_classes
from semdiag.questions.k_sweep.measure.answers import Answers, difference
from semdiag.questions.k_sweep.measure.targets import IGNORED


def position_terms(before: Answers, after: Answers) -> dict[str, Tensor]:
    """Return what each position adds to its sample's sums, (B, P).

    Formula: divergence Σ_c p_c (ln p_c − ln p'_c) in nats; loss −ln p'_right; 0 where a position does not count.

    Args:
        before: p, of the model as it is.
        after: p', of what it is compared with.

    Returns:
        targets, correct (of ``after``), predictions, changed (predictions that differ), loss (of ``after``),
        divergence; all 0 of representations.
    """
    counted = before.counted
    none = torch.zeros(counted.shape, dtype=torch.int64, device=counted.device)
    values = dict.fromkeys(("targets", "correct", "predictions", "changed", "loss", "divergence"), none)
    if before.likely is not None and after.likely is not None:
        likely = before.likely.exp()
        terms = (likely * (before.likely - after.likely)).masked_fill(likely == 0, 0)
        choices, others = predicted_classes(before.likely), predicted_classes(after.likely)
        values["predictions"] = counted.long()
        values["changed"] = ((choices != others) & counted).long()
        values["divergence"] = terms.double().sum(-1).masked_fill(~counted, 0)
        if before.targets is not None:
            known = before.targets != IGNORED
            right = before.targets.where(known, 0)
            loss = -after.likely.gather(-1, right[..., None])[..., 0].double()
            values |= {"targets": known.long(), "correct": ((others == right) & known).long()}
            values["loss"] = loss.masked_fill(~known, 0)
    return values


def output_change(before: Answers, after: Answers) -> Tensor:
    """Return the norm of the change of outputs in their own norm, without entries that stay infinite, (B,).

    Args:
        before: of the model as it is.
        after: of what it is compared with.
    """
    left_out = ~before.counted[..., None] | (before.values.isinf() & (before.values == after.values))
    change, size = (
        torch.linalg.vector_norm(part.double().masked_fill(left_out, 0), dim=(1, 2))
        for part in (difference(after.values, before.values), before.values)
    )
    relative: Tensor = (change / size).masked_fill(change == 0, 0)
    return relative.masked_fill(relative.isnan(), math.inf).masked_fill(~before.counted.any(1), math.nan)
