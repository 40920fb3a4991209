"""The runs of a sweep: every combination checked, named, and identified by the hash of its configuration."""

import hashlib
import json
import re
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from semdiag_models.errors import InputError
from semdiag_models.model_config import ModelConfig
from semdiag_models.recipe import configure
from semdiag_models.run_folder import run_name
from semdiag_models.sweeps.config import Settings, SweepFile, places, read_sweep_file
from semdiag_models.tasks import Classification, ListOps, Text, find_task, open_text, task_of
from semdiag_models.training_config import ListOpsTrees, TrainingConfig

CONTINUABLE = ("epochs", "until", "snapshots")  # may differ when a run continues
_TREES = tuple(field.name for field in fields(ListOpsTrees))
_TEXT = ("text", "holdout_text", "tokenizer", "vocabulary")
_IN_THE_NAME = (
    "task", "length", "attention", "k", "global_tokens", "seed", "selection_seed", "text", "listops",
    "hash_rounds", "hash_bits", "hashes", "clusters", "centroid_decay",
    "score_gradient",
)  # fmt: skip
_LONGEST_NAME = 90  # without the hash; the rest is cut off


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str  # of its folder; no two configurations share one
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
    """Return a hash of what a run computes, 8 hexadecimal digits."""
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
    """Return a folder's name: task, attention, seed, what differs from the recipe, and the hash."""
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
        """Return what is wrong, each once."""
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
