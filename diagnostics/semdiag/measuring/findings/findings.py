"""Findings: answers derived from measurements, each computed once, when first needed."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from semdiag.measuring.measurements import Measurements

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


class Findings:
    """Measurements, and the answers they give to questions.

    An answer is a function of findings, like ``mask_table`` of the question mask stability, and may use others.
    Terminal, page, figures, CSV and JSON share one object, so that they agree, and slow answers are computed once.

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
        self,
        question: "Callable[Concatenate[Findings, Parameters], Answer]",
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        """Return the answer to a question; it is computed once.

        Args:
            question: a function of findings. Its result is shared and must not be changed.
            *args: further arguments of the question, hashable.
            **kwargs: further keyword arguments of the question, hashable.
        """
        key = question, args, *sorted(kwargs.items())
        if key not in self._answers:
            self._answers[key] = question(self, *args, **kwargs)
        return cast("Answer", self._answers[key])
