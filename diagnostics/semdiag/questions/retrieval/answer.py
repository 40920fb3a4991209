"""How often a model finds what it was told, as it is and with masks: by distance, with exact intervals."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import binomtest

from semdiag.measuring.calls.tile_weights import TILES
from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.table import ALL, rows_of_model
from semdiag.measuring.words import counted, interval, percent, plain, text
from semdiag.presenting.answer import Answer, Claim, Glance, Outcome, Shown, heading, title
from semdiag.presenting.drawing.panels import NothingToDrawError, name_ends
from semdiag.presenting.drawing.style import drawing, finished, mask_style, note_below, palette, panel_grid
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.retrieval.measure import RETRIEVAL

NO_MASK = "none"
ENOUGH = 0.5  # share of the texts in which the model as it is must be right, so that masks are judged
_LOST = 0.05  # p of McNemar's exact test up to which a mask is said to lose facts
_PLACE = ["model", "task", "length", "depth"]
_OF_TILES = ["keys", "weight", "exact_weight", "top_weight", "recall", "chance"]


def mcnemar(lost: int, gained: int) -> float:
    """Return the p of McNemar's exact test on paired answers, two-sided.

    Formula: P(|2 X - n| >= |lost - gained|) for X binomial with n = lost + gained and probability 1/2: where a
    mask helps as often as it harms, each of the texts that it changes is a fair coin. Texts on which both are
    right, or both wrong, say nothing.

    Source: McNemar, Psychometrika 12 (1947), 153-157, exact form. Deviation: none.

    Args:
        lost: number of texts on which only the model as it is was right.
        gained: number of texts on which only the model with the mask was right.

    Returns:
        The probability, from 0 to 1; 1 where no answer changed.

    Example:
        >>> mcnemar(6, 0)
        0.03125
    """
    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


def loses(row: Mapping[str, Any]) -> bool:
    """Return whether a mask is shown to lose facts: the texts on which it fails are no chance."""
    return bool(row["lost"] > row["found"] and row["p"] <= _LOST)


def paired_answers(findings: Findings) -> pd.DataFrame:
    """Return each text's answer with each mask, beside that of the model as it is on the same text."""
    rows = findings.measurements[RETRIEVAL]
    rows = rows.assign(right=rows["hits"] == rows["tokens"])
    text = [*_PLACE, "sample"]
    unmasked = rows[rows["mask"] == NO_MASK].set_index(text)[["right", "text_loss"]]
    rows = rows.join(unmasked.rename(columns={"right": "own_right", "text_loss": "own_loss"}), on=text)
    able = unmasked.groupby(_PLACE[:3])["right"].mean().rename("judged") >= ENOUGH
    return rows.join(able, on=_PLACE[:3])


def _counts(part: pd.DataFrame) -> dict[str, Any]:
    """Return in how many of some texts the answer was right, with exact intervals, and McNemar's test."""
    right = part["right"]
    unmasked = part["own_right"]
    texts = len(part)
    ends = binomtest(int(right.sum()), texts).proportion_ci(method="exact")  # Clopper and Pearson
    lost = int((unmasked & ~right).sum())
    gained = int((right & ~unmasked).sum())
    change = np.expm1((part["text_loss"].sum() - part["own_loss"].sum()) / part["text_tokens"].sum())
    return {
        "right": right.sum(),
        "texts": texts,
        "accuracy": right.mean(),
        "low": ends.low,
        "high": ends.high,
        "as_it_is": unmasked.sum(),
        "lost": lost,
        "found": gained,
        "p": mcnemar(lost, gained),
        "chance": part["chance"].mean(),
        "perplexity_change": float(change),
    }


def retrieval_table(findings: Findings) -> pd.DataFrame:
    """Return, by task, length, depth and mask, in how many texts the answer was right, and what the mask lost."""
    table = []
    for key, part in findings(paired_answers).groupby([*_PLACE, "mask", "k"], sort=False):
        place = dict(zip([*_PLACE, "mask", "k"], cast("tuple[Any, ...]", key), strict=True))
        distance = int(part["distance"].median())
        table.append({**place, "distance": distance, "judged": part["judged"].all(), **_counts(part)})
    return pd.DataFrame(table).sort_values([*_PLACE[:3], "distance"], kind="stable")


def answer(findings: Findings) -> Answer | None:
    """Return what each kind of mask still finds, or that the model as it is finds too little."""
    if findings.measurements[RETRIEVAL].empty:
        return None
    table = findings(retrieval_table)
    tiles = findings(_tile_table)
    results: dict[str, Summary] = {}
    shown: list[Shown] = []
    for model in map(str, dict.fromkeys(table["model"])):
        rows = records(rows_of_model(table, model).drop(columns="model"))
        of_tiles = records(rows_of_model(tiles, model).drop(columns="model"))
        results[model] = {"retrieval": rows, "tiles": of_tiles}
        shown += [f"{title(findings, model)}: right answers", NumberTable(_COLUMNS, rows)]
        if pooled := [row for row in of_tiles if row["layer"] == ALL]:
            shown += ["What choices of blocks keep of the attention as it is", NumberTable(_TILES, pooled)]
    far = _far(findings)
    lost = [row for row in far if loses(row)]
    number = f"{len(lost)} of {counted(len(far), 'mask')}"
    outcome = Outcome.MEASURED if table["judged"].any() else Outcome.OPEN
    return Answer(
        glance=Glance(outcome, number, "lose facts from beyond the keys that they keep"),
        headline=[*_unmasked_claims(table), *_masked_claims(far)],
        tables={"retrieval": table, "tiles": tiles},
        results=results,
        shown=shown,
    )


def _tile_table(findings: Findings) -> pd.DataFrame:
    """Return what choices of blocks keep, by layer and in all layers."""
    by_layer = findings.measurements[TILES]
    both = pd.concat([by_layer.assign(layer=ALL), by_layer], ignore_index=True)
    return both.groupby(["model", "length", "kind", "k", "layer"], as_index=False)[_OF_TILES].mean()


def _unmasked_claims(table: pd.DataFrame) -> Iterator[Claim]:
    for model, unmasked in table[table["mask"] == NO_MASK].groupby("model", sort=False):
        parts = []
        for (task, length), rows in unmasked.groupby(["task", "length"], sort=False):
            chance = f"by chance {percent(rows['chance'].max(), '.2g')}"
            if not rows["judged"].all():
                chance += "; too few to judge masks by"
            right = f"{int(rows['right'].sum())} of {int(rows['texts'].sum())} texts"
            parts.append(f"{task} in {right} of {length:,} tokens ({chance})")
        yield Claim("without-mask", f"{model} as it is answers {'; '.join(parts)}.", str(model))


def _far(findings: Findings, place: tuple[str, ...] = ("model", "task")) -> list[Summary]:
    """Return by model, task and mask what is found of judged facts that are more than k tokens back."""
    rows = findings(paired_answers)
    far = rows[rows["judged"] & (rows["distance"] > rows["k"]) & (rows["mask"] != NO_MASK)]
    names = [*place, "mask", "k"]
    groups = far.groupby(names, sort=False)
    return [dict(zip(names, cast("tuple[Any, ...]", key), strict=True)) | _counts(part) for key, part in groups]


def _masked_claims(far: list[Summary]) -> Iterator[Claim]:
    for model, task in dict.fromkeys((row["model"], row["task"]) for row in far):
        parts = [
            f"{_mask_name(row['mask'], row['k'])} {row['right']} of {row['texts']} "
            f"({_interval(row['low'], row['high'])}; as it is {row['as_it_is']}; {_verdict(row)}; perplexity of "
            f"the text {row['perplexity_change']:+.1%})"
            for row in far
            if (row["model"], row["task"]) == (model, task)
        ]
        sentence = f"{model}, {task}, told more than k tokens before: {'; '.join(parts)}."
        yield Claim(f"far-{task}", sentence, model)


def _verdict(row: Mapping[str, Any]) -> str:
    return f"{'lost' if loses(row) else 'no loss shown'}, p = {row['p']:.2g}"


def _mask_name(mask: str, k: int) -> str:
    if mask == NO_MASK:
        return "as it is"
    name = mask_style(mask).name
    return f"{name}, k = {k}" if k else name


_interval = partial(interval, form=partial(percent, form=".0f", strict=True))
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
    Column("lost", form=plain, drop=5), Column("found", form=plain, drop=4),
    Column("perplexity_change", "perplexity", lambda x: f"{x:+.1%}", drop=3),
)  # fmt: skip


@drawing(
    "The share of right answers against the distance to what was told, a line for each kind of mask: {shown}.",
    "Distance grows to the right. A line that falls where its k ends is a mask that loses what stands farther "
    "back. The black line is the model as it is; where it is low, masks are not judged.",
)
def retrieval_by_distance(findings: Findings) -> Figure:
    """Draw accuracy against distance, for each model and task that masks are judged by."""
    if findings.measurements[RETRIEVAL].empty:
        raise NothingToDrawError("No text was read.")
    table = findings(retrieval_table)
    panels = list(table.groupby(["model", "task"], sort=False))
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


_ONE_PERCENT = 0.01  # of perplexity: up to here the axis is linear


@drawing(
    "Share of the facts from beyond the keys kept that are found, with 95% intervals, against the change of the "
    "perplexity of the same texts, a point for each mask: {shown}.",
    "Up and to the left is best. A mask to the left that lies low hardly changes the perplexity, and loses facts.",
)
def facts_by_perplexity(findings: Findings) -> Figure:
    """Draw what each mask finds beyond its keys against what it costs in perplexity, tasks together."""
    far = pd.DataFrame([] if findings.measurements[RETRIEVAL].empty else findings(_far, ("model",)))
    if far.empty:
        raise NothingToDrawError("No mask is judged by facts from beyond the keys that it keeps.")
    panels = list(far.groupby("model", sort=False))
    figure, axes = panel_grid(len(panels))
    for ax, (model, rows) in zip(axes, panels, strict=True):
        ax.axhline(rows["as_it_is"].sum() / rows["texts"].sum(), color="black", linewidth=1, label="as it is")
        for row in records(rows):
            style = mask_style(row["mask"])
            ends = [[row["accuracy"] - row["low"]], [row["high"] - row["accuracy"]]]
            ax.errorbar(
                row["perplexity_change"], row["accuracy"], ends, color=style.color, marker=style.marker, capsize=2,
                linestyle="none", label=_mask_name(row["mask"], row["k"]),
            )  # fmt: skip
        ax.set_xscale("symlog", linthresh=_ONE_PERCENT)
        ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:+,.3g}%" if x else "0%")
        ax.set_ylim(-0.05, 1.05)
        ax.set_xlabel("change of perplexity")
        ax.set_title(str(model)[-40:], fontsize=9)
    axes[0].set_ylabel("share of the facts found")
    return finished(figure, "bars: exact 95% intervals; facts told more than k tokens before, tasks together.")


HEADINGS = heading(
    "retrieval", "Does it still find what it was told?", (retrieval_by_distance, facts_by_perplexity),
    "The texts are made up, from the model's own tokenizer: they say whether a fact can be reached, not how often "
    "texts of your own need one.",
    "An answer is right if each of its tokens is the likeliest after those before it. The model does not write: "
    "one that would answer in other words counts as wrong.",
    "Intervals are exact for texts drawn like these (Clopper and Pearson). A mask loses facts if McNemar's exact "
    "test on the same texts says so (p up to 0.05): of masks that help as often as they harm, at most 2.5% do.",
    "Distance: from the answer's first token back to the first token of the same answer where it was told. "
    "Perplexity is that of the filler text, which is easier than most.",
)  # fmt: skip
