"""The sections of a report on masks under noise and on other k."""

from semdiag.presentation.report.question import Question, Shown

MASK_QUESTIONS = (
    Question(
        "mask-stability",
        "mask-stability",
        "Do masks survive noise?",
        (
            Shown(
                "mask_agreement",
                "Share of queries whose mask stays exactly the same under input noise, per layer, with 95 % "
                "intervals and the certified share dotted: {models}.",
                "A curve near 1 belongs to a layer whose masks do not care about this noise. The dotted line is "
                "what can be proven from Δ and the change of the scores alone; the space between it and the "
                "curves are masks that survive without a proof.",
            ),
            Shown(
                "mask_reliability",
                "Observed against predicted share of unchanged masks in ten bins of Δ over the standard "
                "deviation of the boundary pair's change, one curve per noise level: {models}.",
                "On the dashed diagonal Δ says as much as the prediction Φ(Δ/sd) claims. Points below it lose "
                "their masks to other pairs than the one at the boundary; above it, few large "
                "changes, like those after a swap below, make the standard deviation larger than most changes.",
            ),
            Shown(
                "mask_heat_map",
                "Share of unchanged masks as coloured cells, layers by noise levels: {models}.",
                "Read a column from bottom to top: noise is passed on from layer to layer, so that later masks "
                "can change although nothing was added there. --at-block puts the noise into one block's input "
                "and leaves those below clean.",
            ),
        ),
        (
            "A full-attention model drops no key. The mask judged there is the one that top-k would choose from "
            "its scores; nothing of that model's output depends on it. Masks that do not depend on the input "
            "(banded, block-local) cannot change: not applicable.",
            "Certified means: max dz − min dz over all allowed keys is below Δ, which proves S′ = S. A certified "
            "mask that changed would be an error of semdiag; such rows are counted and named above. In float32 "
            "the certificate leaves room for rounding.",
            "The noise is Gaussian and isotropic; that of training data or of an adversary is neither. Intervals "
            "speak about other inputs of the same kind, not about other seeds of the training.",
        ),
    ),
    Question(
        "k-sweep",
        "k-sweep",
        "What would another k leave of this attention?",
        (
            Shown(
                "k_sweep",
                "Against k, within each model: attention mass of the k largest scores, dispersion ratio, "
                "separation on a logarithmic axis, and left sides of the paper's conditions around 1: {models}.",
                "Look for a k at which the mass is above the dashed line while all curves of the last panel are "
                "below 1. Where there is none, no top-k mask both keeps what this model attends to and has the "
                "better guarantee by the paper's own conditions.",
            ),
        ),
        (
            "This is a comparison within a model, on its own scores. A model trained with that k has other "
            "scores: the sections above that compare trained models are about that.",
            "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper "
            "does: that is a heuristic.",
            "Small k meets the paper's condition easily because δₕ(1) = 0: a mask that keeps one key has no "
            "dispersion and no attention left to learn.",
        ),
    ),
)
