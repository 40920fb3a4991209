"""Parse values of options: text to numbers, names and paths."""

from collections.abc import Sequence
from typing import Any


def listed_numbers(text: str, what: str, example: str) -> tuple[int, ...]:
    """Read ``"5,3,3"``: whole numbers in their order."""
    from semdiag_models import InputError

    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"{what} separated by commas, like {example}. Got {text!r}.") from None


def length_range(text: str | None) -> tuple[int | None, int | None]:
    """Read ``"40"`` or ``"5:20"``: the shortest length, if given, and the longest."""
    from semdiag_models import InputError

    if text is None:
        return None, None
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise InputError(f"--length takes a number of tokens or a range of them, like 40 or 5:20. Got {text!r}.")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read ``"4,8,16"``: different whole numbers in ascending order."""
    return tuple(sorted(set(listed_numbers(text, f"{option} takes whole numbers", "4,8,16"))))


def positive_numbers(text: str, option: str) -> tuple[float, ...]:
    """Read ``"0.001,0.01"``."""
    from semdiag_models import InputError

    try:
        numbers = tuple(sorted({float(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise InputError(f"{option} takes positive numbers separated by commas, like 0.01,0.1. Got {text!r}.")
    return numbers


def targets(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``["0.95", "listops=0.35"]``: a value for all tasks, and values for single tasks."""
    from semdiag_models import InputError

    values: dict[str, Any] = {"targets": {}}
    for text in texts:
        task, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            usage = "--target takes an accuracy like 0.95, or TASK=0.35 for one task"
            raise InputError(f"{usage}. Got {text!r}.") from None
        if task:
            values["targets"][task] = value
        else:
            values["target"] = value
    return values


def names(text: str) -> tuple[str, ...]:
    """Read ``"bf16,fp16"``."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
