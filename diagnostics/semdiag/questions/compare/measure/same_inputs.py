"""Two models measured on the inputs of the first, and compared."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from semdiag.capturing.batches import first_samples, samples_of
from semdiag.capturing.inputs.texts import SUFFIXES, read_texts, tokeniser_of
from semdiag.capturing.inputs.tokenising import has_tokenizer
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.pretrained import find_folder
from semdiag.measuring.calls.running import placed
from semdiag.measuring.conditions import DTYPES, Conditions
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.survey import Inputs, has_diverged, inputs_of, survey
from semdiag.questions.compare.measure.probe import TOP, ComparePlan, compare
from semdiag_models import Encoder, InputError
from semdiag_models.device import find_device


def compare_survey(
    models: Sequence[LoadedModel],
    conditions: Conditions,
    announce: Callable[[str, int], None] = lambda model, samples: None,
    after_batch: Callable[[int], None] = lambda samples: None,
    *,
    top: int = TOP,
    dtype: str | None = None,
) -> Measurements:
    """Measure a base and a model on the base's inputs, and compare them."""
    base, other = models[-1], models[0]
    if len(models) == 1:
        other = replace(base, path=f"{base.path} ({dtype or 'again'})", module=copy.deepcopy(base.module))
    device = find_device(conditions.device)
    of_base = conditions.decided([base, other], device)
    of_other = of_base if dtype is None else replace(of_base, dtype=dtype).decided([other], device)
    inputs = Inputs(*inputs_of(base, conditions), base)
    if len(models) > 1:
        _check_tokens(base, other, inputs, conditions)
    for model, settings in ((base, of_base), (other, of_other)):
        if model.external:
            placed(model.module, device, DTYPES[settings.dtype])
    dtypes = DTYPES[of_base.dtype], DTYPES[of_other.dtype]
    announce("one sample of both", 0)
    compare(
        base,
        other,
        list(first_samples(inputs.batches, 1)),
        top,
        labels=inputs.labels,
        device=device,
        dtypes=dtypes,
    )
    parts = [survey([base], replace(of_base, plans=()), announce, after_batch, own=True, given=inputs)]
    if has_diverged(parts[0]):
        raise InputError(f"{base.path} cannot be compared: its attention scores are not finite numbers.")
    plan = ComparePlan(top, base, dtypes[0])
    parts.append(survey([other], replace(of_other, plans=(plan,)), announce, after_batch, own=True, given=inputs))
    joined = Measurements.concat(parts)
    if joined.compared.empty:
        why = joined.remarks.loc[joined.remarks["code"] == "no-compare", "text"].iloc[0]
        raise InputError(f"{other.path} cannot be compared: {why.partition(' because ')[2]}.")
    joined.provenance.update(parts[1].provenance | parts[0].provenance)
    joined.provenance.update(model_dtype=parts[1].provenance["dtype"])
    return joined


def _check_tokens(base: LoadedModel, other: LoadedModel, inputs: Inputs, conditions: Conditions) -> None:
    """Refuse a model to which the token ids of the base's inputs mean something else, as far as that is known."""
    if isinstance(base.module, Encoder) and isinstance(other.module, Encoder):
        sizes = base.module.config.vocabulary_size, other.module.config.vocabulary_size
        if sizes[0] != sizes[1] or _pieces(base) != _pieces(other):
            raise InputError(f"{base.path} and {other.path} cannot be compared: their token ids differ.")
    file, texts = conditions.inputs, conditions.texts
    if file is None or file.suffix not in SUFFIXES or texts.tokenizer is not None:
        return
    if {base.source, other.source} != {"hugging face"} or not has_tokenizer(find_folder(other.path)):
        return
    base_tokeniser = tokeniser_of(file, base, texts)
    other_tokeniser = tokeniser_of(file, other, replace(texts, max_length=base_tokeniser.longest))
    for number, text in enumerate(read_texts(file).texts[: sum(map(samples_of, inputs.batches))], 1):
        if not torch.equal(base_tokeniser([text])["input_ids"], other_tokeniser([text])["input_ids"]):
            raise InputError(
                f"{base.path} and {other.path} cannot be compared: the token ids of text {number} differ. If the "
                f"model was made to read those of the base, say so: --tokenizer {find_folder(base.path)}."
            )


def _pieces(model: LoadedModel) -> str | None:
    """Return what cuts the text of an encoder of text into pieces."""
    text = None if model.training is None else model.training.text
    return None if text is None else text.model
