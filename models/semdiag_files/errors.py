"""The error of a wrong request: one line that says what, why, and what would work."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Raised if a request cannot be done: what, why, what would work. Commands show it and exit with code 2."""


def unknown_name(kind: str, name: str, registered: Iterable[str]) -> InputError:
    """Return the error for a name that is not in a registry."""
    names = list(registered)
    nearest = get_close_matches(name, names, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return InputError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")
