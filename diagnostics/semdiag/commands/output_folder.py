"""Where a command puts its page: a folder named after the models, and never that of other models."""

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semdiag.measuring.measurements import Measurements

_LONGEST = 80  # letters of a name: folders of a file system have 255 bytes, and a letter up to four


def output_folder(command: str, measurements: "Measurements", given: Path | None) -> Path:
    """The folder of a command's output, by default like ``reports/dispersion-even-pairs-topk-5-seed-1``.

    If a report on other models lies there already, the name gets a short hash of these models' names, so that
    nothing is overwritten. In a folder that the user named it is, and that is said.

    Args:
        command: its name.
        measurements: of the models.
        given: what the user named; None: nothing.
    """
    from semdiag.presenting.terminal.terminal import tell

    models = [str(model) for model in measurements.models["model"]]
    name = file_safe(models[0]) if len(models) == 1 else f"{len(models)}-models"
    folder = given or Path("reports") / f"{command}-{name}"
    there = _models_of(folder)
    if there is None or there == _known_as(models):
        return folder
    if given is None:
        digest = hashlib.sha256("\n".join(sorted(_known_as(models))).encode()).hexdigest()
        return folder.with_name(f"{folder.name}-{digest[:8]}")
    tell(f"Replaces in {folder}: a report on {', '.join(sorted(there))}.")
    return folder


def file_safe(model: str) -> str:
    """A model's name as a file may be called everywhere: a run's folder, or its snapshot if it is not the last.

    Args:
        model: as the user named it.

    Example:
        >>> file_safe("checkpoints/parity-full-seed-1/last.pt"), file_safe("runs/a/epoch-5.pt")
        ('parity-full-seed-1', 'a-epoch-5')
        >>> file_safe("hf:models/MiniLM"), file_safe("mypkg.models:small")
        ('hf-MiniLM', 'mypkg.models-small')
    """
    prefix, place = ("hf-", model[3:]) if model.startswith("hf:") else ("", model)
    path = Path(os.path.normpath(place))
    name = path.name
    if path.name == "last.pt" and path.parent.name:
        name = path.parent.name
    elif path.suffix == ".pt":
        name = "-".join(part for part in (path.parent.name, path.stem) if part)
    return re.sub(r"[^\w.-]+", "-", prefix + name)[:_LONGEST].strip("-.") or "model"


def _models_of(folder: Path) -> set[str] | None:
    """Which models the report in a folder is about; None if none is there, or something else."""
    from semdiag_models import InputError
    from semdiag_models.reading import read_json

    try:
        results = read_json(folder / "summary.json")["results"]
        return _known_as([str(row["model"]) for row in results])
    except (InputError, OSError, KeyError, TypeError):
        return None


def _known_as(models: list[str]) -> set[str]:
    """Names under which the same models are recognised however they were written."""
    return {os.path.normpath(model).removesuffix(f"{os.sep}last.pt") for model in models}
