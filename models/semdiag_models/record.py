"""Records that checkpoints store as plain values, and that are read back without trust."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Self

from semdiag_models.errors import InputError, unknown_name

LARGEST_SIZE = 100_000  # of any size in a model: a checkpoint's numbers are used before it is built


class Record:
    """A frozen dataclass of plain values and other records."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the record from plain values."""
        declared = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # subclasses are dataclasses
        for key, value in values.items():
            if key not in declared:
                raise unknown_name(f"{cls.__name__} field", str(key), declared)
            cls.check_type(key, value)
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"{cls.__name__} is incomplete: {error}.") from None

    @classmethod
    def check_type(cls, key: str, value: object) -> None:
        """Refuse a plain value that does not fit a field."""
        declared = next(f.type for f in fields(cls) if f.name == key)  # type: ignore[arg-type]  # as above
        if not _fits(value, wanted := _type_name(declared)):
            shown = " ".join(reprlib.repr(value).split())
            raise InputError(f"{cls.__name__}.{key} must be {wanted}. Got {shown}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, tuples as lists."""
        values = asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def _type_name(annotation: object) -> str:
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"semdiag_models\.\w+\.", "", name)  # a record's, without its module


def _fits(value: object, annotation: str) -> bool:
    """Return whether a plain value may stand in a field annotated like this."""
    if "tuple" in annotation:
        kind = str if "str" in annotation else int
        return isinstance(value, list | tuple) and all(type(item) is kind for item in value)
    if isinstance(value, bool):
        return "bool" in annotation
    if isinstance(value, Record):
        return type(value).__name__ in annotation
    names = {"int": int, "float": (int, float), "str": str, "None": type(None)}
    return any(name in annotation and isinstance(value, kind) for name, kind in names.items())  # type: ignore[arg-type]
