"""Run every measuring command, and compare what two versions wrote: a refactoring changes no number.

    python benchmarks/same_numbers.py make before      # in the checkout of one version
    python benchmarks/same_numbers.py make after       # in the checkout of the other
    python benchmarks/same_numbers.py compare before after

Compared are all numbers of JSON, CSV and pages, and the names of figures. Numbers differ if they are further apart
than one part in 10⁹; words may differ.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

_PAIR = ("checkpoints/even-pairs-full-seed-153476998", "checkpoints/even-pairs-topk-5-seed-153476998")
_FEW = ("--samples", "100")
COMMANDS: dict[str, tuple[str, ...]] = {
    "dispersion": ("dispersion", *_PAIR, "--k", "5", *_FEW),
    "separation": ("separation", *_PAIR, "--k", "5", *_FEW),
    "stability": ("stability", *_PAIR, *_FEW),
    "bounds": ("bounds", *_PAIR, *_FEW),
    "bounds-against": ("bounds", _PAIR[1], "--against", _PAIR[0], *_FEW),
    "mask-stability": ("mask-stability", *_PAIR, "--noise", "0.01", *_FEW),
    "k-sweep": ("k-sweep", *_PAIR, "--rerun", *_FEW),
    "overlap": ("overlap", *_PAIR),
    "lipschitz": ("lipschitz", *_PAIR, "--samples", "20", "--planes", "2", "--draws", "40"),
    "landscape": ("landscape", _PAIR[1], "--grid", "7", *_FEW),
    "convergence": ("convergence", *_PAIR, *_FEW),
    "report": ("report", "--samples", "50"),
    "report-thorough": ("report", _PAIR[1], "--thorough", "--samples", "20"),
    "check": ("check",),
}
_NO_NUMBERS = re.compile(r"<style.*?</style>|<[^>]*>|\d{4}-\d\d-\d\d|semdiag \d+\.\d+\.\d+", re.S)  # of a page
_NUMBER = re.compile(r"[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_OF_THE_DAY = {"command", "semdiag", "version"}  # keys whose values belong to the run, not to the model


def make(folder: Path) -> None:
    """Write every command's JSON and report below a folder."""
    folder.mkdir(parents=True)
    for name, words in COMMANDS.items():
        out = () if words[0] == "check" else ("--out", str(folder / name), "--figures", "svg")
        done = subprocess.run(
            [sys.executable, "-m", "semdiag", *words, "--json", *out], capture_output=True, text=True, check=False
        )
        (folder / f"{name}.json").write_text(done.stdout)
        (folder / f"{name}.exit").write_text(f"{done.returncode}\n")
        print(name, done.returncode, done.stderr[-200:] if done.returncode else "", flush=True)


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, truth values and names of plain values, with their places."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            if key not in _OF_THE_DAY:
                yield from numbers(value[key], f"{place}/{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from numbers(each, f"{place}[{index}]")
    elif isinstance(value, int | float) or value is None:
        yield place, value


def read(path: Path) -> list[tuple[str, Any]]:
    """Return the numbers of a file with their places."""
    if path.suffix == ".json":
        return list(numbers(json.loads(path.read_text() or "null")))
    if path.suffix == ".csv":
        table = pd.read_csv(path)
        return [
            (f"{column}[{row}]", each)
            for column in table.select_dtypes("number")
            for row, each in enumerate(table[column].tolist())
        ]
    if path.suffix == ".html":
        text = _NO_NUMBERS.sub(" ", path.read_text())
        return [(f"number {index}", each) for index, each in enumerate(_NUMBER.findall(text))]
    return [("", path.read_text() if path.suffix == ".exit" else None)]


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, numbers up to rounding."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15) or (one != one and other != other)
    return bool(one == other)


def compare(before: Path, after: Path) -> int:
    """Print what differs; return how many files do."""
    kinds = (".json", ".csv", ".html", ".exit", ".svg")
    files = [
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in kinds)
        for folder in (before, after)
    ]
    differing = [f"{path}: only in one" for path in sorted(set(files[0]) ^ set(files[1]))]
    count = 0
    for path in sorted(set(files[0]) & set(files[1])):
        one, other = read(before / path), read(after / path)
        count += len(one)
        places = [p for (p, a), (_, b) in zip(one, other, strict=False) if not same(a, b)]
        if places or len(one) != len(other):
            differing.append(f"{path}: {len(one)} and {len(other)} numbers, {len(places)} differ: {places[:3]}")
    shared = len(set(files[0]) & set(files[1]))
    print(*differing, f"{shared} files, {count:,} numbers, {len(differing)} files differ", sep="\n")
    return len(differing)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder]:
            make(Path(folder))
        case ["compare", before, after]:
            sys.exit(bool(compare(Path(before), Path(after))))
        case _:
            sys.exit(__doc__)
