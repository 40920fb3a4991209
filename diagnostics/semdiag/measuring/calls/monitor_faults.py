"""Report each fault of a monitor once, and never stop training."""

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from semdiag.capturing.audit import Audit, Remark, Skipped, failure
from semdiag_models.plain_text import visible

_CANNOT_WRITE = "The monitor cannot write"
_NAMED = 3  # modules named in a warning


def warn(text: str, stacklevel: int = 3) -> None:
    """Warn, and only print where warnings are errors: a monitor never stops training."""
    try:
        warnings.warn(text, stacklevel=stacklevel)
    except UserWarning:
        print(f"semdiag: {visible(text)}", file=sys.stderr)


class Faults:
    """Warns of each fault once; of a file that cannot be written, again after a success."""

    def __init__(self) -> None:
        self._faults: set[str] = set()
        self._noted: set[Remark | Skipped] = set()
        self._stuck = False  # whether the current look could not write

    def begin(self) -> None:
        """Start a look."""
        self._stuck = False

    def end(self) -> None:
        """End a look; if it could write, a later failure to write is a new fault."""
        if not self._stuck:
            self._faults = {fault for fault in self._faults if not fault.startswith(_CANNOT_WRITE)}

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Warn of an exception inside, and go on."""
        try:
            yield
        except OSError as error:
            reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            self._stuck = True
            self.warn_once(
                f"{_CANNOT_WRITE}: {type(error).__name__} {error.errno}",
                f"{_CANNOT_WRITE} ({reason}). Its rows stay in memory and are written as soon as possible.",
            )
        except Exception as error:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            fault = f"{type(error).__name__} {frame.f_code.co_filename}:{line}"
            self.warn_once(fault, f"The monitor of a training: {failure(error)}.")

    def name_remarks(self, audit: Audit) -> None:
        """Warn of each remark on a call once."""
        for remark in audit.remarks.keys() - self._noted:
            self._noted.add(remark)
            warn(f"The monitor of {remark.module or 'a model'}: {remark.text}.")

    def name_private(self, audit: Audit) -> None:
        """Warn once of each private part of torch that changed."""
        self.name_remarks(Audit(remarks=Counter(r for r in audit.remarks if r.code == "private-part")))

    def name_missed(self, audit: Audit) -> None:
        """Warn once of attention that has no rows, and why."""
        missed: dict[str, list[str]] = {}
        for seen in audit.skipped.keys() - self._noted:
            self._noted.add(seen)
            missed.setdefault(f"{seen.operation}, {seen.reason}", []).append(seen.module or "the model itself")
        if missed:
            text = "; ".join(f"{_some(sorted(modules))} ({why})" for why, modules in sorted(missed.items()))
            warn(f"The monitor cannot see all attention: it has no rows for {text}.")

    def warn_once(self, fault: str, text: str) -> None:
        """Warn once of a fault, even if its text changes at every step."""
        if fault not in self._faults:
            self._faults.add(fault)
            warn(text, stacklevel=6)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
