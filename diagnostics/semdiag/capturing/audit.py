"""What was captured of a model's attention, and what was seen but not captured, with the reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Captured(NamedTuple):
    """A module whose attention was captured, and how.

    Attributes:
        module: dotted name in the model.
        mechanism: which adapter saw it.
    """

    module: str
    mechanism: str


class Skipped(NamedTuple):
    """An operation that looks like attention and was not captured.

    Attributes:
        module: dotted name of the innermost module it ran in.
        operation: its name in PyTorch.
        reason: why it was not captured.
    """

    module: str
    operation: str
    reason: str


NOTE, WARNING = "note", "warning"  # severities of remarks
# Codes of remarks about what the user asked for, or that spoil an answer: not in the report alone.
WARNINGS = frozenset(
    (
        "input-length", "k-left-out", "labels-unread", "logits-as-outputs", "nan-logits", "no-overlap",
        "no-secants", "no-secants-there", "no-mask-stability-there", "outputs-compared", "padding-compared",
        "queries-drawn", "random-forward", "texts-cut", "weights-differ", "weights-not-loaded",
    )
)  # fmt: skip


class Remark(NamedTuple):
    """Something about a captured attention that the reader of its statistics should know.

    Attributes:
        module: dotted name in the model.
        text: what it is.
        code: what kind of remark it is; programs go by it, never by the text.
    """

    module: str
    text: str
    code: str = "attention"

    @property
    def severity(self) -> str:
        """Return ``warning`` if it spoils an answer, or is about what the user asked for; else ``note``."""
        return WARNING if self.code in WARNINGS else NOTE

    def to_dict(self) -> dict[str, str]:
        """Return the remark as plain values."""
        return {**self._asdict(), "severity": self.severity}


@dataclass(frozen=True)
class Audit:
    """Filled while the model runs.

    Attributes:
        modules: names of the modules with attention that is or will be captured; a captured call's ``layer`` is
            its module's position here.
        captured: number of calls of each.
        skipped: number of times each was seen.
        remarks: number of times each was noted.
        others: number of softmaxes in each module whose result was multiplied with no values: no attention.
    """

    modules: list[str] = field(default_factory=list)
    captured: Counter[Captured] = field(default_factory=Counter)
    skipped: Counter[Skipped] = field(default_factory=Counter)
    remarks: Counter[Remark] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    def layer(self, module: str) -> int:
        """Return the position of a module among the attention modules; a new one comes last."""
        if module not in self.modules:
            self.modules.append(module)
        return self.modules.index(module)


def failure(error: Exception) -> str:
    """Say in one line that semdiag failed, and with what.

    Args:
        error: what it raised.
    """
    said = " ".join(str(error).split())[:120]
    return f"semdiag failed on it ({type(error).__name__}{said and ': '}{said}): please report it"
