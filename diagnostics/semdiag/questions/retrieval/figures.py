"""Figure: right answers by distance, a line for each kind of mask."""

from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.panels import NothingToDrawError, name_ends
from semdiag.presenting.drawing.style import drawing, note_below, palette, panel_grid
from semdiag.questions.retrieval.answer import mask_name, retrieval_table


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
            ax.plot(line.index, shares, "o-", markersize=3, color=color, label=mask_name(mask, k))
            ends += [(float(shares.iloc[-1]), mask_name(mask, k), color, "")] if len(shares) else []
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


HEADINGS = (
    Heading(
        "retrieval",
        "Does it still find what it was told?",
        (retrieval_by_distance,),
        (
            "The texts are made up, from the model's own tokenizer: they say whether a fact can be reached, not "
            "how often texts of your own need one.",
            "An answer is right if each of its tokens is the likeliest after those before it. The model does not "
            "write: one that would answer in other words counts as wrong.",
            "Intervals are exact for texts drawn like these (Clopper and Pearson). Perplexity is that of the "
            "filler text, which is easier than most.",
        ),
    ),
)
