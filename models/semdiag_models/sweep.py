"""Sweeps: a TOML grid becomes runs, and each is trained in a process of its own."""

import hashlib
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from semdiag_files import InputError, counted, read_bytes, read_toml, unknown_name
from semdiag_files.records import Record, check_type
from semdiag_files.workers import TICK, Workers
from semdiag_models.checkpoint import Checkpoint, read_checkpoint
from semdiag_models.config import ListOpsTrees, ModelConfig, TrainingConfig
from semdiag_models.run_folder import open_run, run_name, train_seed_runs
from semdiag_models.tasks import Task, configure, find_task, listops_task, task_of
from semdiag_models.text import Text, open_text
from semdiag_models.train import DivergedError, Trainer, ended, find_device

MOST_RUNS = 100_000  # largest number of runs of one file
_MOST_PROBLEMS = 20  # largest number of problems that are told
_LISTS = ("snapshots", "frozen")  # keys whose values are lists that do not multiply the runs
_CONTINUABLE = ("epochs", "until", "snapshots")  # fields that may differ when a run continues
_IN_THE_NAME = (
    "task", "length", "attention", "k", "global_tokens", "seed", "selection_seed", "text", "listops",
    "hash_rounds", "hash_bits", "hashes", "clusters", "centroid_decay", "score_gradient", *_CONTINUABLE,
)  # fmt: skip
_LONGEST_NAME = 90  # without the hash; longer names are cut


@dataclass(frozen=True)
class _TextFile(Record):
    text: str = ""  # path of the file, relative to the sweep's own
    holdout_text: str | None = None
    tokenizer: str = "unigram"
    vocabulary: int = 4096


_HIDDEN = ("vocabulary_size", "classes", "listops", "cls_as_key", "precision")  # fields that users cannot set
_RECORDS: tuple[Any, ...] = (ListOpsTrees, TrainingConfig, ModelConfig, _TextFile)  # the last that has a field
_FIELDS = {f.name: f for record in _RECORDS for f in fields(record) if f.name not in _HIDDEN}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str  # name of its folder; no two configurations share one
    model: ModelConfig
    training: TrainingConfig


def read_sweep(path: Path) -> list[SweepRun]:
    """Read a sweep's file, and check every run in it before any starts."""
    problems = dict[str, None]()
    runs = dict[str, SweepRun]()
    texts = lru_cache(partial(_open_text, path.parent))
    for settings in read_settings(path):
        try:
            run = _build(settings, texts)
            if runs.setdefault(run.name, run) != run:
                why = "one run cannot have two numbers of epochs, until or snapshots"
                raise InputError(f"{run.name}: {why}: the longer contains the shorter.")
        except InputError as error:
            problems[str(error)] = None
    if problems:
        first = " ".join([*problems][:_MOST_PROBLEMS])
        raise InputError(f"{path} has {counted(len(problems), 'problem')}; nothing was run. {first}")
    return list(runs.values())


def read_settings(path: Path) -> list[dict[str, Any]]:
    """Read a TOML file: the settings of every run; what a grid says replaces what the top says."""
    content = read_toml(path)
    grid = content.pop("grid", {})
    tables = grid if isinstance(grid, list) else [grid]
    if not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: grid must be a table, [grid] or [[grid]]. Got {grid!r}.")
    pairs = (pair for table in tables for pair in product(_combinations(content), _combinations(table)))
    runs = [{**common, **settings} for common, settings in islice(pairs, MOST_RUNS + 1)]
    if len(runs) > MOST_RUNS:
        raise InputError(f"{path} asks for more than {MOST_RUNS:,} runs. Use shorter lists.")
    if not runs:
        raise InputError(f"{path} asks for no run: a list in it is empty.")
    return runs


def _combinations(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the combinations of a table's lists; a table in a list stands for several keys at once."""
    axes = [list(islice(_choices(key, value), MOST_RUNS + 1)) for key, value in table.items()]
    combinations = []
    for combination in islice(product(*axes), MOST_RUNS + 1):
        keys = Counter(key for part in combination for key in part)
        twice = next((key for key, count in keys.items() if count > 1), None)
        if twice is not None:
            raise InputError(f"{twice} is set twice in one table of the grid.")
        combinations.append({key: value for part in combination for key, value in part.items()})
    return combinations


def _choices(key: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings that a key's value stands for: of a list those of its entries, of a table its own."""
    several = isinstance(value, list) and (key not in _LISTS or any(isinstance(v, list) for v in value))
    for entry in value if several else [value]:
        yield from _combinations(entry) if isinstance(entry, dict) else [{key: entry}]


def _build(values: dict[str, Any], texts: Callable[[int | None, _TextFile], Text]) -> SweepRun:
    for key, value in values.items():
        if key not in _FIELDS:
            raise unknown_name("key", key, _FIELDS)
        check_type(_FIELDS[key], value)
    if "task" not in values:
        raise InputError('A run has no task. Add one at the top or in [grid], like task = "even-pairs".')
    name = values.pop("task")
    text = _pop_fields(values, _TextFile)
    trees = _pop_fields(values, ListOpsTrees)
    task = texts(values.get("length"), _TextFile(**text)) if name == Text.name else find_task(name)
    for extra, home in ((text, Text.name), (trees, "listops")):
        if extra and task.name != home:
            raise InputError(f"{next(iter(extra))} belongs to the task {home}. Got task {name!r}.")
    law = ListOpsTrees(**trees) if trees else None
    if law is not None:
        task = listops_task(law)
        values.setdefault("length", law.longest)
    epochs = values.get("epochs", task.recipe.epochs)
    values["snapshots"] = [epoch for epoch in values.get("snapshots", ()) if epoch <= epochs]
    model, training = configure(task, values, law)
    if isinstance(task, Task):
        _draw_one(task, training.least_length or training.length)
    return SweepRun(name_run(model, training), model, training)


def _pop_fields(values: dict[str, Any], record: Any) -> dict[str, Any]:
    """Take a record's fields out of values."""
    return {f.name: values.pop(f.name) for f in fields(record) if f.name in values}


def _open_text(folder: Path, window: int | None, source: _TextFile) -> Text:
    if not source.text:
        raise InputError('The task text needs a file: text = "FILE", beside the sweep\'s own file.')
    holdout = None if source.holdout_text is None else folder / source.holdout_text
    return Text(open_text(folder / source.text, holdout, source.tokenizer, source.vocabulary), window)


@lru_cache
def _draw_one(task: Task, length: int) -> None:
    """Refuse a length of which a task has no string."""
    task.draw(1, 1, length, torch.Generator().manual_seed(0))


def identity(model: ModelConfig, training: TrainingConfig) -> str:
    """Return a hash of a run's configuration, 8 hexadecimal digits."""
    ran = replace(training, epochs=1, until=None, snapshots=())
    values = {"model": _not_default(model), "training": _not_default(ran)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _not_default(record: ModelConfig | TrainingConfig) -> dict[str, Any]:
    values = record.to_dict()
    for f in fields(record):
        # For compatibility: the empty list of snapshots has always been part of the hash.
        compared = values[f.name] if f.name == "snapshots" else getattr(record, f.name)
        if f.default is not MISSING and compared == f.default:
            del values[f.name]
        elif "float" in str(f.type) and values[f.name] is not None:
            values[f.name] = float(values[f.name])  # 1 and 1.0 are one learning rate
    return values


def name_run(model: ModelConfig, training: TrainingConfig) -> str:
    """Return a folder's name: task, attention, seed, differences from the recipe, and the hash."""
    chosen = {"attention": model.attention, "k": model.k, "optimizer": training.optimizer}
    usual = configure(task_of(training), chosen, training.listops)
    readable = run_name(model, training)
    words = list[str]()
    plain = vars(usual[0]) | vars(usual[1]) | {"optimizer": TrainingConfig.optimizer}
    for name, value in [*vars(model).items(), *vars(training).items()]:
        if name not in _IN_THE_NAME and value != plain[name]:
            word = f"{name}-{'-'.join(value) if isinstance(value, tuple) else value}"
            if isinstance(value, str):
                word = value
            elif value is True:
                word = name
            words.append(re.sub(r"[^\w.-]+", "-", word).replace("_", "-"))
    if training.length != usual[1].length and training.listops is None:
        words.append(f"length-{training.length}")
    for word in words:
        if len(readable) + len(word) > _LONGEST_NAME:
            break
        readable += f"-{word}"
    return f"{readable}-{identity(model, training)}"


class Order(NamedTuple):
    """What a worker process needs to train runs; everything in it can be pickled."""

    runs: tuple[SweepRun, ...]  # runs to train; several of the same size share their steps
    folder: Path  # absolute folder of the run folders, which have the runs' names
    device: str  # ``cpu``, ``cuda`` or ``mps``
    provenance: dict[str, Any]  # stored in every snapshot


class AttemptOutcome(NamedTuple):
    """End of an attempt: a status, and one line with the reason unless it is ``done``."""

    status: str
    problem: str = ""
    retry: bool = False  # whether another attempt may succeed


KILLED = AttemptOutcome("failed", "its process was killed, by someone or for lack of memory", retry=True)


def inspect(folder: Path, run: SweepRun) -> tuple[str, Checkpoint | None]:
    """Return the progress of a run: waiting (also if what is there cannot be read), begun or done."""
    try:
        saved = read_checkpoint(folder / "last.pt")
    except InputError:
        return "waiting", None
    if identity(saved.model, saved.training) != identity(run.model, run.training):
        raise InputError(f"{folder} holds a run of another configuration. Move it away, or choose another --out.")
    return ("done" if ended(saved.history, run.training) else "begun"), saved


def train_order(order: Order) -> list[AttemptOutcome]:
    """Train runs to their ends from their current state, on one CPU thread, in a process of its own."""
    torch.set_num_threads(1)
    outcomes = {run.name: AttemptOutcome("done") for run in order.runs}
    left = list(order.runs)
    device = find_device(order.device)
    opened = dict[Trainer, Path]()
    try:
        status = {run: inspect(order.folder / run.name, run)[0] for run in left}
        left = [run for run in left if status[run] != "done"]
        with ExitStack() as undo:
            for run in left:
                folder = order.folder / run.name
                begun = status[run] == "begun"
                trainer = open_run(folder, run.model, run.training, device, resume=begun, overwrite=not begun)
                undo.callback(trainer.release)
                opened[trainer] = folder
            if left:
                train_seed_runs(opened, order.provenance)
    except DivergedError as error:
        outcomes |= {left[member].name: AttemptOutcome("diverged", str(error)) for member in error.members}
    except InputError as error:
        outcomes |= {run.name: AttemptOutcome("failed", str(error)) for run in left}
    except Exception as error:  # full disk, no memory, a bug of ours: record it, and try again
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        outcomes |= {run.name: AttemptOutcome("failed", problem, retry=True) for run in left}
    return list(outcomes.values())


def train_all(
    orders: list[Order], workers: Workers, retries: int
) -> Iterator[tuple[SweepRun, AttemptOutcome] | None]:
    """Train many runs, several at a time; yield each with its end, and None now and then."""
    waiting = deque(orders)
    attempts = Counter[str]()
    running: dict[Any, tuple[Order, list[int]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.capacity:
                order = waiting.popleft()
                before = [epochs_so_far(order.folder / run.name) for run in order.runs]
                running[workers.submit(order)] = order, before
            for handle in workers.wait(list(running), TICK):
                order, before = running.pop(handle)
                outcomes = workers.outcomes(handle) or [KILLED] * len(order.runs)
                again = list[SweepRun]()
                for run, outcome, was in zip(order.runs, outcomes, before, strict=True):
                    attempts[run.name] += outcome.retry and epochs_so_far(order.folder / run.name) <= was
                    if outcome.retry and attempts[run.name] <= retries:
                        again.append(run)
                    else:
                        yield run, outcome
                if again:
                    waiting.append(order._replace(runs=tuple(again)))
            yield None
    finally:
        workers.close()


def together(runs: list[SweepRun], most: int) -> list[tuple[SweepRun, ...]]:
    """Group runs that differ only in their seed, in order."""
    alike: dict[Any, list[SweepRun]] = {}
    for run in runs:
        alike.setdefault((run.model, replace(run.training, seed=0, query_key_scale=1.0)), []).append(run)
    return [tuple(group[i : i + most]) for group in alike.values() for i in range(0, len(group), most)]


def epochs_so_far(folder: Path) -> int:
    """Return the finished epochs of a run that may be training, from ``history.csv``."""
    try:
        return read_bytes(folder / "history.csv").count(b"\n") - 1
    except InputError:
        return 0
