"""Models that a user's own function builds: ``package.module:function``."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from semdiag_models import InputError
from semdiag_models.errors import unknown_name

_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def recognised(spec: str) -> bool:
    """Return whether a text names a factory: ``package.module:function``, and no file has that name."""
    return _SPEC.fullmatch(spec) is not None and not Path(spec).exists()


def build(spec: str) -> tuple[nn.Module, Any]:
    """Import the user's module and call the factory. This runs the user's code."""
    name, _, function = spec.partition(":")
    with _current_folder_first():
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever the user's code does when imported
            raise InputError(f"{name} cannot be imported ({_described(error)}).{_hint(error, name)}") from error
        factory = getattr(module, function, None)
        if not callable(factory):
            own = {n for n, value in vars(module).items() if getattr(value, "__module__", "") == name}
            raise unknown_name(f"function of {name}", function, sorted(own) or ["none"])
        try:
            built = factory()
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"{spec} failed ({_described(error)}). It is called without arguments.") from error
    model, batches = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{spec} must return a torch.nn.Module, or one and its inputs. Got {type(model).__name__}."
        )
    return model, batches


def in_evaluation_mode(module: nn.Module) -> nn.Module:
    """Put a module into evaluation mode, including one from ``torch.export``, which refuses ``eval()``."""
    try:
        return module.eval()
    except NotImplementedError:
        for part in module.modules():
            part.training = False
    return module


@contextmanager
def _current_folder_first() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _hint(error: BaseException, name: str) -> str:
    """Say where a module was looked for, if the user's own module was not found."""
    missing = getattr(error, "name", None)
    if isinstance(error, ModuleNotFoundError) and missing is not None and f"{name}.".startswith(f"{missing}."):
        return f" It is looked for in {Path.cwd().name}/, the current folder, and among installed packages."
    return ""


def _described(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
