"""Do masks survive a number format: certified, observed?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semdiag.measuring.plan import Plan
from semdiag.presenting.options import SUPPOSED_K, check_least
from semdiag.presenting.question import Question

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table


@dataclass(frozen=True)
class PrecisionPlan(Plan):
    """In which number formats masks are compared with those in float64."""

    name: ClassVar[str] = "mask precision"

    formats: tuple[str, ...] = ("bfloat16",)  # short names or torch's; stored as torch's, each once
    k: int = SUPPOSED_K  # keys in the mask that top-k would choose in a model without a selection of its own

    def __post_init__(self) -> None:
        from semdiag.mathematics.rounding import FORMATS, number_format
        from semdiag_files import InputError

        names = tuple(dict.fromkeys(number_format(name).name for name in self.formats))
        coarser = [name for name, kind in FORMATS.items() if kind.digits <= FORMATS["float32"].digits]
        if not names or not {*names} <= {*coarser}:
            listed = ", ".join(map(str, self.formats)) or "none"
            raise InputError(f"Masks are compared in {', '.join(coarser)} against float64. Got {listed}.")
        check_least(self, k=1)
        object.__setattr__(self, "formats", names)

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.mask_precision.measure import LOST_WEIGHTS, ROUNDED_MASKS

        return ROUNDED_MASKS, LOST_WEIGHTS

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.mask_precision.measure import measure_precision

        return measure_precision(subject, self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"mask_formats": list(self.formats), "mask_k": self.k, "probe_samples": probe_samples}


QUESTION = Question("mask-precision", __name__, plan=PrecisionPlan, needs=("rounded_masks",))
