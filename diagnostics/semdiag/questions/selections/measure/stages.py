"""Which selections of a module decide, and which only prepare another: groups of experts, and their scores."""

import torch
from torch import Tensor

from semdiag.questions.selections.measure.arrays import flat_rows
from semdiag.questions.selections.measure.watch import Selected


def in_stages(selected: list[Selected]) -> list[tuple[Selected, Selected | None]]:
    """Return the selections of a module that decide, each with the selection of groups before it."""
    pairs: list[tuple[Selected, Selected | None]] = []
    for last in selected:
        group = next((early for early, _ in reversed(pairs) if _chooses_groups(early, last)), None)
        if group is not None:
            pairs = [pair for pair in pairs if pair[0] is not group and not _scores_groups(pair[0], group)]
        pairs.append((last, group))
    return pairs


def outside(group: Selected, choices: int) -> Tensor:
    """Return which choices lie in groups that were not chosen, bool (rows, choices)."""
    dropped = torch.ones_like(flat_rows(group.scores), dtype=torch.bool)
    dropped.scatter_(1, flat_rows(group.indices).long(), False)
    return dropped.repeat_interleave(choices // dropped.shape[1], 1)


def _chooses_groups(early: Selected, last: Selected) -> bool:
    """Return whether the later selection chooses in groups that the earlier one left, all others masked alike."""
    groups, choices = early.scores.shape[-1], last.scores.shape[-1]
    if groups >= choices or choices % groups or early.scores.numel() * choices != last.scores.numel() * groups:
        return False
    dropped, scores = outside(early, choices), flat_rows(last.scores)
    masked = (scores == scores.amin(1, keepdim=True)) | ~dropped
    return bool(masked.all()) and not bool(dropped.gather(1, flat_rows(last.indices).long()).any())


def _scores_groups(early: Selected, group: Selected) -> bool:
    """Return whether a selection was made inside each of the groups."""
    return early.scores.shape[:-1].numel() == group.scores.numel()
