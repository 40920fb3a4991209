"""The section ``dispersion`` of a report."""

import pandas as pd

from semdiag.capturing.attention_kinds import external
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import percentile_csv
from semdiag.questions.dispersion.answer.comparisons import layer_ratios, recall_table
from semdiag.questions.dispersion.figures.dispersion_by_keys import dispersion_by_keys
from semdiag.questions.dispersion.figures.dispersion_by_layer import dispersion_by_layer
from semdiag.questions.dispersion.figures.dispersion_ecdf import dispersion_ecdf
from semdiag.questions.dispersion.figures.dispersion_ratio import dispersion_ratio
from semdiag.questions.dispersion.glance import dispersion_glance
from semdiag.questions.dispersion.words import dispersion_in_short


def dispersion_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return percentiles of δ, its ratios to full attention's if models can be compared, and recall if defined."""
    tables = {"dispersion": percentile_csv(findings, "dispersion")}
    if not external(findings.measurements.models).all():
        tables["dispersion_ratio"] = findings(layer_ratios)
    if len(recall := findings(recall_table)):
        tables["recall"] = recall
    return tables


_BY_KEYS = Shown(
    dispersion_by_keys,
    "Percentiles of the semantic dispersion δ in nats against the number of keys a query may attend to, "
    "logarithmic abscissa, as a median line in two bands: {shown}.",
    "A range over more scores is wider to begin with: compare queries with the same number of keys. A line that "
    "is flat says that the width of the scores, not their number, sets δ; in causal models the first queries "
    "see few keys and pull every pooled percentile down (--min-keys leaves them out).",
)
_PAIRED = (
    "This is a comparison across models: two models, each trained with its own attention on the same data "
    "and seed, each measured on its own scores. Nothing here says what one of them would do with the "
    "other's mask."
)
_POOLED = (
    "Percentiles pool the queries of all layers and heads; the 95th percentiles of two models need not come from "
    "the same layer. The maximum (p100) is one single query, so it is shown but not judged."
)
_HEADINGS = (
    Heading(
        "focus",
        "Do the scores of the sparse model span less?",
        (
            Shown(
                dispersion_ecdf,
                "Cumulative distribution of the semantic dispersion δ in nats, logarithmic axis, one curve "
                "per model, percentiles 50, 75, 90 and 95 marked: {shown}.",
                "Compare the curves at the same height: a curve further left has the smaller dispersion δ, "
                "the range (largest minus smallest) of the scores a query's softmax mixes. A small δ means "
                "that the kept keys compete on nearly equal terms: none can take more than e^δ/(e^δ + k − 1) "
                "of the weight. The paper's bounds grow with e^δ, and so it ties a small δ to fast learning.",
            ),
            Shown(
                dispersion_by_layer,
                "Distribution of the semantic dispersion δ in nats per layer, as nested boxes on a "
                "logarithmic axis, attention kinds side by side: {shown}.",
                "Look for layers in which full attention (δₛ, over all keys) stands far above the sparse models "
                "(δₕ, over the kept keys): there the scores spread most. Where an initialisation is shown in a "
                "panel of its own, compare with it: what is already there before training comes from the mask, "
                "not from learning.",
            ),
            _BY_KEYS,
        ),
        (
            _PAIRED,
            _POOLED,
            "A range over a few keys is never larger than the range over all keys of the same row; the "
            "controls with a fixed mask show how much of the difference that alone can make.",
        ),
    ),
    Heading(
        "ratio",
        "How much smaller, layer by layer?",
        (
            Shown(
                dispersion_ratio,
                "Ratio of the dispersion of sparse models to that of full attention per layer, median and "
                "95th percentile, with 95% intervals and a line at 1: {shown}.",
                "Points below the dashed line at 1 are layers in which the sparse model has the smaller δ; "
                "equal steps on the axis are equal factors. The bars are 95% intervals from resampling "
                "whole sequences: if a bar crosses 1, these inputs do not settle the question for that "
                "layer.",
            ),
        ),
        (
            "The intervals are about other inputs of the same kind, not about other seeds or training runs. "
            "Queries of one sequence depend on each other, therefore sequences are drawn, never single queries.",
            "Layer n of one model and layer n of another are matched by position; nothing says that they do "
            "the same work.",
        ),
    ),
)
_EXTERNAL = (
    Heading(
        "spread",
        "How far apart are the scores?",
        (
            Shown(
                dispersion_by_layer,
                "Distribution of the semantic dispersion δ in nats per layer, as nested boxes on a logarithmic "
                "axis: "
                "{shown}.",
                "δ is the range, largest minus smallest, of the scores that a query's softmax mixes. A small δ "
                "means that all keys compete on nearly equal terms: none can take more than e^δ/(e^δ + n − 1) of "
                "the weight of n keys. The paper's bounds on how fast a model learns grow with e^δ.",
            ),
            _BY_KEYS,
        ),
        (
            "Percentiles pool the queries of all heads of a layer. The maximum (p100) is one single query.",
            "Layers are numbered in the order in which they first ran; the table at the end names their modules.",
            "Nothing is known of this model's training, so nothing here says whether its attention made it learn "
            "fast or slowly.",
        ),
    ),
)


SECTION = Section(
    name="dispersion",
    needs=(),
    headings=_HEADINGS,
    external=_EXTERNAL,
    in_short=dispersion_in_short,
    glance=dispersion_glance,
    tables=dispersion_tables,
)
