"""Suggest what was meant where a path is no checkpoint of ours."""

import ast
from difflib import get_close_matches
from pathlib import Path

from semdiag_models import InputError
from semdiag_models.reading import LARGEST_TEXT, read_bytes

OF_YOUR_OWN = "for a model of your own write a function that builds it: package.module:function"
_MODELS = f"Models are .pt files, folders of runs and hf:DIRECTORY; {OF_YOUR_OWN}."
_OTHERS = {
    ".safetensors": "holds weights without the model they belong to",
    ".ckpt": "is a checkpoint of another program",
    ".bin": "holds weights without the model they belong to",
    ".onnx": "is an exported graph",
    ".csv": "is a table, not a model",
    ".npy": "is an array, not a model; inputs go to --inputs",
    ".npz": "is an array, not a model; inputs go to --inputs",
    ".txt": "is a text, not a model; inputs go to --inputs",
}


def _functions(path: Path) -> list[str]:
    """Return the public functions of a Python file that need no arguments; the file is parsed, not run."""
    try:
        parsed = ast.parse(read_bytes(path, LARGEST_TEXT))
    except (InputError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [
        node.name
        for node in parsed.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)
    ]


def refuse_other_kinds(path: Path, runs: list[Path]) -> None:
    """Refuse a path that cannot be a checkpoint of ours, and say what would work."""
    if path.is_dir() and (path / "config.json").exists():
        raise InputError(f"{path} is a folder of the Hugging Face format: name it hf:{path}")
    if path.suffix in _OTHERS and path.is_file():
        folder = f"name its folder: hf:{path.parent}; " if (path.parent / "config.json").exists() else ""
        raise InputError(f"{path} {_OTHERS[path.suffix]}. Models are .pt files of semdiag; {folder}{OF_YOUR_OWN}.")
    if path.suffix == ".py" and path.is_file():
        named = [f"{path.stem}:{name}" for name in _functions(path)[:3]]
        meant = f"Did you mean {' or '.join(named)}?" if named else "It has none that takes no arguments."
        raise InputError(f"{path} is a program: name the function in it that builds the model. {meant}")
    if not path.exists():
        known = {name: run for run in runs for name in (run.name, str(run))}
        near = get_close_matches(str(path), known, n=1) or get_close_matches(path.name, known, n=1)
        hint = f" Did you mean {known[near[0]]}?" if near else "" if path.suffix == ".pt" else f" {_MODELS}"
        if str(path).strip(",").isdecimal():
            hint = " Is it a number of a list? A list has commas and no spaces: --k 4,8."
        raise InputError(f"{path} does not exist.{hint}")
