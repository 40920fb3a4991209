"""Runs with masks that are finished, kept in a folder: the same command goes on after Ctrl-C or a kill."""

import hashlib
import html
import json
import os
import re
import site
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag_files import InputError, read_bytes, read_json, write_text
from semdiag_models import weights_sha256

PAGE = "index.html"  # says how far the runs are
RUNS = "runs-*.jsonl"  # of each process
_CONDITIONS = "conditions.json"
_PAGE_EVERY = 10.0  # seconds
_LIBRARIES = "semdiag", "torch", "transformers"
_NOT_THE_MODELS = (
    "__main__",
    "__mp_main__",
    "semdiag",
    "semdiag_models",
    "semdiag_files",
)  # modules; their version is compared
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of an object without one of its own
# What of a run is kept for each sample, in the order of a record.
_COLUMNS = (
    "mask", "k", "sample", "part", "chunk", "targets", "correct", "predictions", "changed", "classes", "loss",
    "divergence", "output_change", "kept", "keys",
)  # fmt: skip
_TEXT_COLUMNS = 1  # of them, at their beginning
RunPlace = tuple[int, int, int, str, int]  # length of the pieces (0: inputs), first sample, samples, mask, k


@dataclass(frozen=True)
class FinishedRun:
    """A model's run with a mask, or without one, on a batch."""

    rows: Sequence[Mapping[str, Any]]  # of the table of reruns, without the model
    padded: bool = False  # whether outputs at padding are compared
    drew: bool = False  # whether the model drew random numbers
    seconds: float = 0.0  # that it took

    def to_record(self, place: RunPlace) -> dict[str, Any]:
        """Return the run as plain values."""
        values = [[row[name] for name in _COLUMNS] for row in self.rows]
        facts = {"padded": self.padded, "drew": self.drew, "seconds": round(self.seconds, 4)}
        return {"place": list(place), **facts, "rows": values}

    @classmethod
    def from_record(cls, record: Any) -> tuple[RunPlace, Self]:
        """Return place and run of plain values; ValueError if they are none."""
        if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
            raise ValueError
        rows = [_checked_row(values) for values in record["rows"]]
        length, first, samples, mask, k = record["place"]
        facts = record.get("padded") is True, record.get("drew") is True, float(record["seconds"])
        return (int(length), int(first), int(samples), str(mask), int(k)), cls(rows, *facts)


def _checked_row(values: Any) -> dict[str, Any]:
    if not isinstance(values, list) or len(values) != len(_COLUMNS) or not isinstance(values[0], str):
        raise ValueError
    if not all(isinstance(value, int | float) for value in values[_TEXT_COLUMNS:]):
        raise ValueError
    return dict(zip(_COLUMNS, values, strict=True))


@dataclass
class FinishedRuns:
    """Finished runs of a model; with a folder each is written there at once, a line of JSON a run.

    Every process writes a file of its own. A line that a kill cut short is left out.
    """

    folder: Path | None = None  # of the model; None: nothing is kept beyond this process
    number: int = 0  # of the process
    runs: dict[RunPlace, FinishedRun] = field(default_factory=dict)
    total: int = 0  # runs that are to be made
    written_at: float = 0.0  # when the page was written

    @classmethod
    def opened(cls, folder: Path | None, conditions: Mapping[str, str], total: int = 0) -> Self:
        """Return the runs in a folder; refuse those that were made under other conditions."""
        if folder is None:
            return cls(total=total)
        record = folder / _CONDITIONS
        if any(folder.glob(RUNS)):
            _check_same(folder, read_json(record), conditions)
            _cut_off_torn_lines(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(record, json.dumps(dict(conditions), indent=1))
        return cls(folder, runs=dict(_runs_in(folder)), total=total)

    def of_process(self, number: int) -> "FinishedRuns":
        """Return the same runs for another process."""
        return FinishedRuns(self.folder, number, self.runs, self.total)

    def add(self, place: RunPlace, run: FinishedRun) -> None:
        """Keep a run."""
        self.runs[place] = run
        if self.folder is None:
            return
        line = json.dumps(run.to_record(place), separators=(",", ":")) + "\n"
        with (self.folder / f"runs-{self.number}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if time.monotonic() - self.written_at > _PAGE_EVERY:
            self.written_at = time.monotonic()
            self.write_page()

    def write_page(self) -> None:
        """Write how far the runs are."""
        if self.folder is not None:
            places = [place for place, _ in _runs_in(self.folder)]
            write_text(self.folder / PAGE, _page(self.folder, places, self.total))


def _cut_off_torn_lines(folder: Path) -> None:
    """Cut off what a kill left of a line; no process may write there now."""
    for path in folder.glob(RUNS):
        lines, end, torn_line = read_bytes(path).rpartition(b"\n")
        if torn_line:
            with path.open("r+b") as file:
                file.truncate(len(lines + end))


def _runs_in(folder: Path) -> Iterator[tuple[RunPlace, FinishedRun]]:
    """Yield the runs in a folder, without a line that is being written."""
    for path in sorted(folder.glob(RUNS)):
        lines = read_bytes(path).rpartition(b"\n")[0]
        for number, line in enumerate(lines.splitlines(), 1):
            try:
                yield FinishedRun.from_record(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise InputError(
                    f"{path} is damaged in line {number}: delete that line, and its runs are made again."
                ) from None


def _check_same(folder: Path, content: Any, conditions: Mapping[str, str]) -> None:
    earlier = content if isinstance(content, dict) else {}
    differences = [
        f"{name} ({earlier.get(name, 'none')} there, {conditions.get(name, 'none')} now)"
        for name in dict.fromkeys([*conditions, *earlier])
        if earlier.get(name) != conditions.get(name)
    ]
    if differences:
        raise InputError(
            f"{folder.parent} holds runs of an unfinished command with another {', another '.join(differences)}. "
            "Repeat that command, name another --out, or delete the folder."
        )


def _page(folder: Path, places: Sequence[RunPlace], total: int) -> str:
    finished = Counter((length, mask) for length, _, _, mask, _ in places)
    rows = "".join(
        f"<tr><td>{html.escape(mask)}<td>{length or 'as given'}<td>{runs:,}"
        for (length, mask), runs in sorted(finished.items())
    )
    runs = sum(finished.values())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="10">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{runs:,} of {total:,} runs</title><style>body{{font:1rem/1.5 system-ui;margin:2rem auto;"
        "max-width:40rem;padding:0 1rem}td,th{padding:.1rem 1rem .1rem 0;text-align:left}</style>"
        f"<h1>{runs:,} of {total:,} runs with masks are finished</h1>"
        f'<progress max="{max(total, 1)}" value="{runs}"></progress>'
        "<p>The same command goes on from here; its report will replace "
        f"{html.escape(str(folder.parent.parent))}.</p>"
        f"<table><tr><th>mask<th>tokens of a text<th>finished</tr>{rows}</table></html>"
    )


def model_folder(folder: Path, path: str) -> Path:
    """Return the folder of a model's runs among those of a command."""
    return folder / hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return the versions on which results depend."""
    installed = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def texts_digest(batches: Iterable[Batch], labels: Tensor | None) -> str:
    """Return a digest of inputs, sample by sample: the same however they are cut into batches."""
    digest = hashlib.sha256()
    for batch in batches:
        samples = batching.samples_of(batch)
        entries = batching.entries(batch)
        for at in range(samples):
            for name, value in entries:
                digest.update(f"{name}:".encode())
                is_cut = isinstance(value, Tensor) and value.ndim > 0 and len(value) == samples
                digest.update(_bytes_of(value[at] if is_cut else value))
    if labels is not None:
        digest.update(_bytes_of(labels))
    return digest.hexdigest()[:12]


def _bytes_of(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    flat = value.detach().cpu().contiguous().reshape(-1)
    return f"{tuple(value.shape)}{value.dtype}".encode() + flat.view(torch.uint8).numpy().tobytes()


def weights_digest(module: nn.Module) -> str:
    """Return a digest of a model's weights; of tensors of another library's class, of their names and shapes."""
    tensors = {**dict(module.named_buffers()), **module.state_dict()}  # the first also names what is not saved
    state = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    plain = {name: tensor for name, tensor in state.items() if type(tensor) is Tensor}
    foreign = [f"{name} {tuple(tensor.shape)}" for name, tensor in state.items() if name not in plain]
    return hashlib.sha256(f"{weights_sha256(plain)}{foreign}".encode()).hexdigest()[:12]


def structure_digest(module: nn.Module) -> str:
    """Return a digest of what a model prints as: its modules with their sizes, and its configuration."""
    try:
        text = f"{module!r} {getattr(module, 'config', None)!r}"
    except Exception:  # the user's code may do anything when printed
        text = " ".join(f"{name} {type(part).__qualname__}" for name, part in module.named_modules())
    return hashlib.sha256(_ADDRESS.sub("", text).encode(errors="surrogateescape")).hexdigest()[:12]


def code_digests(module: nn.Module) -> dict[str, str]:
    """Return a digest of each imported file of the user's, and versions of the libraries that define the model.

    The user's files are those outside Python's own folders and those of installed packages.
    """
    python = sysconfig.get_paths()
    folders = [python[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    installed = {Path(folder).resolve() for folder in folders}
    digests = {}
    for name, imported in sorted(sys.modules.items()):
        file = getattr(imported, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in _NOT_THE_MODELS:
            continue
        path = Path(file).resolve()
        if not any(path.is_relative_to(folder) for folder in installed):
            with suppress(OSError):
                digests[f"code of {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    for library in sorted({type(part).__module__.partition(".")[0] for part in module.modules()}):
        release = _release(library)
        if release:
            digests[library] = release
    return digests


def _release(library: str) -> str:
    """Return the version of an imported library; empty if it has none."""
    with suppress(PackageNotFoundError):
        return version(library)
    return str(getattr(sys.modules.get(library), "__version__", ""))
