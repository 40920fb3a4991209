"""Check arguments where they enter."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from semdiag_models import InputError


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """Return a whole number; refuse anything else, or one that is too small."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number. Got {value!r}.")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}. Got {value}.")
    return int(value)


def whole_numbers(values: Any, name: str, least: int | None = None) -> tuple[int, ...]:
    """Return one or several whole numbers as a tuple; refuse anything else."""
    several = values if isinstance(values, Iterable) and not isinstance(values, str) else (values,)
    return tuple(whole_number(value, name, least) for value in several)
