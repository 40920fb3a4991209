"""Which trained models may be compared with each other: same task, seed, size and snapshot."""

from dataclasses import dataclass

import pandas as pd

_SAME = ["task", "seed", "blocks", "heads", "width", "length", "snapshot"]


@dataclass(frozen=True)
class Pair:
    """A full-attention model and a counterpart that differs from it only in its attention.

    Attributes:
        label: task, attention and seed in words.
        full: the full model's path.
        other: the counterpart's path.
    """

    label: str
    full: str
    other: str


def find_pairs(models: pd.DataFrame, attention: str | None = "topk") -> tuple[list[Pair], list[str]]:
    """Pair every model of one attention kind with the full model trained on the same data.

    Args:
        models: the table of :class:`Measurements`.
        attention: kind of the counterpart; None for every kind but full.

    Returns:
        The pairs, and the paths of full models and counterparts that have no partner.
    """
    pairs, alone = [], []
    sparse = models["attention"] != "full" if attention is None else models["attention"] == attention
    for _, group in models[sparse | (models["attention"] == "full")].groupby(_SAME, dropna=False, sort=False):
        full = group[group["attention"] == "full"]["model"].tolist()
        others = group[group["attention"] != "full"]
        if not full or others.empty:
            alone += group["model"].tolist()
            continue
        for _, row in others.iterrows():
            label = f"{row['task']}, {row['attention']}-{row['k']}, seed {row['seed']}"
            if row["snapshot"] != "last":
                label += f", {row['snapshot']}"
            pairs.append(Pair(label, full[0], row["model"]))
    return pairs, alone
