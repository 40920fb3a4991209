"""Runs of a sweep's file: every combination checked, named, and identified by the hash of its configuration."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from semdiag_models.attention import ATTENTIONS, DRAWN
from semdiag_models.config import ListOpsTrees, ModelConfig, TrainingConfig
from semdiag_models.reading import InputError, read_toml, unknown_name
from semdiag_models.run_folder import run_name
from semdiag_models.tasks import Classification, ListOps, Text, find_task, open_text, task_of

MOST_RUNS = 100_000  # largest number of runs of one file
_MOST_PROBLEMS = 1000  # largest number of problems that are collected
_RECORDS: tuple[Any, ...] = (ModelConfig, TrainingConfig, ListOpsTrees)
_TEXT_KEYS = {"text": str, "holdout_text": str, "tokenizer": str, "vocabulary": int}
_DECISIVE = ("task", "attention")  # keys without which the other keys cannot be checked
_TOGETHER = (  # keys that are valid only with others
    *_DECISIVE, "length", "least_length", "k", "global_tokens", "selection_seed", "snapshots", "hash_rounds",
    "hash_bits", "hashes", "clusters", "centroid_decay", "score_gradient",
)  # fmt: skip
_LISTS = ("snapshots", "frozen")  # keys whose values are lists that do not multiply the runs
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
    """A value with its position: ``grid.attention[2].k (line 9)``."""

    value: Any
    place: str


Settings = dict[str, Setting]


@dataclass(frozen=True)
class SweepFile:
    """A sweep file that could be read."""

    path: Path  # path as the user gave it
    grids: list[list[Settings]]  # settings of the runs of each grid
    problems: list[str]  # problems with their positions


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
    """Traverses the tables and collects problems instead of stopping at the first one."""

    def __init__(self, text: str) -> None:
        self._lines = _lines_of_keys(text)
        self._noted: dict[str, None] = {}

    @property
    def problems(self) -> list[str]:
        """All problems without repetitions."""
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
        """Yield the entries of one key of a grid, each as the settings that it makes."""
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


ADAM_RATE = 0.001  # learning rate of Adam; the recipes' rates are for plain SGD
_FROM_THE_TASK = ("vocabulary_size", "classes", "task", "text", "listops")


def configure(
    task: Classification, chosen: Mapping[str, Any], listops: ListOpsTrees | None = None
) -> tuple[ModelConfig, TrainingConfig]:
    """Complete a user's choices with the recipe of the task."""
    values = {**vars(task.recipe), **{name: value for name, value in chosen.items() if value is not None}}
    if values.get("optimizer", "sgd") != "sgd" and chosen.get("learning_rate") is None:
        values["learning_rate"] = ADAM_RATE
    if values.get("attention") in DRAWN:  # every seed keeps different keys
        values.setdefault("selection_seed", values.get("seed", TrainingConfig.seed))
    positions = padded_length(values["length"], values.get("k"), values.get("pad_as_token", False))
    model = {**values, "length": positions}
    return (
        ModelConfig(task.vocabulary_size, task.classes, **_of(ModelConfig, model)),
        TrainingConfig(
            task.name,
            text=task.source if isinstance(task, Text) else None,
            listops=listops,
            **_of(TrainingConfig, values),
        ),
    )


def padded_length(length: int, k: int | None, pad_as_token: bool) -> int:
    """Return a model's number of positions for samples of a length: with ``pad_as_token`` a multiple of k."""
    return -(-length // k) * k if pad_as_token and k is not None and k > 0 else length


def _of(record: type[ModelConfig | TrainingConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(record)} - set(_FROM_THE_TASK)
    return {name: value for name, value in values.items() if name in names}


CONTINUABLE = ("epochs", "until", "snapshots")  # fields that may differ when a run continues
_TREES = tuple(field.name for field in fields(ListOpsTrees))
_TEXT = ("text", "holdout_text", "tokenizer", "vocabulary")
_IN_THE_NAME = (
    "task", "length", "attention", "k", "global_tokens", "seed", "selection_seed", "text", "listops",
    "hash_rounds", "hash_bits", "hashes", "clusters", "centroid_decay",
    "score_gradient",
)  # fmt: skip
_LONGEST_NAME = 90  # without the hash; longer names are cut


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str  # name of its folder; no two configurations share one
    model: ModelConfig  # architecture
    training: TrainingConfig  # data and optimisation


class SweepError(InputError):
    """Raised for a sweep file with problems; ``problems`` has a line for each, ``summary`` their number."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        self.summary = f"{path} has {count}; nothing was run."
        super().__init__(f"{self.summary} {' '.join(problems)}")


def read_sweep(path: Path) -> list[SweepRun]:
    """Read a sweep's file, and check every run in it before any starts."""
    file = read_sweep_file(path)
    expansion = _Expansion(file)
    runs: dict[str, SweepRun] = {}
    for grid in file.grids:
        for settings in grid:
            run = expansion.run(settings)
            if run is None:
                continue
            before = runs.setdefault(run.name, run)
            if before != run:
                where = places(settings, CONTINUABLE)
                expansion.note(
                    f"{where}: one run cannot have two of these; the longer training contains the shorter."
                )
    problems = [*file.problems, *expansion.problems()]
    if not runs and not problems:
        problems = ['there is no run: name a task, like task = "even-pairs".']
    if problems:
        raise SweepError(path, problems)
    return list(runs.values())


def identity(model: ModelConfig, training: TrainingConfig) -> str:
    """Return a hash of a run's configuration, 8 hexadecimal digits."""
    ran = replace(training, epochs=1, until=None, snapshots=())
    values = {"model": _not_default(model), "training": _not_default(ran)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _not_default(record: ModelConfig | TrainingConfig) -> dict[str, Any]:
    values = record.to_dict()
    for field in fields(record):
        # For compatibility: the empty list of snapshots has always been part of the hash.
        compared = values[field.name] if field.name == "snapshots" else getattr(record, field.name)
        if field.default is not MISSING and compared == field.default:
            del values[field.name]
        elif "float" in str(field.type) and values[field.name] is not None:
            values[field.name] = float(values[field.name])  # 1 and 1.0 are one learning rate
    return values


def name_run(model: ModelConfig, training: TrainingConfig) -> str:
    """Return a folder's name: task, attention, seed, differences from the recipe, and the hash."""
    usual = configure(
        task_of(training),
        {"attention": model.attention, "k": model.k, "optimizer": training.optimizer},
        training.listops,
    )
    words = []
    for record, ordinary in zip((model, training), usual, strict=True):
        for name, value in vars(record).items():
            plain = TrainingConfig.optimizer if name == "optimizer" else getattr(ordinary, name)
            if name not in (*_IN_THE_NAME, *CONTINUABLE) and value != plain:
                words.append(_word(name, value))
    if training.length != usual[1].length and training.listops is None:
        words.append(f"length-{training.length}")
    readable = run_name(model, training)
    for word in words:
        if len(readable) + len(word) > _LONGEST_NAME:
            break
        readable += f"-{word}"
    return f"{readable}-{identity(model, training)}"


def _word(name: str, value: object) -> str:
    said = "-".join(value) if isinstance(value, tuple) else value
    text = value if isinstance(value, str) else name if value is True else f"{name}-{said}"
    return re.sub(r"[^\w.-]+", "-", str(text)).replace("_", "-")


class _Expansion:
    """Turns settings into runs; a problem shared by many combinations is noted once, with all positions."""

    def __init__(self, file: SweepFile) -> None:
        self._folder = file.path.parent
        self._noted: dict[str, None] = {}
        self._texts: dict[tuple[object, ...], Text] = {}
        self._drawn: dict[tuple[str, ListOpsTrees | None, int], str | None] = {}

    def problems(self) -> list[str]:
        """Return all problems without repetitions."""
        return list(self._noted)

    def note(self, problem: str) -> None:
        """Note a problem."""
        self._noted[problem] = None

    def run(self, settings: Settings) -> SweepRun | None:
        """Build a run, or note why it cannot be built."""
        run = self._try(settings)
        if run is None:  # a second problem may hide behind the first
            for without in (("global_tokens",), ("attention", "k", "global_tokens")):
                self._try({name: setting for name, setting in settings.items() if name not in without})
            if "k" in settings and "attention" in settings and settings["attention"].value != "full":
                self._try({**settings, "k": replace(settings["k"], value=1)})
        return run

    def _try(self, settings: Settings) -> SweepRun | None:
        try:
            run = self._build({name: setting.value for name, setting in settings.items()})
            self._require_samples(run)
        except InputError as error:
            said = re.sub(r"\b[a-z]+ attention", "attention", str(error).replace("_", " ").lower())
            named = [n for n in settings if re.search(rf"\b{n.replace('_', ' ')}\b", said)]
            where = places(settings, named) or "the grid"
            self.note(f"{where}: {error}")
            return None
        return run

    def _build(self, values: dict[str, Any]) -> SweepRun:
        if "task" not in values:
            raise InputError('A run has no task. Add one at the top or in [grid], like task = "even-pairs".')
        trees = {name: values.pop(name) for name in _TREES if name in values}
        text = {name: values.pop(name) for name in _TEXT if name in values}
        name = values.pop("task")
        task: Classification
        if name == Text.name:
            task = self._text(text, values.get("length"))
        elif text:
            raise InputError(f"{next(iter(text))} belongs to the task text. Got task {name!r}.")
        else:
            task = find_task(name)
        listops = ListOpsTrees(**trees) if trees else None
        if listops is not None:
            if task.name != ListOps.name:
                raise InputError(f"{next(iter(trees))} belongs to the task listops. Got task {name!r}.")
            task = ListOps(**listops.to_dict())
            values.setdefault("length", listops.longest)
        epochs = values.get("epochs", task.recipe.epochs)
        values["snapshots"] = [epoch for epoch in values.get("snapshots", ()) if epoch <= epochs]
        model, training = configure(task, values, listops)
        return SweepRun(name_run(model, training), model, training)

    def _text(self, named: dict[str, Any], window: int | None) -> Text:
        if "text" not in named:
            raise InputError('The task text needs a file: text = "FILE", beside the sweep\'s own file.')
        key = (*(named.get(name) for name in _TEXT), window)
        if key not in self._texts:
            holdout = named.get("holdout_text")
            source = open_text(
                self._folder / named["text"],
                None if holdout is None else self._folder / holdout,
                named.get("tokenizer", "unigram"),
                named.get("vocabulary", 4096),
            )
            self._texts[key] = Text(source, window)
        return self._texts[key]

    def _require_samples(self, run: SweepRun) -> None:
        """Refuse lengths for which the task has no string, by trying to draw one."""
        training = run.training
        if training.text is not None:
            return
        key = (training.task, training.listops, training.least_length or training.length)
        if key not in self._drawn:
            self._drawn[key] = None
            try:
                task_of(training).draw(1, 1, key[2], torch.Generator().manual_seed(0))
            except InputError as error:
                self._drawn[key] = str(error)
        if (refused := self._drawn[key]) is not None:
            raise InputError(refused)
