"""Frozen records of plain values, as files hold them: built with every name, type and interval checked."""

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, field, fields
from typing import Any, ClassVar, Self

from semdiag_files.errors import InputError, unknown_name

_LARGEST_FLOAT32 = 2.0**128 * (1 - 2.0**-24)  # weights, gradients and scores are float32


def option(
    panel: str, default: Any, words: str, within: str = "", choices: Iterable[str] = (), **more: Any
) -> Any:
    """Return a field of a record that is an option of a command, with its meaning and legal values."""
    metadata = {"help": words, "panel": panel, "within": within, "choices": choices, **more}
    return field(default=default, metadata=metadata)


def limited(within: str, **default: Any) -> Any:
    """Return a field that is no option, with the interval of its values."""
    return field(metadata={"within": within}, **default)


class Record:
    """A frozen dataclass of plain values and other records."""

    nested: ClassVar[Mapping[str, "type[Record]"]] = {}  # fields that are records

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from plain values."""
        declared = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # subclasses are dataclasses
        checked = dict(values)
        for key, value in values.items():
            if key not in declared:
                raise unknown_name(f"{cls.__name__} field", str(key), declared)
            if key in cls.nested and isinstance(value, Mapping):
                checked[key] = cls.nested[key].from_dict(value)
            check_type(declared[key], checked[key])
        try:
            return cls(**checked)
        except TypeError as error:
            raise InputError(f"{cls.__name__} is incomplete: {error}.") from None

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # as above
            value = getattr(self, f.name)
            if choices := f.metadata.get("choices"):
                for name in value if isinstance(value, tuple) else (value,):
                    if name not in choices:
                        raise unknown_name(f.name, name, choices)
            within = f.metadata.get("within")
            if within and value is not None and not _inside(value, within):
                raise InputError(f"{f.name} must lie in {within}. Got {f.name}={reprlib.repr(value)}.")
            if isinstance(value, float) and _LARGEST_FLOAT32 < abs(value) < math.inf:
                raise InputError(f"{f.name} must fit float32, up to {_LARGEST_FLOAT32:.2g}. Got {f.name}={value}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, tuples as lists."""
        values = asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def _inside(value: float, interval: str) -> bool:
    """Return whether a value lies in an interval like ``[0, 1)``."""
    low, high = map(float, interval[1:-1].split(","))
    if value == low:
        return interval[0] == "["
    if value == high:
        return interval[-1] == "]"
    return low < value < high


def check_type(f: Field[Any], value: object) -> None:
    """Refuse a plain value that does not fit a field."""
    declared = f.type.__name__ if isinstance(f.type, type) else str(f.type)
    declared = re.sub(r"\w+\.\w+\.", "", declared)  # the name of a record without its module
    plain = {"int": int, "float": (int, float), "str": str, "None": type(None)}
    if "tuple" in declared:
        item_type = str if "str" in declared else int
        fits = isinstance(value, list | tuple) and all(type(item) is item_type for item in value)
    elif isinstance(value, bool | Record):
        fits = type(value).__name__ in declared
    else:
        fits = any(name in declared and isinstance(value, kind) for name, kind in plain.items())  # type: ignore[arg-type]
    if not fits:
        raise InputError(f"{f.name} must be {declared}. Got {' '.join(reprlib.repr(value).split())}.")
