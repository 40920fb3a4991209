"""The sections of a report that set the theory beside what was measured."""

from semdiag.presentation.report.question import Question, Shown

_HEURISTIC = (
    "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper does: "
    "that is a heuristic, not a theorem about any one query."
)

THEORY_QUESTIONS = (
    Question(
        "stability",
        "stability",
        "How far does attention move when its scores move?",
        (
            Shown(
                "stability_curves",
                "Constant ξ of a softmax row against its dispersion δ for 40 and 600 keys, logarithmic axes, "
                "in the paper's form and the sound one, with measured secants of full attention below: "
                "{models}.",
                "Every point, a measured change of attention over the change of its scores, must lie below the"
                " solid curve, the smallest constant that holds for all rows of that δ. Where the paper's "
                "dashed curve lies below it (shaded) it is no upper bound, even if no point here exceeds it; "
                "further right it grows without end while the sound constant stays at ½.",
            ),
            Shown(
                "attention_response",
                "Distribution of the change of attention weights ‖p − p′‖₁ under input noise per layer, as "
                "nested boxes on a logarithmic axis with the mean marked, attention kinds side by side: "
                "{models}.",
                "Compare the marked means at the same layer: the higher one belongs to the attention that the "
                "same relative noise moves more. A mean far above its box comes from few queries that exchange"
                " a whole key, as a top-k mask does where Δ is small.",
            ),
        ),
        (
            "A constant bounds the worst pair of rows; the response is an average under one kind of noise "
            "(level, samples and draws stand on the figures). A small δ can lower the first and leave the "
            "second high.",
            "ξ bounds the attention weights by the change of the scores. How much noise at the input changes "
            "the scores depends on the layers below and on Γ, which ξ does not know.",
            "The heavy-hitter form takes δ as the larger and Δ as the smaller of both rows; rows with Δ ≤ 0 do"
            " not meet its assumptions and are counted, not judged.",
        ),
    ),
    Question(
        "constants",
        "bounds",
        "How far below their bounds are the slopes of the loss?",
        (
            Shown(
                "secants_under_bounds",
                "Decimal logarithm of the constants of Theorem 2 in both forms and of measured gradients and "
                "secants of the loss, for each group of parameters and block: {models}.",
                "The grey lines are the distance between what the loss did and what the bound allows, in "
                "powers of ten. Where they are long, the bound is true and explains nothing: a difference "
                "between two models' constants then need not show in how they learn.",
            ),
        ),
        (
            "A constant is the largest over the evaluated inputs at this checkpoint, not over all inputs, nor "
            "along training. Gradient and secant are lower ends of the true constant and not ordered among "
            "themselves.",
            "The paper's form is computed for its own equations (post-norm, no biases). Where a model differs,"
            " the verdict says so: there the paper's theorem claims nothing.",
        ),
    ),
    Question(
        "corollary",
        "bounds",
        "Has the mask the better guarantee?",
        (
            Shown(
                "corollary_conditions",
                "Left sides of both conditions of Corollary 1 at percentiles 75, 90, 95 and 100 as bars around"
                " 1, and the margins of the sound comparison as bars around 0, for each pair: {models}.",
                "Bars below the line say that the mask has the better worst-case guarantee at that percentile,"
                " bars above that full attention has. Left is the paper's condition, right the comparison of "
                "constants that hold; where the two disagree, the paper's explanation rests on its form of ξ.",
            ),
            Shown(
                "corollary_plane",
                "Plane of δₕ/δₛ and Δₕ/δₛ, logarithmic ordinate, with the boundary of the paper's condition "
                "for several δₛ and key loads, and measured pairs and the paper's four tasks as points: "
                "{models}.",
                "A pair meets the paper's condition if it lies left of the boundary that belongs to its own δₛ"
                " (and β, in X); its points are then filled. A larger δₛ moves the boundary right, so that a "
                "widely dispersed full model makes the condition easy to meet.",
            ),
        ),
        (
            _HEURISTIC,
            "The sound comparison in W never favours a heavy-hitter mask: the worst-case constant of full "
            "attention does not depend on its δ. Faster learning of a top-k model cannot follow from it.",
            "Fixed masks (banded, block-local, random) are a control: their constants differ from those of full "
            "attention only in δ, k and load, and ignore what the tokens mean. The paper's numbers are those "
            "it prints, k = 5.",
        ),
    ),
)
