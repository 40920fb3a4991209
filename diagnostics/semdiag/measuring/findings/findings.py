"""Findings: everything that follows from measurements, each answer made when first asked for, and once."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from semdiag.measuring.measurements import Measurements

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


class Findings:
    """Measurements, and the answers they give to questions.

    An answer is a function of findings, like ``mask_table`` of the question mask stability, and may ask others.
    Terminal, page, figures, CSV and JSON ask one and the same object, so that all say the same, and what takes
    seconds to work out is worked out once.

    Args:
        measurements: of one or several models.

    Attributes:
        measurements: as given.

    Example:
        >>> from semdiag.measuring.findings.pairing import compared_pairs
        >>> import pandas as pd
        >>> models = pd.DataFrame({"model": [], "source": [], "attention": [], "task": []})
        >>> nothing = pd.DataFrame({"model": []})
        >>> findings = Findings(Measurements(models, nothing, nothing, nothing, nothing))
        >>> findings(lambda findings: len(findings.measurements.models))
        0
    """

    def __init__(self, measurements: Measurements) -> None:
        self.measurements = measurements
        self._answers: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Findings on {self.measurements!r}"

    def __call__(
        self, question: "Callable[Concatenate[Findings, Asked], Answer]", *asked: Asked.args, **named: Asked.kwargs
    ) -> Answer:
        """Return the answer to a question; it is computed once.

        Args:
            question: a function of findings. What it returns is shared: nobody may change it.
            *asked: further arguments of the question, hashable.
            **named: further arguments of the question, by name.
        """
        key = question, asked, *sorted(named.items())
        if key not in self._answers:
            self._answers[key] = question(self, *asked, **named)
        return cast("Answer", self._answers[key])
