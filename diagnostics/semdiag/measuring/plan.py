"""The contract of a plan: what a question measures of a model, beyond the tables of every forward pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject, Watcher
    from semdiag.measuring.table import Table


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``semdiag report`` that concern plans."""

    noise: tuple[float, ...]  # levels of noise
    seed: int  # random seed for all draws
    k: int | None = None  # smallest k that was requested; None means none
    thorough: bool = False  # whether minutes per model may be spent
    rerun: bool = True  # whether models are run with masks
    rerun_seconds: float | None = None  # for running a model with masks; None: it is run on all inputs
    lengths: tuple[int, ...] = ()  # lengths of the pieces on which an external model is run with masks, too


class LargestPass(NamedTuple):
    """The forward pass of an external model that takes most memory."""

    samples: int  # copies included
    double: bool = False  # whether in float64


class Plan:
    """A measurement that measures itself: a frozen dataclass whose fields are the options of its command.

    Plans stand where ``--help`` reads them, so their methods import what is slow to import.
    """

    name: ClassVar[str]  # in messages and remarks
    takes_drawn_queries: ClassVar[bool] = False  # whether it works on drawn queries; others need every query

    @classmethod
    def checked(cls, plan: Self | None) -> Self:
        """Return a plan of this type, or the default one for None; refuse any other."""
        from semdiag_files import InputError

        if plan is not None and not isinstance(plan, cls):
            raise InputError(f"The plan must be a {cls.__name__}. Got {plan!r}.")
        return cls() if plan is None else plan

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the declarations of the tables that it makes, the most important one first."""
        raise NotImplementedError

    def can_go_on(self, external: bool) -> bool:
        """Return whether what an interrupted command finished of a model is kept."""
        return False

    def before_statistics(self, subject: "Subject") -> None:
        """Measure what need not wait for the clean pass, for :meth:`measure` to return."""

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model, and return tables by name; NotAvailableError says why it is impossible."""
        raise NotImplementedError

    def watch(self, subject: "Subject") -> "Watcher | None":
        """Return an observer of the clean pass, if this plan would otherwise repeat it."""
        return None

    def largest_pass(self, samples: int, length: int) -> LargestPass | None:
        """Return its largest pass over batches of so many samples; None: it runs them as the clean pass does."""
        return None

    def steps(self) -> int:
        """Return the number of steps for one encoder, for the progress bar."""
        return 0

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record, given the largest number of samples of a model, and of costly measurements."""
        return {}

    @classmethod
    def for_report(cls, options: ReportOptions) -> Self | None:
        """Return the plan that ``semdiag report`` measures; None: it is not part of a report."""
        return None
