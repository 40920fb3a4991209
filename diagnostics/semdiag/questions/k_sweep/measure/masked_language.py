"""Masked tokens of a masked-language model's inputs, chosen by a seed."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from semdiag.capturing.batches import Batch
from semdiag.capturing.inputs.texts import AS_THEY_ARE, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag_models import InputError

SHARE = 0.15


def masked_language(
    loaded: LoadedModel, batches: list[Batch], seed: int, remark: Callable[[str, str], None]
) -> list[Batch]:
    """Mask some tokens of a masked-language model's inputs, so that its loss is known."""
    named = type(loaded.module).__name__.endswith("ForMaskedLM")
    given = [dict(batch) for batch in batches if isinstance(batch, Mapping)]
    plain = len(given) == len(batches) and all("input_ids" in each and "labels" not in each for each in given)
    if loaded.source != "hugging face" or not named or not plain:
        return batches
    try:
        tokenise = tokeniser_of(Path(loaded.path), loaded, AS_THEY_ARE)
    except InputError:
        return batches
    for number, batch in enumerate(given):
        ids: Tensor = batch["input_ids"]
        masked = tokenise.mask(ids.cpu(), seed + number, SHARE)
        if masked is None:
            return batches
        batch["input_ids"], batch["labels"] = (x.to(ids.device) for x in masked)
    remark(
        f"run with {SHARE:.0%} of the tokens masked (seed {seed}): the loss is that of these tokens",
        "tokens-masked",
    )
    return [*given]
