"""What a watch captured of a model's attention, and what it saw and did not capture, with the reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Captured(NamedTuple):
    """A module whose attention was captured, and how."""

    module: str  # dotted name in the model
    mechanism: str  # adapter that saw it


class Skipped(NamedTuple):
    """An operation that looks like attention and was not captured."""

    module: str  # dotted name of the innermost module that was running
    operation: str  # its name in PyTorch
    reason: str  # reason for not capturing it


NOTE, WARNING = "note", "warning"  # severities of remarks
# Codes of remarks that concern the user's request or invalidate an answer; commands print them, too.
WARNINGS = frozenset(
    (
        "input-length", "k-left-out", "labels-unread", "logits-as-outputs", "loss-of-logits", "nan-logits",
        "no-overlap", "no-secants", "no-secants-there", "no-mask-stability-there", "outputs-compared",
        "padding-compared", "private-part", "queries-drawn", "random-forward", "texts-cut", "weights-differ",
        "weights-not-loaded",
    )
)  # fmt: skip


class Remark(NamedTuple):
    """A note on captured attention that readers of its statistics should know."""

    module: str  # dotted name in the model
    text: str  # note in words
    code: str = "attention"  # kind of remark, by which programs recognise it

    @property
    def severity(self) -> str:
        """``warning`` if it invalidates an answer or concerns the user's request; else ``note``."""
        return WARNING if self.code in WARNINGS else NOTE

    def to_dict(self) -> dict[str, str]:
        """Return the remark as plain values."""
        return {**self._asdict(), "severity": self.severity}


@dataclass(frozen=True)
class Audit:
    """Everything that a watch saw; it fills while the model runs."""

    # names of the modules with attention, captured or to be captured
    modules: list[str] = field(default_factory=list)
    captured: Counter[Captured] = field(default_factory=Counter)  # number of calls by module and mechanism
    skipped: Counter[Skipped] = field(default_factory=Counter)  # number of occurrences of each skipped operation
    remarks: Counter[Remark] = field(default_factory=Counter)  # number of occurrences of each remark
    # number of softmaxes in each module that never met values: no attention
    others: Counter[str] = field(default_factory=Counter)

    def layer(self, module: str) -> int:
        """Return the position of a module among the attention modules; append a new one."""
        if module not in self.modules:
            self.modules.append(module)
        return self.modules.index(module)


def failure(error: Exception) -> str:
    """Return one line about a failure of semdiag."""
    message = " ".join(str(error).split())[:120]
    return f"semdiag failed on it ({type(error).__name__}{message and ': '}{message}): please report it"
