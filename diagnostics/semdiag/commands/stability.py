"""``semdiag stability``."""

from semdiag.commands import options
from semdiag.commands.shared import Shared, with_options


@with_options(dtype="float64")
def stability(
    models: options.Models = None,
    noise: options.Noise = "0.01",
    *,
    shared: Shared,
) -> None:
    """Measure how much attention weights move when scores move, beside the paper's and the sound bound.

    ξ bounds ‖p − p'‖₁ by ξ ‖z − z'‖₁ (paper, Theorem 5). Given per layer and head: the local constant,
    measured secants under input noise (50 samples), the response (mean change), ξ in both forms, and
    verdicts.

    [bold]semdiag stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.commands import measuring
    from semdiag.commands.printing.theory import print_stability
    from semdiag.measurement.probes.noise.secants import SecantsPlan

    conditions = shared.conditions(
        plans=(SecantsPlan(measuring.positive_numbers(noise, "--noise")),),
    )
    findings = shared.measured(models, conditions)
    shared.deliver("stability", findings, print_stability)
