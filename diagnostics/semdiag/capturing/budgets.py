"""Budgets: how many keys each layer and head keeps, in a file that other tools can read too."""

from pathlib import Path
from typing import Any

from semdiag.capturing.mask_rules import TopK
from semdiag_models import InputError
from semdiag_models.reading import read_json

SCHEMA = "semdiag.budget/1"


def read_budget(path: str | Path, name: str | None = None) -> dict[int | str | tuple[str, int], TopK]:
    """Read a budget that ``semdiag k-sweep --budget`` wrote, for :func:`~semdiag.capturing.sparsify.sparsify`.

    Args:
        path: the JSON file; its form: docs/commands/k-sweep.md.
        name: which of its budgets, like ``mass-95``; None: the one that the file calls its default.

    Returns:
        Rules by module and occurrence.

    Raises:
        InputError: if the file is missing, is no budget file, or has no budget of that name.
    """
    content = read_json(Path(path))
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InputError(
            f"{path} is not a budget: semdiag k-sweep MODEL --rerun --budget FILE.json writes one ({SCHEMA})."
        )
    budgets = content.get("budgets")
    wanted = content.get("default") if name is None else name
    if not isinstance(budgets, dict) or not budgets:
        raise InputError(f"{path} holds no budget.")
    budget = budgets.get(wanted) if isinstance(wanted, str) else None
    if not isinstance(budget, dict):
        raise InputError(f"{path} has no budget called {wanted}. It has {', '.join(budgets)}.")
    try:
        return {
            _module_call(layer): TopK(tuple(map(_whole, layer["k"])), block=_whole(budget["block"]))
            for layer in budget["layers"]
        }
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}: a budget has a block and layers, each with module, occurrence and k, one number a head."
        ) from None


def _module_call(layer: Any) -> tuple[str, int]:
    return str(layer["module"]), _whole(layer["occurrence"])


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError
    return value
