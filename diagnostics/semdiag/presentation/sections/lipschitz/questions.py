"""The sections of a report in which parameters are moved: the loss surface, and how steep it is."""

from semdiag.presentation.report.question import Question, Shown

_TWO_OF_MANY = (
    "A plane shows two of more than a hundred thousand directions. Random ones miss the steep directions: a flat "
    "picture does not mean a flat loss."
)

PROBE_QUESTIONS = (
    Question(
        "lipschitz",
        "lipschitz",
        "How steep is the loss around the checkpoint?",
        (
            Shown(
                "lipschitz_percentiles",
                "Percentiles 50, 75, 95 and 99 of the secants of the loss between parameters on circles in random "
                "planes against the radius, logarithmic axes, with 95 % bands, attention kinds together: "
                "{models}.",
                "The lower curve belongs to the model whose loss changes less per distance, as the paper says of "
                "top-k. Where the bands overlap, these planes do not settle it.",
            ),
            Shown(
                "lipschitz_rungs",
                "Decimal logarithm of the largest secant, the largest gradient norm, the extreme-value end point "
                "and the sound bound for each group of parameters: {models}.",
                "Secants, gradients and end points are three estimates from below, in no order among themselves. "
                "The grey lines are what the bound leaves open, in powers of ten.",
            ),
            Shown(
                "block_stretch",
                "How much each block stretches a small change of its input at most, sample by sample, below bars "
                "for the bound λ_X, logarithmic axis: {models}.",
                "Compare the points of both models at the same block: the higher ones pass a change of the input "
                "on more strongly. The bars above them are what the theory promises.",
            ),
        ),
        (
            "A trained model whose loss is near 0 is flat nearby whatever its attention: gradients and secants "
            "shrink with the loss. Compare initialisations, too (the runs' epoch-0.pt).",
            "Random directions are nearly orthogonal to the gradient, so secants lie far below gradient norms; "
            "an end point is that of the sampling law: none of these numbers is the supremum over the ball.",
            "With a top-k mask the loss jumps where a key is swapped: gradients do not see it, secants do.",
            "The intervals speak about other random planes around these models, not about other training runs.",
        ),
    ),
    Question(
        "landscape",
        "landscape",
        "What does the loss look like around the checkpoint?",
        (
            Shown(
                "landscape_contour",
                "Coloured cells of cross-entropy and of accuracy on planes in parameter space through each "
                "checkpoint, contour lines over the loss, checkpoint and snapshots marked: {models}.",
                "Compare the size of the region around the cross in which the accuracy stays high. Every cell is "
                "a model that was run, and models of one figure share their colour scale.",
            ),
            Shown(
                "landscape_surface",
                "The cross-entropy on the same planes as surfaces over both directions: {models}.",
                "The same cells as heights: a wide basin with gentle walls can be left by larger steps than a "
                "narrow one.",
            ),
            Shown(
                "landscape_cuts",
                "Cross-entropy and accuracy against the way from the checkpoint along both axes of each plane, "
                "attention kinds together: {models}.",
                "The rows of cells through the checkpoint, exactly as evaluated. Where the curves of one model "
                "differ much from direction to direction, one plane says little about that model.",
            ),
            Shown(
                "landscape_attention",
                "Coloured cells of the median and 95th percentile of the dispersion δ, and of the separation Δ, "
                "on the same planes: {models}.",
                "Where the loss changes and δ does not, the dispersion is not what makes the loss steep there.",
            ),
        ),
        (
            _TWO_OF_MANY,
            "Distances are relative to the length ‖θ‖ of all parameters, and each tensor moves by its own length "
            "at distance 1. Models of different length walk different true distances; the tables hold both.",
            "One trained model per surface: how surfaces of other seeds look is not in these pictures.",
        ),
    ),
)
