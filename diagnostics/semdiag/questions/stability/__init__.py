"""How much do weights move when scores move, and do the bounds hold?"""

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


@command(dtype="float64")
def stability(
    models: options.Models = None,
    noise: options.Noise = "0.01",
    *,
    shared: Shared,
) -> None:
    """Measure how much attention weights move when scores move, and compare it with the paper's and a sound bound.

    ξ bounds the change of the weights p by that of the scores z: ‖p − p'‖₁ ≤ ξ ‖z − z'‖₁ (paper, Theorem 5).
    Shown per layer and head: the local constant, secants measured under input noise (50 samples), the response
    (mean change of the weights), ξ in both forms, and whether each bound holds.

    [bold]semdiag stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.questions.stability.answer import print_stability
    from semdiag.questions.stability.measure import SecantsPlan

    conditions = shared.conditions(
        plans=(SecantsPlan(options.positive_numbers(noise, "--noise")),),
    )
    findings = shared.measured(models, conditions)
    shared.deliver("stability", findings, print_stability)


QUESTION = Question(
    "stability",
    __name__,
    measured_by="measure:SOFTMAX_SECANTS",
    summarised_by="answer:stability_summary",
    shown_by="figures:SECTION",
    asked_by=":stability",
)
