"""The folder of a command's page: named after the models, and never that of other models."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from semdiag.presenting.file_names import file_safe

if TYPE_CHECKING:
    from semdiag.measuring.measurements import Measurements


def output_folder(command: str, measurements: "Measurements", given: Path | None) -> Path:
    """Return the folder of a command's output, by default like ``reports/dispersion-even-pairs-topk-5-seed-1``."""
    from semdiag.presenting.terminal import tell

    models = [str(model) for model in measurements.models["model"]]
    name = file_safe(models[0]) if len(models) == 1 else f"{len(models)}-models"
    folder = given or Path("reports") / f"{command}-{name}"
    models_there = _models_of(folder)
    if models_there is None or models_there == _normalised(models):
        return folder
    if given is None:
        digest = hashlib.sha256("\n".join(sorted(_normalised(models))).encode()).hexdigest()
        return folder.with_name(f"{folder.name}-{digest[:8]}")
    tell(f"Replaces in {folder}: a report on {', '.join(sorted(models_there))}.")
    return folder


def _models_of(folder: Path) -> set[str] | None:
    """Return the names of the models in a folder's report; None if there is no report."""
    from semdiag_models import InputError
    from semdiag_models.reading import read_json

    try:
        results = read_json(folder / "summary.json")["results"]
        return _normalised([str(row["model"]) for row in results])
    except (InputError, OSError, KeyError, TypeError):
        return None


def _normalised(models: list[str]) -> set[str]:
    """Return names that are equal for the same model, however the user wrote it."""
    return {os.path.normpath(model).removesuffix(f"{os.sep}last.pt") for model in models}
