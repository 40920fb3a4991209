"""Read the file of a sweep: its settings, their positions, and all problems."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from semdiag_models.attention.kinds import ATTENTIONS
from semdiag_models.errors import InputError, unknown_name
from semdiag_models.model_config import ModelConfig
from semdiag_models.reading import read_toml
from semdiag_models.tasks import Text, find_task
from semdiag_models.training_config import ListOpsTrees, TrainingConfig

MOST_RUNS = 100_000  # of one file
_MOST_PROBLEMS = 1000  # that are collected
_RECORDS: tuple[Any, ...] = (ModelConfig, TrainingConfig, ListOpsTrees)
_TEXT_KEYS = {"text": str, "holdout_text": str, "tokenizer": str, "vocabulary": int}
_DECISIVE = ("task", "attention")  # without them the other keys cannot be checked
_TOGETHER = (  # valid only with others
    *_DECISIVE, "length", "least_length", "k", "global_tokens", "selection_seed", "snapshots", "hash_rounds",
    "hash_bits", "hashes", "clusters", "centroid_decay", "score_gradient",
)  # fmt: skip
_LISTS = ("snapshots", "frozen")  # their values are lists that do not multiply the runs
_OWN = (
    "vocabulary_size",
    "classes",
    "listops",
    "text",
    "cls_as_key",
)  # record fields that users cannot set
KEYS = tuple(
    dict.fromkeys(
        [
            "task",
            *(field.name for record in _RECORDS for field in fields(record) if field.name not in _OWN),
            *_TEXT_KEYS,
        ]
    )
)


@dataclass(frozen=True)
class Setting:
    """One value, and its position: ``grid.attention[2].k (line 9)``."""

    value: Any
    place: str


Settings = dict[str, Setting]


@dataclass(frozen=True)
class SweepFile:
    """A sweep file that could be read."""

    path: Path  # as the user named it
    grids: list[list[Settings]]  # for each grid, the settings of its runs
    problems: list[str]  # each with its position


def read_sweep_file(path: Path) -> SweepFile:
    """Read a TOML file: settings of all runs, then ``[grid]``, or several ``[[grid]]``."""
    if not path.exists():
        raise InputError(f"{path} does not exist. Name a TOML file, like experiments/study.toml.")
    content, text = read_toml(path)
    reader = _Reader(text)
    grid = content.pop("grid", {})
    common = reader.common(content)
    tables = grid if isinstance(grid, list) else [grid]
    count = sum(_count(table) for table in tables if isinstance(table, dict))
    if count > MOST_RUNS:
        raise InputError(f"{path} asks for more than {MOST_RUNS:,} runs. Use shorter lists in [grid].")
    grids = []
    for number, table in enumerate(tables):
        name = f"grid[{number}]" if isinstance(grid, list) else "grid"
        if not isinstance(table, dict):
            reader.note(f"grid: must be a table, [grid] or [[grid]]. Got {table!r}.")
            continue
        combinations = list(reader.combinations(table, name))
        if all(key in common for key in _DECISIVE if key in content):
            grids.append([{**common, **settings} for settings in combinations])
    return SweepFile(path, grids, reader.problems)


class _Reader:
    """Walks the tables and collects problems instead of stopping at the first."""

    def __init__(self, text: str) -> None:
        self._lines = _lines_of_keys(text)
        self._noted: dict[str, None] = {}

    @property
    def problems(self) -> list[str]:
        """All problems, each once."""
        return list(self._noted)

    def common(self, table: dict[str, Any]) -> Settings:
        """Return the settings of all runs."""
        settings: Settings = {}
        for key, value in table.items():
            place = self._place(key, "", key)
            if isinstance(value, list) and key not in _LISTS:
                self.note(f"{place}: a list multiplies the runs, and stands in [grid].")
            elif self._legal(key, value, place):
                settings[key] = Setting(value, place)
        return settings

    def combinations(self, table: dict[str, Any], name: str) -> Iterator[Settings]:
        """Yield every combination of a grid's entries."""
        axes = [list(self._axis(key, value, name)) for key, value in table.items()]
        for parts in product(*axes):
            settings: Settings = {}
            for part in parts:
                for key, setting in part.items():
                    if key in settings:
                        self.note(f"{setting.place}: {key} is also set at {settings[key].place}.")
                    settings[key] = setting
            yield settings

    def _axis(self, key: str, value: Any, name: str) -> Iterator[Settings]:
        """Yield the entries of one key of a grid, each the settings it makes."""
        entries = _entries(key, value)
        if not entries:
            self.note(f"{self._place(key, name, f'{name}.{key}')}: the list is empty.")
        for number, entry in enumerate(entries):
            path = f"{name}.{key}[{number}]" if isinstance(value, list) else f"{name}.{key}"
            place = self._place(key, name, path)
            if not isinstance(entry, dict):
                if self._legal(key, entry, place):
                    yield {key: Setting(entry, place)}
                elif key not in _DECISIVE:  # other keys can be checked without it
                    yield {}
                continue
            columns = []
            for inner, inside in entry.items():
                where = self._place(key, name, f"{path}.{inner}")
                legal = [v for v in _entries(inner, inside) if self._legal(inner, v, where)]
                columns.append([(inner, Setting(v, where)) for v in legal])
            yield from (dict(choice) for choice in product(*columns))

    def _legal(self, key: str, value: Any, place: str) -> bool:
        """Return whether the key is known and the value has its type; note a problem otherwise."""
        try:
            if key not in KEYS:
                raise unknown_name("key", key, KEYS)
            _check_alone(key, value)
        except InputError as error:
            self.note(f"{place}: {error}")
            return False
        return True

    def note(self, problem: str) -> None:
        """Note a problem."""
        self._noted[problem] = None
        if len(self._noted) > _MOST_PROBLEMS:
            raise InputError(f"The file has more than {_MOST_PROBLEMS} problems. The first: {self.problems[0]}")

    def _place(self, key: str, table: str, path: str) -> str:
        """Return the path with the line of its key, as far as a text search finds it."""
        number = self._lines.get((table, key))
        return path if number is None else f"{path} (line {number})"


def _lines_of_keys(text: str) -> dict[tuple[str, str], int]:
    """Return the first line of every key at the top and in the grids, by table and key."""
    found: dict[tuple[str, str], int] = {}
    seen, within = -1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[\[?)\s*grid\s*\]", line):
            seen += 1
            within = f"grid[{seen}]" if header[1] == "[[" else "grid"
        elif "=" in line:
            found.setdefault((within, line.partition("=")[0].strip().strip("\"'")), number)
    return found


def _count(table: dict[str, Any]) -> int:
    """Return the number of combinations of a table's lists."""
    count = 1
    for key, value in table.items():
        count *= sum(_count(entry) if isinstance(entry, dict) else 1 for entry in _entries(key, value))
    return count


def _entries(key: str, value: Any) -> list[Any]:
    """Return the values of a key; for ``snapshots`` and ``frozen``, a list of plain values is one value."""
    if key in _LISTS and not (isinstance(value, list) and any(isinstance(v, list) for v in value)):
        return [value]
    return value if isinstance(value, list) else [value]


def _check_alone(key: str, value: Any) -> None:
    """Refuse a value that is wrong regardless of other keys."""
    if key in _TEXT_KEYS:
        if type(value) is not _TEXT_KEYS[key]:
            raise InputError(f"{key} must be {_TEXT_KEYS[key].__name__}. Got {value!r}.")
        return
    for record in _RECORDS:
        if key in {field.name for field in fields(record)}:
            try:
                record.check_type(key, value)
            except InputError as error:
                raise InputError(str(error).partition(".")[2]) from None
            break
    if key == "task" and value != Text.name:
        find_task(value)
    if key == "attention" and value not in ATTENTIONS:
        raise unknown_name(key, value, ATTENTIONS)
    if key not in _TOGETHER and record is ModelConfig:
        ModelConfig(3, 2, 40, **{key: value})
    if key not in _TOGETHER and record is TrainingConfig:
        TrainingConfig(**{"task": "parity", "length": 40, "epochs": 1, key: value})


def places(settings: Settings, names: Iterable[str]) -> str:
    """Return the positions of these settings in one phrase; unset ones have none."""
    return ", ".join(dict.fromkeys(settings[name].place for name in names if name in settings))
