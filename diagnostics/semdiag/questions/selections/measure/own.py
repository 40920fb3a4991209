"""A model's own selections: what its routers and indexers choose on given inputs."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch
from semdiag.capturing.factories import in_evaluation_mode
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.selections.number_formats import NumberFormat
from semdiag.questions.selections.measure.own_rows import OwnRows, Tokens, kind_of, own_rows, tokens_of
from semdiag.questions.selections.measure.stages import in_stages
from semdiag.questions.selections.measure.watch import Selected, watch_selections
from semdiag_models import InputError


@dataclass
class OwnSelection:
    """What one selection of a model chose, in all batches.

    Attributes:
        module: that selects.
        layer: the first number in its name; None: it has none.
        parts: of each batch.
    """

    module: str
    layer: int | None
    parts: list[OwnRows] = field(default_factory=list)


@dataclass
class OwnSelections:
    """A model's own selections.

    Attributes:
        found: in the order in which they ran.
        others: selections of modules whose rows are not those of tokens: their number by module and shape.
    """

    found: list[OwnSelection]
    others: Counter[tuple[str, tuple[int, ...]]]


def own_selections(
    loaded: LoadedModel, batches: Sequence[Batch], kind: NumberFormat, device: torch.device, dtype: torch.dtype
) -> OwnSelections:
    """Run a model and return what it selects.

    Args:
        loaded: a model from elsewhere; it is moved and converted.
        batches: its inputs.
        kind: the format of the certificate.
        device: where it runs.
        dtype: of the model.

    Raises:
        InputError: if it cannot be run on the inputs, selects nothing, or a score is NaN.
    """
    model = in_evaluation_mode(loaded.module).to(device, dtype)
    found: dict[tuple[str, int], OwnSelection] = {}
    others: Counter[tuple[str, tuple[int, ...]]] = Counter()
    tokens = Tokens(0, frozenset(), {})
    causal = _causal(model)

    def consume(name: str, module: nn.Module, selected: list[Selected]) -> None:
        text = f"{name} {type(module).__name__}".lower()
        for place, (chosen, group) in enumerate(in_stages(selected)):
            shape = tuple(chosen.scores.shape)
            kind_here = kind_of(text, shape, tokens)
            if not kind_here:
                others[name, shape] += 1
                continue
            try:
                rows = own_rows(text, kind_here, chosen, group, tokens, name in causal, kind)
            except InputError as error:
                raise InputError(f"{loaded.path}: {name}: {error}") from None
            layer = re.search(r"\d+", name)
            entry = OwnSelection(name, int(layer[0]) if layer else None)
            found.setdefault((name, place), entry).parts.append(rows)

    with torch.no_grad(), watch_selections(model, consume):
        for batch in batches:
            there = batching.moved(batch, device, dtype)
            tokens = tokens_of(model, there)
            _run(loaded, there)
    inside = {key: entry for key, entry in found.items() if entry.module}
    if inside:  # what the model selects outside its parts, as for a loss, are no decisions of a layer
        for key in found.keys() - inside.keys():
            others["", (found[key].parts[0].choices,)] += len(found[key].parts)
        found = inside
    if not found:
        raise InputError(
            f"{loaded.path} selects nothing for its tokens: while it ran, no topk, argmax or sort of scores was "
            "seen in it whose rows are its tokens."
        )
    return OwnSelections(list(found.values()), others)


def _causal(model: nn.Module) -> frozenset[str]:
    """Modules inside one that says that it is causal."""
    return frozenset(
        name if not inner else f"{name}.{inner}" if name else inner
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) is True
        for inner, _ in module.named_modules()
    )


def _run(loaded: LoadedModel, batch: Batch) -> None:
    """Run a model from elsewhere on a batch."""
    try:
        batching.call(loaded.module, batch)
    except InputError:
        raise
    except Exception as error:  # whatever the model raises
        said = " ".join(str(error).split())[:200]
        raise InputError(
            f"{loaded.path} cannot be run on these inputs ({type(error).__name__}: {said})."
        ) from error
