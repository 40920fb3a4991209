"""How much do weights move when scores move, and do the bounds hold?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semdiag.measuring.plan import LargestPass, Plan, ReportOptions
from semdiag.presenting import options
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table

SAMPLES = 50  # inputs to which noise is added, at most
LONGEST = 1024  # tokens of texts of which a report measures secants; beyond it they take minutes
NOISE = 0.01  # of each embedded token's root mean square


def check_levels(levels: Sequence[float]) -> None:
    """Check noise levels."""
    from semdiag_files import InputError

    wrong = [level for level in levels if not 0 < level < float("inf")]
    if wrong:
        raise InputError(f"A noise level must be a positive number, like {NOISE}. Got {wrong[0]}.")


@dataclass(frozen=True)
class SecantsPlan(Plan):
    """Which noise is added."""

    name: ClassVar[str] = "secants"

    levels: tuple[float, ...] = options.option_field((NOISE,), options.NOISE, read=options.positive_numbers)
    most_tokens: int | None = None  # of an external model's texts, beyond which it is left out

    def __post_init__(self) -> None:
        check_levels(self.levels)

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.stability.gains import GAINS
        from semdiag.questions.stability.measure import SECANTS

        return SECANTS, GAINS

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.stability.measure import measure_stability

        return measure_stability(subject, self)

    def largest_pass(self, samples: int, length: int) -> LargestPass:
        """Return its largest pass over batches of so many samples."""
        from semdiag.questions.stability.gains import samples_at_once
        from semdiag.questions.stability.measure import pairs_at_once

        pairs = min(samples, pairs_at_once(length, length))
        return LargestPass(max(2 * pairs, min(samples, samples_at_once(length))), double=True)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"noise": list(self.levels), "noise_samples": min(SAMPLES, samples)}

    @classmethod
    def for_report(cls, options: ReportOptions) -> "SecantsPlan":
        """Return the plan of a report."""
        return cls(options.noise, most_tokens=None if options.thorough else LONGEST)


QUESTION = Question(
    "stability",
    __name__,
    """Measure how much attention weights move when scores move, and compare it with the paper's and a sound bound.

    ξ bounds the change of the weights p by that of the scores z: ‖p − p'‖₁ ≤ ξ ‖z − z'‖₁ (paper, Theorem 5).
    Shown per layer and head: the local constant, secants measured under input noise (50 samples), the response
    (mean change of the weights), ξ in both forms, and whether each bound holds.

    [bold]semdiag stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """,
    SecantsPlan,
    defaults={"dtype": "float64"},
    takes=("every",),
    needs=("secants",),
    place="theory",
)
