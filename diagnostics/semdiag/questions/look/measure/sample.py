"""The one input that is looked at, and the text of its tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, entries, longest, only_token_ids, split
from semdiag.capturing.inputs.texts import SUFFIXES, TextOptions, read_texts, tokeniser_of
from semdiag.capturing.inputs.tokenising import Tokeniser
from semdiag.capturing.kept_keys import CROSS
from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.encoders.inputs import checked_tokens
from semdiag.measuring.survey import inputs_of
from semdiag_models import Encoder, InputError

LONGEST = 256  # tokens that a page shows
_OF_DECODER = ("decoder_input_ids", "decoder_inputs")


class Cut(Enum):
    """Why the last tokens are left out: the user's limit, the model's, the page's, or the size of the scores."""

    REQUESTED, MODEL, PAGE, SCORES = range(4)


@dataclass(frozen=True, eq=False)
class Sample:
    """One input of a model."""

    batch: Batch  # the model's arguments, one sample
    source: str  # where it comes from, in words
    tokens: list[str] | None  # the text of each token
    targets: list[str] | None = None  # the same for a decoder's own sequence; None: there is none
    cut: Cut | None = None  # why tokens at the end were left out; None: none were
    # the text, its model and options, to tokenise it again; None: it came as numbers
    text: tuple[str, LoadedModel, TextOptions] | None = None

    def shortened(self, most: int, why: Cut) -> "Sample | None":
        """Return the sample with at most ``most`` tokens; None if it is not made of token ids."""
        if self.text is not None:
            text, model, options = self.text
            return replace(_of_text(text, model, replace(options, max_length=most), self.source), cut=why)
        if not only_token_ids(self.batch):
            return None
        batch = _first_tokens(self.batch, most)
        words, targets = (None if known is None else known[:most] for known in (self.tokens, self.targets))
        return Sample(batch, self.source, words, targets, why if longest(self.batch) > most else self.cut)


def read_sample(model: LoadedModel, conditions: Conditions, text: str | None = None) -> Sample:
    """Return the input that is looked at: a text, or the first sample of the inputs."""
    options, given = conditions.texts, conditions.inputs
    if options.max_length is not None and options.max_length > LONGEST:
        raise InputError(f"A page shows at most {LONGEST} tokens. Got --max-length {options.max_length}.")
    source = "--text"
    if text is None and given is not None and given.suffix in SUFFIXES and model.external:
        texts = read_texts(given).texts
        text, source = texts[0], f"{given}, the first of {len(texts)} texts" if len(texts) > 1 else str(given)
    if text is not None:
        return _of_text(text, model, replace(options, max_length=options.max_length or LONGEST), source)
    if given is None and model.batches is None and model.external:
        tokenizer = "" if model.source == "hugging face" else " and --tokenizer DIR"
        raise InputError(
            f"Name a text for {model.path} with --text TEXT{tokenizer}; or with --inputs FILE token ids (.npy, "
            ".npz, .pt), texts (.txt, .jsonl) or a .pt with a dictionary of the model's arguments."
        )
    batches, _, source = inputs_of(model, conditions)
    return _of_batch(model, batches[0], source if "first" in source else f"{source}, the first")


def given_sample(model: LoadedModel, given: str | Batch | Iterable[Batch], tokens: Sequence[str] | None) -> Sample:
    """Return the input that a program gives."""
    if isinstance(given, str):
        if tokens is not None:
            raise InputError("tokens say what numbers mean: of a text the tokenizer says it.")
        return _of_text(given, model, TextOptions(LONGEST), "the text")
    batches = split(given, 1)
    if not batches:
        raise InputError("There is no input to look at: the number of samples is 0.")
    sample = _of_batch(model, batches[0], "the first sample given")
    return sample if tokens is None else replace(sample, tokens=[str(word) for word in tokens][:LONGEST])


def token_labels(call: AttentionCall, sample: Sample) -> tuple[list[str], list[str]]:
    """Return labels of the queries and the keys of a call: tokens, or positions where tokens are not known."""
    of_queries = of_keys = sample.tokens
    if sample.targets is not None:
        of_queries = sample.targets if "decoder" in call.module.lower() else sample.tokens
        of_keys = sample.tokens if is_crossing(call.module) else of_queries
    return _fitting(of_queries, call.q.shape[2]), _fitting(of_keys, call.k.shape[2])


def is_crossing(module: str) -> bool:
    """Return whether a module's name says that its keys are of another sequence than its queries."""
    return any(word in module.lower() for word in CROSS)


def _fitting(words: list[str] | None, length: int) -> list[str]:
    """Return the words if there is one for each of ``length`` positions, else the positions."""
    return words if words is not None and len(words) == length else [str(place) for place in range(length)]


def _of_batch(model: LoadedModel, batch: Batch, source: str) -> Sample:
    """Return one sample of inputs, cut to the number of token ids that a page shows."""
    if isinstance(model.module, Encoder):
        (batch,) = checked_tokens(model.module, [batch], ())
    sample = Sample(batch, source, _words(model, _ids(batch, False)), _words(model, _ids(batch, True)))
    return sample.shortened(LONGEST, Cut.PAGE) or sample


def _of_text(text: str, model: LoadedModel, options: TextOptions, source: str) -> Sample:
    """Return a text as the model's input."""
    tokenise = tokeniser_of(Path(source), model, options)
    batch: dict[str, Tensor] = tokenise([text])
    ids, decoder = _ids(batch, False), _ids(batch, True)
    words = None if ids is None else tokenise.pieces(ids)
    targets = None if decoder is None else tokenise.pieces(decoder)
    cut = None
    if tokenise.cut([text]):
        most = options.max_length or LONGEST
        too_long = tokenise.takes is not None and tokenise.takes <= most
        cut = Cut.MODEL if too_long else Cut.PAGE if most == LONGEST else Cut.REQUESTED
    return Sample(batch, source, words, targets, cut, (text, model, options))


def _ids(batch: Batch, decoder: bool) -> list[int] | None:
    """Return the token ids of a sample or of its decoder; None if there are none, or several candidates."""
    candidates = [
        (str(name), value)
        for name, value in entries(batch)
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() and len(value) == 1
    ]
    named = [ids for name, ids in candidates if (name in _OF_DECODER if decoder else name == "input_ids")]
    if not named and not decoder and len(candidates) == 1 and candidates[0][1].dtype != torch.bool:
        named = [candidates[0][1]]
    return [int(each) for each in named[0][0]] if named else None


def _words(model: LoadedModel, ids: list[int] | None) -> list[str] | None:
    """Return what the model's tokenizer says of ids; without a tokenizer, the ids themselves."""
    if ids is None:
        return None
    try:
        tokenise: Tokeniser = tokeniser_of(Path(model.path), model, TextOptions())
        return tokenise.pieces(ids)
    except InputError:
        return [str(each) for each in ids]


def _first_tokens(batch: Any, most: int) -> Any:
    """Return a batch of token ids with only the first tokens of each tensor."""
    if isinstance(batch, Tensor):
        return batch[:, :most] if batch.ndim == 2 else batch
    if isinstance(batch, Mapping):
        return {name: _first_tokens(value, most) for name, value in batch.items()}
    return tuple(_first_tokens(each, most) for each in batch) if isinstance(batch, tuple | list) else batch
