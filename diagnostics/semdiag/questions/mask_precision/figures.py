"""Figures: its figure, sentences and tables."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.answer import Heading
from semdiag.presenting.drawing.style import drawing, finished, panel_grid
from semdiag.questions.mask_precision.answer import precision_table
from semdiag.questions.mask_stability.figures import MARKERS, judged_models, shades


@drawing(
    "Share of queries whose mask is the same in float64 and rounded to a number format, per layer, certified "
    "share dotted: {shown}.",
    "The band of a format is due to ties at the boundary, which engines break in their own ways. The dotted share "
    "is proven: no engine within the error model changes it.",
)
def masks_in_formats(findings: Findings) -> Figure:
    """Draw the share of masks that stay the same, a curve for each number format against layers."""
    models = judged_models(findings, "rounded_masks")
    table = findings(precision_table)
    formats = list(table["format"].unique())
    figure, axes = panel_grid(len(models), height=2.9)
    for ax, (model, title) in zip(axes, models, strict=True):
        of_model = table[(table["model"] == model) & (table["layer"] != ALL)]
        for at, (kind, color) in enumerate(zip(formats, shades(len(formats)), strict=True)):
            rows = of_model[of_model["format"] == kind]
            layers = rows["layer"].to_numpy(int)
            ax.plot(layers, 1 - rows["changed"], color=color, marker=MARKERS[at], markersize=4, label=kind)
            ax.fill_between(
                layers, 1 - rows["changed_or_tied"], 1 - rows["changed"], color=color, alpha=0.25, linewidth=0
            )
            ax.plot(layers, rows["certified"], color=color, linestyle=":", linewidth=1.3)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("layer")
        ax.set_ylim(0, 1.03)
        ax.set_title(title, fontsize=9)
    axes[0].set_ylabel("share of masks unchanged, S′ = S")
    return finished(
        figure,
        "Queries, keys and scores rounded once, against float64. Bands: down to the share without a tie at the "
        "boundary; dotted: certified to be unchanged. Heads pooled, without rows that are not covered.",
    )


HEADINGS = (
    Heading(
        "mask-precision",
        "Do masks survive a number format?",
        (masks_in_formats,),
        (
            "Certified: no rounding of operands, sum and score can move a kept score below a dropped one, or "
            "level with it. The proof holds for an error model (docs/theory.md), not for an engine's bugs.",
            "The error model rounds queries and keys without a scale, adds in float32 and rounds the scaled score "
            "once more. Rows with a bias, a soft-cap or sinks are not covered, and are left out of every share.",
            "Rounding is not passed on from layer to layer. A full-attention model is judged by the mask that "
            "top-k would choose.",
        ),
    ),
)
