"""Refuses a registered study whose seeds an experiment has used before."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from semdiag_files import InputError, read_toml

HERE = Path(__file__).parent
IN_A_NAME = re.compile(r"seed-(\d+)")
IN_A_SCRIPT = re.compile(r"^SEEDS(?::[^=\n]*)? = (.*)$", re.M)


def used_seeds(experiments: Path = HERE, apart: str = "") -> set[int]:
    """Return the seeds of all experiments in a folder: of sweeps, scripts, records, tables and run folders.

    Args:
        experiments: the folder.
        apart: name of the study whose own files (``apart.toml``, ``apart.py``, ``apart/``) do not count.
    """
    found = set[int]()
    for path in sorted(experiments.rglob("*")):
        if path.relative_to(experiments).parts[0].removesuffix(path.suffix) != apart:
            found.update(_seeds_of(path))
    return found


def _seeds_of(path: Path) -> Iterator[int]:
    yield from map(int, IN_A_NAME.findall(path.name))
    if path.suffix == ".toml":
        yield from _in_settings(read_toml(path))
    elif path.suffix == ".py":
        for line in IN_A_SCRIPT.findall(path.read_text(encoding="utf-8")):
            numbers = [int(digits) for digits in re.findall(r"\d+", line)]
            yield from range(*numbers[:2]) if "range(" in line else numbers
    elif path.name == "runs.parquet":
        yield from (json.loads(record)["training"]["seed"] for record in pd.read_parquet(path)["record"])
    elif path.suffix in (".csv", ".parquet"):
        table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        yield from map(int, table["seed"].dropna().unique() if "seed" in table else ())


def _in_settings(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for item in value:
            yield from _in_settings(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key == "seed":
                yield from inner if isinstance(inner, list) else [inner]
            else:
                yield from _in_settings(inner)


def refuse_used(seeds: Iterable[int], study: str, experiments: Path = HERE) -> None:
    """Refuse seeds that another experiment has used.

    Raises:
        InputError: if there are any; it names them.
    """
    again = sorted(set(seeds) & used_seeds(experiments, apart=study))
    if again:
        these = ", ".join(map(str, again))
        raise InputError(f"Seeds of an earlier experiment: {these}. A registered study needs new ones.")
