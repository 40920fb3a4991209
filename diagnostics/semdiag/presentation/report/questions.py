"""The sections of a report: a question, its figures, how to read them, and what they do not show."""

from semdiag.presentation.report.question import Question, Shown
from semdiag.presentation.sections.bounds.questions import THEORY_QUESTIONS
from semdiag.presentation.sections.convergence.questions import CONVERGENCE_QUESTIONS
from semdiag.presentation.sections.lipschitz.questions import PROBE_QUESTIONS
from semdiag.presentation.sections.mask_stability.questions import MASK_QUESTIONS
from semdiag.presentation.sections.within.questions import BY_KEYS, WITHIN

_PAIRED = (
    "This is a comparison across models: two models, each trained with its own attention on the same data "
    "and seed, each measured on its own scores. Nothing here says what one of them would do with the "
    "other's mask."
)
_POOLED = (
    "Percentiles pool the queries of all layers and heads; the 95th percentile of two models need not come "
    "from the same layer. The maximum (p100) is one single query and is shown, not judged."
)


SECTIONS = (
    "dispersion", "within", "separation", "learning", "stability", "bounds", "mask-stability", "k-sweep",
    "lipschitz", "landscape", "convergence", "along", "predictors", "lengths",
)  # fmt: skip

QUESTIONS = (
    Question(
        "focus",
        "dispersion",
        "Does the sparse model focus?",
        (
            Shown(
                "dispersion_ecdf",
                "Cumulative distribution of the semantic dispersion δ in nats, logarithmic axis, one curve "
                "per model, percentiles 50, 75, 90 and 95 marked: {models}.",
                "Compare the curves at the same height: a curve further left has the smaller dispersion δ, "
                "the range (largest minus smallest) of the scores a query's softmax mixes. A small δ means "
                "that the kept keys compete on nearly equal terms: none can take more than e^δ/(e^δ + k − 1) "
                "of the weight. The paper's bounds grow with e^δ, and so it ties a small δ to fast learning.",
            ),
            Shown(
                "dispersion_by_layer",
                "Distribution of the semantic dispersion δ in nats per layer, as nested boxes on a "
                "logarithmic axis, attention kinds side by side: {models}.",
                "Look for layers in which full attention (δₛ, over all keys) stands far above the sparse "
                "models (δₕ, over the kept keys): there the scores spread most. Where an initialisation is "
                "shown in a panel of its own, compare with it: what is already there before training is "
                "owed to the mask, not to learning.",
            ),
            BY_KEYS,
        ),
        (
            _PAIRED,
            _POOLED,
            "A range over a few keys is never larger than the range over all keys of the same row; the "
            "controls with a fixed mask show how much of the difference that alone can make.",
        ),
    ),
    Question(
        "ratio",
        "dispersion",
        "How much smaller, layer by layer?",
        (
            Shown(
                "dispersion_ratio",
                "Ratio of the dispersion of sparse models to that of full attention per layer, median and "
                "95th percentile, with 95 % intervals and a line at 1: {models}.",
                "Points below the dashed line at 1 are layers in which the sparse model has the smaller δ; "
                "equal steps on the axis are equal factors. The bars are 95 % intervals from resampling "
                "whole sequences: if a bar crosses 1, these inputs do not settle the question for that "
                "layer.",
            ),
        ),
        (
            "The intervals speak about other inputs of the same kind, not about other seeds or training "
            "runs. Queries of one sequence depend on each other, therefore sequences are drawn, never "
            "single queries.",
            "Layer n of one model and layer n of another are matched by position; nothing says that they do "
            "the same work.",
        ),
    ),
    WITHIN,
    Question(
        "separation",
        "separation",
        "Is the mask well separated?",
        (
            Shown(
                "separation_by_layer",
                "Distribution of the semantic separation Δ in nats per layer, as nested boxes on a "
                "logarithmic axis, with the share of queries at or below 0 stated: {models}.",
                "Δ is the lowest kept score minus the highest dropped one; the lower ends of the boxes are "
                "what matters. A tiny Δ means that a small change of the input can swap keys in and out of "
                "the mask, and the bounds of a heavy-hitter mask grow as 1/Δ.",
            ),
        ),
        (
            "Full attention drops no key, so Δ is undefined there. Masks that ignore the input (banded, "
            "block-local, random) drop larger scores than they keep for most queries, and bottom-k does for all: "
            "Δ ≤ 0, which lies below a logarithmic axis.",
            "A tie between the last kept and the first dropped key has Δ = 0 and counts as not positive.",
        ),
    ),
    Question(
        "load",
        "separation",
        "Which keys carry the load?",
        (
            Shown(
                "key_load",
                "Share of keys that at least x queries keep, logarithmic axis, with k and the largest load "
                "marked: {models}.",
                "Read a curve from left to right: how many keys are kept by at least that many queries. A "
                "curve that falls at k spreads the attention evenly; a long tail means sinks, few keys that "
                ""
                "many queries rely on, beside keys that nobody reads.",
            ),
        ),
        (
            "Loads are raw counts within one sequence, layers and heads pooled; they cannot exceed its "
            "length. They count how often a key is kept, not the weight it gets.",
        ),
    ),
    Question(
        "learning",
        "learning",
        "Did it learn faster?",
        (
            Shown(
                "training_curves",
                "Training and held-out accuracy and cross-entropy loss against epochs, first epoch with 95 "
                "% training accuracy marked: {models}.",
                "Compare where the thick curves cross the dashed line: the first epoch with 95 % training "
                "accuracy. The gap between thick (training) and thin (held-out) curves is what was "
                "memorised instead of learned.",
            ),
        ),
        (
            "One run per curve: a different seed can shift the arrival by many epochs. A smaller dispersion "
            ""
            "and faster learning seen together in one pair do not show that one causes the other.",
            "Epochs are counted, not seconds: an epoch does not cost the same for every attention.",
        ),
    ),
    *THEORY_QUESTIONS,
    *MASK_QUESTIONS,
    *PROBE_QUESTIONS,
    *CONVERGENCE_QUESTIONS,
)
