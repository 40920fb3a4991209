"""Inputs that lie about sizes, depths and kinds, before every command: FOLDER SEED NUMBER [FIRST].

Each input is run by a process of its own, forked with everything imported, with 60 s of processor time.
Prints as JSON how many ended how, by kind; exit codes 0, 1 and 2 are fine, where 1 says that a check has failed.
Inputs that end otherwise, or take more than 4 GiB, stay in FOLDER/bad.

    mkdir fuzz && PYTHONPATH=diagnostics:models nice -n 15 python tests/fuzz_limits.py fuzz 20261126 3000
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from hostile import files, values, words

import semdiag.questions.in_python
import semdiag.reporting.report  # noqa: F401 (so that forked processes need not import them)
import semdiag_files.files
from semdiag.capturing.loading import read_budget
from semdiag.commands.main import main
from semdiag.measuring.measurements import Measurements
from semdiag_files import InputError

SECONDS, BYTES = 60, 2**32
_WAIT = 900  # seconds, of which other processes may take most
KINDS: dict[str, Callable[[Path, random.Random], list[str]]] = {
    make.__name__: make
    for make in (
        *(files.pickles, files.storages, files.tensors, files.arrays, files.sizes, files.records),
        *(words.texts, words.rules, words.sweeps, words.selections, words.options, words.monitors),
    )
}
IN_PYTHON: dict[str, Callable[[Path], object]] = {"budget": read_budget, "measurements": Measurements.load}


def ended(line: list[str], folder: Path) -> str:
    """How a process ends that runs the program, or a function of IN_PYTHON, with the words of a line."""
    process = os.fork()
    if process == 0:
        _run(line, folder)
    _, status, used = os.wait4(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if used.ru_utime + used.ru_stime > SECONDS or code in (-signal.SIGXCPU, -signal.SIGALRM):
        return "slow"
    if used.ru_maxrss * 1024 > BYTES:
        return "large"
    if code == 70 or "Traceback" in (folder / "stderr").read_text(encoding="utf-8", errors="replace"):
        return "traceback"
    return f"exit {code}"


def _run(line: list[str], folder: Path) -> NoReturn:
    """Run it, and leave."""
    signal.alarm(_WAIT)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 5, SECONDS + 5))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2 * BYTES,) * 2)  # so that the machine survives
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder / "case")
    code = 70
    try:
        if line[0] in IN_PYTHON:
            IN_PYTHON[line[0]](Path(line[1]))
            code = 0
        else:
            sys.argv = ["semdiag", *line]
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 70
    except InputError:
        code = 2
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fuzz(folder: Path, seed: int, numbers: range) -> dict[str, Counter[str]]:
    """Outcomes by kind, of the inputs of these numbers; what is bad is told when it is found."""
    found: dict[str, Counter[str]] = {}
    kinds = list(KINDS.items())
    for at in numbers:
        kind, make = kinds[at % len(kinds)]
        shutil.rmtree(folder / "case", ignore_errors=True)
        (folder / "case").mkdir()
        line = make(folder / "case", random.Random(f"{seed} {at}"))
        said = ended(line, folder)
        found.setdefault(kind, Counter())[said] += 1
        if said not in ("exit 0", "exit 1", "exit 2"):
            kept = folder / "bad" / f"{at}-{kind}-{said}".replace(" ", "-")
            shutil.copytree(folder / "case", kept)
            (kept / "line").write_text("\n".join(line)[:10000], encoding="utf-8", errors="backslashreplace")
            shutil.copy(folder / "stderr", kept / "said")
            print(f"{at} {kind}: {said}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    place, seed, number, *first = Path(sys.argv[1]).resolve(), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    semdiag_files.files._memory = lambda: 4 * BYTES  # a file may declare a quarter of it
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    values.prepare(place)
    outcomes = fuzz(place, seed, range(sum(first), sum(first) + number))
    total = sum(outcomes.values(), Counter())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = {"inputs": total.total(), "CPU seconds": round(used.ru_utime + used.ru_stime), "all": total}
    print(json.dumps({**facts, "kinds": outcomes}, indent=1))
