"""The exception for wrong user input; its message says what would work."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Raised if a user's request cannot be done; the message says what, why, and what would work.

    The command line prints the message as one line and exits with code 2.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not in a registry."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InputError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")
