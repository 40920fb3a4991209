"""Mutated files before every reader; run by test_fuzz.py: FOLDER WAY SEED NUMBER.

Prints outcomes by class as JSON. ``read`` and ``refused`` are fine; any other class is an exception that got
through.
"""

import io
import json
import math
import os
import pickle
import random
import re
import resource
import signal
import sys
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch

import semdiag.reporting.report  # noqa: F401 (so that forked processes need not import it)
from semdiag.capturing.inputs import read_batches, read_inputs
from semdiag.capturing.loading import load
from semdiag.commands.main import main
from semdiag.commands.measuring import read_config
from semdiag.measuring.calls.monitor_alarms import MonitorLog
from semdiag.measuring.measurements import Measurements
from semdiag.reporting.gate import read_baseline
from semdiag.selections.check import check_selection
from semdiag.selections.files import read_selection
from semdiag_files import InputError, files
from semdiag_models.sweep import read_sweep
from semdiag_models.text import read_lines

SECONDS = 20  # for one input
_SMALL = 2**32  # bytes: as on a machine of 4 GiB, where what is declared may take 1
_WILD = (
    b"\x00",
    b"\xff" * 8,
    b"-1",
    b"1e999",
    b"NaN",
    b"\x1b[31m",
    b"[" * 500,
    b"9" * 5000,
    b"\\ud800",
    b"99999999",
)


class HangError(Exception):
    """An input took too long."""


class Harmful:
    """Unpickling it would leave a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with a few bytes, or a piece of it, changed; a zip archive sometimes within a member."""
    kind = draw.randrange(8)
    if content[:2] == b"PK" and kind < 4:  # behind the checksums, where readers do their work
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = draw.choice([n for n in members if n.endswith("data.pkl")] * 3 + list(members))
        members[name] = mutated(members[name], draw) if members[name] else b"x"
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED if kind == 3 else zipfile.ZIP_STORED) as archive:
            for member, data in members.items():
                archive.writestr(member, data)
        return whole.getvalue()
    at, changed = draw.randrange(len(content)), bytearray(content)
    if kind < 5:
        for _ in range(draw.choice((1, 1, 2, 8, 64))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    elif kind == 5:
        del changed[at : at + draw.choice((1, 7, len(changed)))]
    elif kind == 6:
        changed[at : at + draw.choice((0, 1, 8))] = draw.choice(_WILD)
    else:
        other = draw.randrange(len(content))
        changed[at:at] = content[other : other + draw.randrange(1, 200)]
    return bytes(changed)


def hostile(folder: Path) -> dict[str, bytes]:
    """Pickles of code, in every protocol and container."""
    found = {}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        code = {"format": "semdiag/1", "code": Harmful(folder / "executed")}
        found[f"bare-{protocol}"] = pickle.dumps(code, protocol=protocol)
        for zipped in (True, False):
            file = io.BytesIO()
            torch.save(code, file, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
            found[f"{zipped}-{protocol}"] = file.getvalue()
    array = io.BytesIO()
    np.save(array, np.array([[Harmful(folder / "executed")]]), allow_pickle=True)
    return found | {"array": array.getvalue()}


def readers(folder: Path) -> dict[str, Callable[[Path], object]]:
    """Every reader, by the name of a good file for it in the folder."""
    model = load(folder / "last.pt")
    pretrained = {
        "hf/model.safetensors": lambda path: load(f"hf:{path.parent}"),
        "hf/config.json": lambda path: load(f"hf:{path.parent}"),
    }
    return {
        **(pretrained if (folder / "hf").exists() else {}),
        "last.pt": load,
        "paper.pt": lambda path: load(path, {"mask_type": "windowed", "mask_size": 5, "n_heads": 1}),
        "tokens.npy": read_inputs,
        "tokens.npz": read_inputs,
        "tokens.pt": lambda path: read_batches(path, model, 10),
        "text.txt": read_lines,
        "sweep.toml": read_sweep,
        "config.json": read_config,
        "baseline.json": read_baseline,
        "monitor.csv": lambda path: MonitorLog(path, ["step", "layer"], 0).close(),
        **{f"selection.{kind}": checked for kind in ("npz", "safetensors", "parquet")},
        "queries.parquet": lambda path: Measurements.load(path.parent),
    }


def checked(path: Path) -> None:
    """Read a selection and check it."""
    read = read_selection(path)
    check_selection(read.scores, read.indices, read.lengths, starts=read.starts, documents=read.documents)


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """How a reader ends on a file."""
    signal.alarm(SECONDS)
    try:
        read(path)
    except InputError:
        return "refused"
    except Exception as error:
        return type(error).__name__
    finally:
        signal.alarm(0)
    return "read"


def in_process(folder: Path, draw: random.Random, inputs: int) -> dict[str, Counter[str]]:
    """Outcomes by reader, of at least so many inputs."""
    found: dict[str, Counter[str]] = {}
    for name, read in readers(folder).items():
        good = (folder / name).read_bytes()
        path = folder / "mutated" / name
        found[name] = Counter()
        slow = name == "queries.parquet" or name.startswith("hf/")
        share = inputs // (40 if slow else 10) + 1
        cases = [mutated(good, draw) for _ in range(share)]
        if name.endswith((".pt", ".npy")):
            cases += hostile(folder).values()
        for number, case in enumerate(cases):
            path.write_bytes(case)
            said = outcome(read, path)
            found[name][said] += 1
            if said not in ("read", "refused"):
                (folder / f"{said}-{number}-{path.name}").write_bytes(case)
        path.write_bytes(good)
    return found


def by_command_line(folder: Path, draw: random.Random, commands: int) -> Counter[str]:
    """Outcomes of the program with a mutated file among its words."""
    words = {
        "last.pt": ["info"],
        "paper.pt": ["info", "--config", str(folder / "config.json")],
        "tokens.npy": ["dispersion", str(folder / "last.pt"), "--figures", "none", "--inputs"],
        "tokens.npz": ["check", str(folder / "last.pt"), "--rule", "dispersion.p50 < 9", "--inputs"],
        "config.json": ["info", str(folder / "paper.pt"), "--config"],
        "baseline.json": ["check", str(folder / "last.pt"), "--samples", "4", "--baseline"],
        "sweep.toml": ["sweep", "--dry-run"],
        "text.txt": ["train", "text", "--vocabulary", "5", "--epochs", "1", "--blocks", "1", "--text"],
    }
    found: Counter[str] = Counter()
    for number in range(commands):
        name = list(words)[number % len(words)]
        path = folder / "mutated" / name
        path.write_bytes(mutated((folder / name).read_bytes(), draw))
        found[ended([*words[name], str(path)], folder, f"{number}-{name}")] += 1
    return found


def redrawn_reports(folder: Path, draw: random.Random, reports: int) -> Counter[str]:
    """Outcomes of ``semdiag report --from`` on saved measurements with one table changed."""
    found: Counter[str] = Counter()
    tables = sorted((folder / "mutated").glob("*.parquet"))
    words = ["report", "--from", ".", "--figures", "none", "--quiet", "--out", str(folder / "redrawn")]
    for number in range(reports):
        path = tables[number % len(tables)]
        mutate_table(pd.read_parquet(folder / path.name), draw).to_parquet(path, index=False)
        found[ended(words, folder, f"{number}-{path.name}")] += 1
        path.write_bytes((folder / path.name).read_bytes())
    return found


def ended(words: list[str], folder: Path, case: str) -> str:
    """How a process of its own, forked with everything imported, ends that runs the program with words."""
    process = os.fork()
    if process == 0:
        run_and_leave(words, folder)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    said = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    if "Traceback" not in said:
        return f"exit {code}"
    (folder / f"traceback-{case}").write_text(said)
    return "traceback"


def mutate_table(table: pd.DataFrame, draw: random.Random) -> pd.DataFrame:
    """The table with one thing about it changed that its format allows: a value, a type, columns, rows."""
    column, kind = draw.choice(list(table)), draw.randrange(7)
    if kind == 0:
        return table.drop(columns=column)
    if kind == 1:
        return table.iloc[:0]
    if kind == 2:
        return table.sample(frac=draw.choice((0.5, 2.0)), replace=True, random_state=draw.randrange(2**31))
    if kind == 3:
        return table.assign(**{column: draw.choice((None, "text", "\x1b[31m\ud7ff", -1, 1e308, True))})
    if kind == 4:
        return table.assign(**{column: table[draw.choice(list(table))].to_numpy()})
    if kind == 5:
        return table.astype({column: draw.choice(("str", "object"))})
    values = table[column].astype(object).to_numpy(copy=True)
    if len(values):
        wild = math.nan, math.inf, -math.inf, 0, -1, 1e308, 2**31 - 1, 5e-324
        values[draw.randrange(len(values))] = draw.choice(wild)
    try:
        return table.assign(**{column: pd.Series(values, index=table.index).astype(table[column].dtype)})
    except (TypeError, ValueError, OverflowError):
        return table.assign(**{column: pd.Series(values, index=table.index).astype(str)})


def run_and_leave(words: list[str], folder: Path) -> NoReturn:
    """Run the program with words, in a process that ends with it."""
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(3 * SECONDS)  # ends the process: exit -14
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder / "mutated")
    sys.argv = ["semdiag", *words]
    code = 70
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 70
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def hang(*_: object) -> None:
    """Say that an input takes too long."""
    raise HangError


def own_peak() -> int:
    """The most KiB that this process held; `getrusage` says that of the one which started it, if it is larger."""
    status = Path("/proc/self/status")
    held = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(held[1]) if held else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


WAYS = {"in process": in_process, "reports": redrawn_reports, "command lines": by_command_line}

if __name__ == "__main__":
    place, way, seed, number = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    torch.set_num_threads(1)
    files._memory = lambda: _SMALL
    signal.signal(signal.SIGALRM, hang)
    begun = time.process_time()
    found = {
        "outcomes": WAYS[way](place, random.Random(seed), number),
        "executed": (place / "executed").exists(),
    }
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["largest KiB"] = max(own_peak(), children.ru_maxrss)
    found["CPU seconds"] = round(time.process_time() - begun + children.ru_utime + children.ru_stime)
    print(json.dumps(found))
