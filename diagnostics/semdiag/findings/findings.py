"""Findings: everything that follows from measurements, each answer made when first asked for, and once."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from semdiag.measurement.measurements import Measurements

Answer = TypeVar("Answer")


class Findings:
    """Measurements, and the answers they give to questions.

    A *question* is a function of findings, like :func:`~semdiag.findings.mask_stability.mask_table`. It may ask
    others. Terminal, page, figures, CSV and JSON ask one and the same object, so that all say the same, and what
    takes seconds to work out is worked out once.

    Args:
        measurements: of one or several models.

    Attributes:
        measurements: as given.

    Example:
        >>> from semdiag.findings.pairing import compared_pairs
        >>> import pandas as pd
        >>> models = pd.DataFrame({"model": [], "source": [], "attention": [], "task": []})
        >>> nothing = pd.DataFrame({"model": []})
        >>> findings = Findings(Measurements(models, nothing, nothing, nothing, nothing))
        >>> findings(lambda findings: len(findings.measurements.models))
        0
    """

    def __init__(self, measurements: Measurements) -> None:
        self.measurements = measurements
        self._answers: dict[Callable[[Findings], Any], Any] = {}

    def __call__(self, question: "Callable[[Findings], Answer]") -> Answer:
        """The answer to a question, worked out at the first time of asking.

        Args:
            question: a function of findings. What it returns is shared: nobody may change it.
        """
        if question not in self._answers:
            self._answers[question] = question(self)
        return cast("Answer", self._answers[question])
