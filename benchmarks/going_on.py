"""What a benchmark on a lent machine does with a failure: keep it, run the rest, and exit with 1."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

FAILED: dict[str, str] = {}  # tracebacks by what failed


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Print and keep a failure of the block, and go on behind it."""
    try:
        yield
    except Exception:
        FAILED[what] = traceback.format_exc()
        print(FAILED[what], file=sys.stderr, flush=True)


def leave() -> None:
    """End the program: with exit code 1 and the names of what failed, if anything did."""
    if FAILED:
        sys.exit(f"failed: {'; '.join(FAILED)}")
