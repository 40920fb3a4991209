"""Do masks survive noise: certified, predicted, observed?"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from semdiag.measuring.plan import LargestPass, Plan, ReportOptions
from semdiag.presenting import options
from semdiag.presenting.options import SUPPOSED_K, command_option, option_field
from semdiag.presenting.question import Question, Request
from semdiag.questions.stability import NOISE, check_levels

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table

_REPORT_DRAWS = 3


@dataclass(frozen=True)
class NoisePlan(Plan):
    """Which noise is added, and how often."""

    name: ClassVar[str] = "mask stability"

    levels: tuple[float, ...] = option_field((NOISE,), options.NOISE, read=options.positive_numbers)
    draws: int = option_field(5, "Noisy copies of each input at each noise level.", rare=True)
    k: int = option_field(
        SUPPOSED_K, "Full-attention models have no mask: test the one that top-k would choose, with this k.",
    )  # fmt: skip
    seed: int = options.shared_field(0)

    def __post_init__(self) -> None:
        check_levels(self.levels)
        options.check_least(self, draws=1, k=1)

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.mask_stability.measure import MASKS, NOISE_EFFECTS

        return MASKS, NOISE_EFFECTS

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.mask_stability.measure import measure_mask_stability

        return measure_mask_stability(subject, self)

    def largest_pass(self, samples: int, length: int) -> LargestPass:
        """Return its largest pass over batches of so many samples."""
        copies = 1 + len(self.levels) * self.draws
        return LargestPass(max(1, samples // copies) * copies)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"mask_noise": asdict(self), "probe_samples": probe_samples}

    @classmethod
    def for_report(cls, options: ReportOptions) -> "NoisePlan":
        """Return the plan of a report."""
        return cls(options.noise, draws=_REPORT_DRAWS, k=options.k or SUPPOSED_K, seed=options.seed)


def _ask(
    precision: Annotated[
        str,
        command_option(
            "Number formats to which queries, keys and scores are rounded, like bf16,fp16,fp8-e4m3,fp8-e5m2. "
            "Noise is then added only if an option of it is given.",
            panel="Which rounding", metavar="FORMAT,FORMAT", rare=True,
        ),
    ] = "",
    *,
    plan: NoisePlan,
    request: Request,
) -> None:  # fmt: skip
    from semdiag.measuring.findings.estimates import check_supposed_k
    from semdiag.questions.mask_precision import PrecisionPlan

    plans: dict[str, NoisePlan | PrecisionPlan] = {}
    if "precision" not in request.typed or {"levels", "draws"} & request.typed:
        plans["mask-stability"] = plan
    if "precision" in request.typed:
        plans["mask-precision"] = PrecisionPlan(options.listed_names(precision), plan.k)
    findings, _ = request.measured(request.values["models"], request.conditions(plans=tuple(plans.values())))
    if "k" in request.typed:
        check_supposed_k(findings, plan.k)
    request.deliver(findings, tuple(plans))


QUESTION = Question(
    "mask-stability",
    __name__,
    """Test whether attention masks survive a little input noise, or a number format: certified, observed.

    A query's mask is the set of keys that it keeps. Certified: the scores provably move too little to change the
    mask. Predicted: the probability that the two keys at the boundary (the smallest kept score, the largest
    dropped one) do not swap. Observed: how many masks are the same in noisy copies of the input. Masks that do
    not depend on the input cannot change. With --precision the masks of rounded queries, keys and scores are
    compared with those of float64: changed, tied, certified.

    [bold]semdiag mask-stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """,
    NoisePlan,
    _ask,
    takes=("models", "every"),
    defaults={"levels": "0.001,0.01,0.1"},
    needs=("masks", "noise_effects"),
    pictured=True,
    place="screen",
)
