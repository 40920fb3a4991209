"""Find the checkpoints that are meant, also when none is named."""

import os
from pathlib import Path

from semdiag.capturing.hints import refuse_other_kinds
from semdiag_models import InputError

FOLDER_VARIABLE = "SEMDIAG_CHECKPOINTS"
_BESIDE = (".md", ".json", ".csv", ".py", ".toml", ".txt", ".log", ".html", ".png", ".svg", ".yaml", ".yml")


def find_checkpoints(models: list[Path] | None) -> list[Path]:
    """Return the checkpoints a command is about."""
    if models:
        return _each_once([file for model in models for file in _files(model)])
    folder = _folder()
    folders = _below(folder)
    if not folders:
        raise InputError(
            f"No checkpoint in {folder}. Make one in a minute with: "
            "semdiag train even-pairs --attention topk --k 5 --epochs 5"
        )
    return folders


def without_other_files(models: list[Path]) -> tuple[list[Path], list[Path]]:
    """Split what a shell's ``*`` matched into possible models and other files beside them."""
    others = [model for model in models if model.suffix in _BESIDE and model.is_file()]
    kept = [model for model in models if model not in others]
    return (kept, others) if kept else (models, [])


def _each_once(files: list[Path]) -> list[Path]:
    known: set[Path] = set()
    for file in files:
        if file in known:
            raise InputError(f"{file} is named twice.")
        known.add(file)
    return files


def known_runs() -> list[Path]:
    """Return the run folders that are meant when none is named."""
    return [file.parent for file in _below(_folder()) if file.name == "last.pt"]


def _folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE, "checkpoints"))


def _files(model: Path) -> list[Path]:
    if not model.is_dir():
        return [model]
    runs = _below(model)
    if not runs:
        refuse_other_kinds(model, [])
        raise InputError(f"The folder {model} holds no checkpoint (.pt).")
    return runs


def _below(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and its subfolders, except hidden ones: environments hold .pt files."""
    every = ((file, file.relative_to(folder).parts) for file in folder.rglob("*.pt"))
    files = sorted(file for file, parts in every if not any(part.startswith(".") for part in parts))
    runs = {file.parent for file in files if file.name == "last.pt"}
    return [file for file in files if file.name == "last.pt" or file.parent not in runs]
