"""File names made from model names."""

import os
import re
from pathlib import Path

_LONGEST = 80  # characters of a name: file systems allow 255 bytes, and a character takes up to four


def file_safe(model: str) -> str:
    """Return a model's name as a valid file name: a run's folder, and its snapshot if it is not the last."""
    prefix, place = ("hf-", model[3:]) if model.startswith("hf:") else ("", model)
    path = Path(os.path.normpath(place))
    name = path.name
    if path.name == "last.pt" and path.parent.name:
        name = path.parent.name
    elif path.suffix == ".pt":
        name = "-".join(part for part in (path.parent.name, path.stem) if part)
    return re.sub(r"[^\w.-]+", "-", prefix + name)[:_LONGEST].strip("-.") or "model"
