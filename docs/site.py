"""Gives mkdocs the pages in the folders that they have in the repository, so that their links lead somewhere."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = (
    "*",
    "docs/**/*",
    "reports/**/*",
    "experiments/**/*",
    "checkpoints/*",
    "benchmarks/*",
    "tests/fixtures/*",
)
SHOWN = {".md", ".svg", ".png", ".html", ".csv", ".cff", ".ipynb", ".py", ".toml", ".json", ".yml"}
MOST = 1_000_000  # bytes of a file


def on_config(config: Any) -> Any:
    """Let mkdocs read a copy of the pages and of what they show."""
    pages = Path(tempfile.mkdtemp(prefix="semdiag-site-"))
    for file in {file for place in PLACES for file in ROOT.glob(place)}:
        if (file.suffix in SHOWN or file.name == "LICENSE") and file.stat().st_size <= MOST:
            copy = pages / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    config.docs_dir = str(pages)
    return config


def on_post_build(config: Any) -> None:
    """Remove the copy."""
    shutil.rmtree(config.docs_dir)
