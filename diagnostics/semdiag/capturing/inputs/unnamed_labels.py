"""Refuse tuples with an entry that looks like labels but would arrive as another argument."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from semdiag_models import InputError

_NAMES = re.compile("label|target|ids|token|position|length|lens|segment|index|time|step")  # clear names


def refuse_unnamed_labels(model: nn.Module, batch: Sequence[Any]) -> None:
    """Refuse a tuple with an entry that may be labels but would go to an optional argument for something else."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return
    if len(batch) > len(parameters):
        return  # the call itself will fail, or takes any number
    first = batch[0] if batch else None
    samples = len(first) if isinstance(first, Tensor) and first.ndim else -1
    for at, (given, taken) in enumerate(zip(batch, parameters, strict=False)):
        if taken.kind is not taken.POSITIONAL_OR_KEYWORD:
            return
        optional = taken.default is not taken.empty and at > 0
        if optional and isinstance(given, Tensor) and _may_be_labels(given, taken.name.lower(), samples):
            names = ", ".join(f"{one.name!r}: …" for one in parameters[: len(batch)])
            raise InputError(
                f"Entry {at} of the batch may be labels, or the argument {taken.name} of {type(model).__name__}. "
                f"Give labels apart (labels=), or name the arguments: {{{names}}}."
            )


def _may_be_labels(given: Tensor, name: str, samples: int) -> bool:
    """Return whether a tensor that goes to an argument of this name could be labels of so many samples."""
    if _NAMES.search(name) or given.ndim not in (1, 2) or len(given) != samples:
        return False
    whole = not given.is_floating_point() and not given.is_complex()
    if "mask" in name:
        return whole and given.element_size() > 1 and bool(((given < 0) | (given > 1) | (given.ndim == 1)).any())
    return given.ndim == 1 or (whole and given.element_size() > 1)
