"""How often a model finds what it was told, as it is and with masks: by distance, with exact intervals."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import binomtest

from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, interval, percent, plain, text, whole_percent
from semdiag.presenting.answer import Answer, Glance, Outcome, heading, title
from semdiag.presenting.drawing.panels import NothingToDrawError, name_ends
from semdiag.presenting.drawing.style import drawing, note_below, palette, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable

NO_MASK = "none"
ENOUGH = 0.5  # share of the texts in which the model as it is must be right, so that masks are judged
_PLACE = ["model", "task", "length", "distance"]
_OF_TILES = ["keys", "weight", "exact_weight", "top_weight", "recall", "chance"]
_FACTS = ["right", "texts", "accuracy", "low", "high", "judged", "as_it_is", "perplexity_change"]


def retrieval_table(findings: Findings) -> pd.DataFrame:
    """Return, by task, length, distance and mask, in how many texts the answer was right, with exact intervals."""
    rows = findings.measurements.retrieval
    rows = rows.assign(right=rows["hits"] == rows["tokens"])
    plain_rows = rows[rows["mask"] == NO_MASK]
    able = (plain_rows.groupby(["model", "task", "length"])["right"].mean() >= ENOUGH).to_dict()
    before = plain_rows.groupby(_PLACE)[["text_loss", "right"]].sum().to_dict("index")
    table = []
    for key, part in rows.groupby([*_PLACE, "mask", "k"], sort=False):
        place = cast("tuple[Any, ...]", key)
        own = before[place[:4]]
        change = np.expm1((part["text_loss"].sum() - own["text_loss"]) / part["text_tokens"].sum())
        shares = _shares(int(part["right"].sum()), len(part))
        table.append([*place, *shares.values(), able[place[:3]], int(own["right"]), float(change)])
    return pd.DataFrame(table, columns=[*_PLACE, "mask", "k", *_FACTS]).sort_values(_PLACE, kind="stable")


def _shares(some: int, every: int) -> dict[str, Any]:
    ends = binomtest(some, every).proportion_ci(method="exact")  # Clopper and Pearson
    return {"right": some, "texts": every, "accuracy": some / every, "low": ends.low, "high": ends.high}


def answer(findings: Findings) -> Answer | None:
    """Return what each kind of mask still finds, or that the model as it is finds too little."""
    if findings.measurements.retrieval.empty:
        return None
    table, by_layer = findings(retrieval_table), findings.measurements.tiles
    both = pd.concat([by_layer.assign(layer=ALL), by_layer], ignore_index=True)
    tiles = both.groupby(["model", "length", "kind", "k", "layer"], as_index=False)[_OF_TILES].mean()
    results: dict[str, Summary] = {}
    shown: list[str | NumberTable] = []
    for model in map(str, dict.fromkeys(table["model"])):
        rows, kept = (records(x[x["model"] == model].drop(columns="model")) for x in (table, tiles))
        results[model] = {"retrieval": rows, "tiles": kept}
        shown += [f"{title(findings, model)}: right answers", NumberTable(_COLUMNS, rows)]
        if whole := [row for row in kept if row["layer"] == ALL]:
            shown += ["What choices of blocks keep of the attention as it is", NumberTable(_TILES, whole)]
    far = _far(table)
    lost = [row for row in far if row["high"] < row["as_it_is"] / row["texts"]]
    outcome, number = Outcome.MEASURED if table["judged"].any() else Outcome.OPEN, counted(len(far), "mask")
    return Answer(
        glance=Glance(outcome, f"{len(lost)} of {number}", "lose facts from beyond the keys that they keep"),
        headline=[*_as_it_is(table), *_sentences(far)],
        tables={"retrieval": table, "tiles": tiles},
        results=results,
        shown=shown,
    )


def _as_it_is(table: pd.DataFrame) -> Iterator[str]:
    for model, own in table[table["mask"] == NO_MASK].groupby("model", sort=False):
        parts = [
            f"{task} in {int(rows['right'].sum())} of {int(rows['texts'].sum())} texts of {length:,} tokens"
            + " (too few to judge masks by)" * (not rows["judged"].all())
            for (task, length), rows in own.groupby(["task", "length"], sort=False)
        ]
        yield f"{model} as it is answers {'; '.join(parts)}."


def _far(table: pd.DataFrame) -> list[Summary]:
    """Return by model, task and mask what is found of judged facts that are more than k tokens back."""
    far = table[table["judged"] & (table["distance"] > table["k"]) & (table["mask"] != NO_MASK)]
    sums = far.groupby(["model", "task", "mask", "k"], as_index=False, sort=False).agg(
        right=("right", "sum"), texts=("texts", "sum"), as_it_is=("as_it_is", "sum"),
        perplexity_change=("perplexity_change", "mean"),
    )  # fmt: skip
    return [row | _shares(row["right"], row["texts"]) for row in records(sums)]


def _sentences(far: list[Summary]) -> Iterator[str]:
    for model, task in dict.fromkeys((row["model"], row["task"]) for row in far):
        parts = [
            f"{_mask_name(row['mask'], row['k'])} {row['right']} of {row['texts']} "
            f"({_interval(row['low'], row['high'])}; as it is {row['as_it_is']}; perplexity of the text "
            f"{row['perplexity_change']:+.1%})"
            for row in far
            if (row["model"], row["task"]) == (model, task)
        ]
        yield f"{model}, {task}, told more than k tokens before: {'; '.join(parts)}."


def _mask_name(mask: str, k: int) -> str:
    return "as it is" if mask == NO_MASK else f"{mask}, k = {k}" if k else mask


_interval = partial(interval, form=whole_percent)
_TILES = (
    Column("kind", form=text), Column("k", form=plain), Column("length", form=plain, drop=1),
    Column("keys", form=percent), Column("weight", form=percent, drop=NEVER),
    Column("exact_weight", "of exact blocks", percent), Column("top_weight", "of top-k keys", percent),
    Column("recall", "other blocks found", percent), Column("chance", "by chance", percent),
)  # fmt: skip
_COLUMNS = (
    Column("task", form=text), Column("length", form=plain), Column("distance", form=plain),
    Column("mask k", "mask", _mask_name), Column("right", form=plain), Column("texts", "of", plain, drop=1),
    Column("accuracy", form=percent, drop=NEVER), Column("low high", "95%", _interval, drop=2),
    Column("perplexity_change", "perplexity", lambda x: f"{x:+.1%}", drop=3),
)  # fmt: skip


@drawing(
    "The share of right answers against the distance to what was told, a line for each kind of mask: {shown}.",
    "Distance grows to the right. A line that falls where its k ends is a mask that loses what stands farther "
    "back. The black line is the model as it is; where it is low, masks are not judged.",
)
def retrieval_by_distance(findings: Findings) -> Figure:
    """Draw accuracy against distance, for each model and task that masks are judged by."""
    table = findings(retrieval_table)
    panels = list(table.groupby(["model", "task"], sort=False))
    if not panels:
        raise NothingToDrawError("No text was read.")
    figure, axes = panel_grid(len(panels))
    kinds = list(dict.fromkeys(zip(table["mask"], table["k"], strict=True)))
    colors = ["black", *palette(max(1, len(kinds) - 1))]
    for ax, ((model, task), rows) in zip(axes, panels, strict=True):
        ends: list[tuple[float, str, str, str]] = []
        for (mask, k), color in zip(kinds, colors, strict=False):
            line = rows[(rows["mask"] == mask) & (rows["k"] == k)].groupby("distance")[["right", "texts"]].sum()
            shares = line["right"] / line["texts"]
            ax.plot(line.index, shares, "o-", markersize=3, color=color, label=_mask_name(mask, k))
            ends += [(float(shares.iloc[-1]), _mask_name(mask, k), color, "")] if len(shares) else []
        ax.set_xscale("log")
        ax.set_xticks(places := sorted(set(rows["distance"])), [f"{place:,}" for place in places])
        ax.minorticks_off()
        ax.set_ylim(-0.05, 1.05)
        ax.set_xlabel("tokens between answer and fact")
        ax.set_title(f"{task}\n{str(model)[-40:]}", fontsize=9)
        name_ends(ax, ends)
    axes[0].set_ylabel("share of right answers")
    note_below(figure, "texts of all lengths together; exact intervals stand in retrieval.csv.")
    return figure


HEADINGS = heading(
    "retrieval", "Does it still find what it was told?", (retrieval_by_distance,),
    "The texts are made up, from the model's own tokenizer: they say whether a fact can be reached, not how often "
    "texts of your own need one.",
    "An answer is right if each of its tokens is the likeliest after those before it. The model does not write: "
    "one that would answer in other words counts as wrong.",
    "Intervals are exact for texts drawn like these (Clopper and Pearson). Perplexity is that of the filler text, "
    "which is easier than most.",
)  # fmt: skip
