"""The sections of a report about one dense model by itself, and the whole of it for models of others."""

from semdiag.presentation.report.question import Question, Shown
from semdiag.presentation.sections.bounds.questions import THEORY_QUESTIONS
from semdiag.presentation.sections.mask_stability.questions import MASK_QUESTIONS

BY_KEYS = Shown(
    "dispersion_by_keys",
    "Percentiles of the semantic dispersion δ in nats against the number of keys a query may attend to, "
    "logarithmic abscissa, as a median line in two bands: {models}.",
    "A range over more scores is wider to begin with: compare queries with the same number of keys. A line that "
    "is flat says that the width of the scores, not their number, sets δ; in causal models the first queries "
    "see few keys and pull every pooled percentile down (--min-keys leaves them out).",
)

WITHIN = Question(
    "within",
    "within",
    "Would sparse attention help a full model?",
    (
        Shown(
            "dispersion_counterfactual",
            "Within full-attention models: dispersion over all keys beside the dispersion over the k largest "
            "scores of the same rows, per layer: {models}.",
            "Within one and the same full model: the spread of all its scores beside the spread of its k "
            "largest only. It shows what a top-k mask would leave of this model's dispersion without training "
            "it anew; it is no comparison between trained models.",
        ),
        Shown(
            "mass_kept",
            "Within full-attention models: share of the attention weight on the k largest scores, per layer: "
            "{models}.",
            "How much of the attention a top-k mask would keep. Layers whose boxes touch 1 already attend to k "
            "keys and would hardly notice the mask; where the boxes are low, the mask would throw away what the "
            "model uses.",
        ),
        Shown(
            "separation_counterfactual",
            "Within full-attention models: gap in nats between the k-th and the next largest score, per layer, "
            "logarithmic axis: {models}.",
            "The gap between the last score that a top-k mask would keep and the first it would drop. Small "
            "gaps mean that a small change of the input would swap keys in and out of the mask.",
        ),
        Shown(
            "key_load_counterfactual",
            "Within full-attention models: share of keys that at least x queries would keep, logarithmic axis: "
            "{models}.",
            "Which keys a top-k mask would rely on: a curve that falls near k spreads the queries evenly, a "
            "long tail means sinks that nearly every query would keep.",
        ),
    ),
    (
        "A counterfactual within one trained model: nobody trained it with a mask. A model trained with one "
        "moves its scores; how far, only training tells.",
        "Queries with at most k keys lose none: their δₕ(k) is δₛ, they keep all weight and have no separation.",
    ),
)

_SPREAD = Question(
    "spread",
    "dispersion",
    "How far apart are the scores?",
    (
        Shown(
            "dispersion_by_layer",
            "Distribution of the semantic dispersion δ in nats per layer, as nested boxes on a logarithmic axis: "
            "{models}.",
            "δ is the range, largest minus smallest, of the scores that a query's softmax mixes. A small δ "
            "means that all keys compete on nearly equal terms: none can take more than e^δ/(e^δ + n − 1) of "
            "the weight of n keys. The paper's bounds on how fast a model learns grow with e^δ.",
        ),
        BY_KEYS,
    ),
    (
        "Percentiles pool the queries of all heads of a layer. The maximum (p100) is one single query.",
        "Layers are numbered in the order in which they first ran; the table at the end names their modules.",
        "Nothing is known of this model's training, so nothing here says whether its attention made it learn "
        "fast or slowly.",
    ),
)

# Of models whose attention alone is known.
EXTERNAL_QUESTIONS = (_SPREAD, WITHIN, *(q for q in THEORY_QUESTIONS if q.section == "stability"), *MASK_QUESTIONS)
