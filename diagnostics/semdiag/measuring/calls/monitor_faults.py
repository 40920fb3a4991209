"""Faults of a monitor: each is reported once, and none stops the training."""

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from semdiag.capturing.audit import Audit, Remark, Skipped, failure

_CANNOT_WRITE = "The monitor cannot write"
_NAMED = 3  # modules in a warning


class Faults:
    """Warn of each fault once; of a file that cannot be written, again after it could be."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._said: set[Remark | Skipped] = set()
        self._stuck = False  # whether the running look could not write

    def begin(self) -> None:
        """Begin a look."""
        self._stuck = False

    def end(self) -> None:
        """End a look; where it could write, a later failure to write is a new fault."""
        if not self._stuck:
            self._told = {fault for fault in self._told if not fault.startswith(_CANNOT_WRITE)}

    @contextmanager
    def told(self) -> Iterator[None]:
        """Warn of what goes wrong inside, and go on."""
        try:
            yield
        except OSError as error:
            said = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            self._stuck = True
            self._tell(
                f"{_CANNOT_WRITE}: {type(error).__name__} {error.errno}",
                f"{_CANNOT_WRITE} ({said}). Its rows stay in memory and are written as soon as possible.",
            )
        except Exception as error:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            fault = f"{type(error).__name__} {frame.f_code.co_filename}:{line}"
            self._tell(fault, f"The monitor of a training: {failure(error)}.")

    def name_remarks(self, audit: Audit) -> None:
        """Say each remark about a call once."""
        for remark in audit.remarks.keys() - self._said:
            self._said.add(remark)
            warnings.warn(f"The monitor of {remark.module or 'a model'}: {remark.text}.", stacklevel=2)

    def name_missed(self, audit: Audit) -> None:
        """Say once of which attention there are no rows, and why."""
        missed: dict[str, list[str]] = {}
        for seen in audit.skipped.keys() - self._said:
            self._said.add(seen)
            missed.setdefault(f"{seen.operation}, {seen.reason}", []).append(seen.module or "the model itself")
        if missed:
            text = "; ".join(f"{_some(sorted(modules))} ({why})" for why, modules in sorted(missed.items()))
            warnings.warn(f"The monitor does not see all attention: it has no rows of {text}.", stacklevel=2)

    def _tell(self, fault: str, text: str) -> None:
        """Warn once of a fault, whose text may be another at every step."""
        if fault not in self._told:
            self._told.add(fault)
            warnings.warn(text, stacklevel=5)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
