"""Turn attention calls into tables; what all questions ask of the tables."""

from collections.abc import Callable, Iterable
from typing import Any

PROBE_SOURCES: list[Callable[[], Iterable[Any]]] = []  # return the probes of questions, when first needed
