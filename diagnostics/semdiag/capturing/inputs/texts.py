"""Read texts, one per line or as JSON lines with labels and targets, and make batches of them."""

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.batches import Batch
from semdiag.capturing.inputs.tokenising import Tokeniser, read_tokenizer
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.pretrained import first_line
from semdiag_models import InputError
from semdiag_models.tasks.text_lines import read_lines

SUFFIXES = ".txt", ".jsonl"
_KEYS = "text", "label", "target"
_IGNORED = -100  # label of padding
_NUMBER = re.compile(r"-?[0-9]{1,18}")  # of a class; anything else is a name


@dataclass(frozen=True)
class TextOptions:
    """How texts become inputs."""

    max_length: int | None = None  # number of tokens at which texts are cut; None means the model's limit
    tokenizer: Path | None = None  # folder of a tokenizer; None means the model's own
    labels: Path | None = None  # file with one class per line, for each text

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise InputError(f"--max-length must be at least 2. Got {self.max_length}.")


AS_THEY_ARE = TextOptions()


@dataclass(frozen=True)
class Texts:
    """Texts, with labels or targets."""

    texts: list[str]  # at least one
    labels: list[int | str] = field(default_factory=list)  # class of each, a number or a name; empty if unknown
    targets: list[str] = field(default_factory=list)  # the right output of a sequence-to-sequence model for each


def read_texts(path: Path) -> Texts:
    r"""Read texts from a file."""
    lines = read_lines(path)[0]
    if path.suffix == ".txt":
        return Texts(lines)
    columns: dict[str, list[Any]] = {name: [] for name in _KEYS}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"].strip():
            raise InputError(f'{path}, line {number}: each line must be an object like {{"text": "…"}}.')
        for name in _KEYS:
            if name in row:
                columns[name].append(row[name])
        if any(columns[name] and len(columns[name]) < number for name in _KEYS) or any(
            len(columns[name]) == 1 < number for name in _KEYS
        ):
            raise InputError(f"{path}, line {number}: label and target must be in every line or in none.")
    wrong = [x for x in columns["label"] if not isinstance(x, str) and not (type(x) is int and abs(x) < 2**63)]
    wrong += [x for x in columns["target"] if not isinstance(x, str)]
    if wrong:
        raise InputError(
            f"{path}: a label must be a whole number or a name, a target a text. Got {str(wrong[0])[:40]}."
        )
    return Texts(columns["text"], columns["label"], columns["target"])


def text_batches(path: Path, model: LoadedModel, size: int, options: TextOptions) -> list[Batch]:
    """Make batches of the texts in a file."""
    tokenise = tokeniser_of(path, model, options)
    given = read_texts(path)
    labels = _classes(path, given, model, options)
    batches: list[Batch] = []
    for first in range(0, len(given.texts), size):
        part = slice(first, first + size)
        batch: dict[str, Tensor] = tokenise(given.texts[part])
        if labels is not None:
            batch["labels"] = labels[part]
        elif given.targets:
            batch = _with_targets(tokenise, batch, given.targets[part], model.module)
        batches.append(batch)
    return batches


def tokeniser_of(path: Path, model: LoadedModel, options: TextOptions) -> Tokeniser:
    """Return the tokenizer that makes a model's inputs."""
    if model.source != "hugging face" and options.tokenizer is None:
        raise InputError(
            f"{path}: texts need a tokenizer, and {model.path} has none. Name a folder that holds one with "
            "--tokenizer DIR, or give token ids."
        )
    folder = options.tokenizer
    if folder not in model.tokenizers:
        model.tokenizers[folder] = read_tokenizer(model.path, folder)
    spec = model.path if folder is None else str(folder)
    return Tokeniser(spec, model.tokenizers[folder], model.module, options.max_length)


def _classes(path: Path, given: Texts, model: LoadedModel, options: TextOptions) -> Tensor | None:
    """Return the class of each text, (N,); None if unknown."""
    named, where = given.labels, path
    if options.labels is not None:
        where = options.labels
        named = [int(line) if _NUMBER.fullmatch(line) else line for line in read_lines(where)[0]]
    if not named:
        return None
    if len(named) != len(given.texts):
        raise InputError(f"{where} has {len(named)} labels, but {path} has {len(given.texts)} texts.")
    if "labels" not in inspect.signature(model.module.forward).parameters:
        raise InputError(
            f"{where}: {type(model.module).__name__} takes no labels. Name a model with a classification head."
        )
    head = getattr(model.module, "get_output_embeddings", lambda: None)
    if head() is not None:
        raise InputError(
            f"{where} names a class for each text, but {type(model.module).__name__} predicts tokens. Leave the "
            "classes out, or name a model with a classification head."
        )
    known = getattr(getattr(model.module, "config", None), "label2id", None) or {}
    unknown = [name for name in named if isinstance(name, str) and name not in known]
    if unknown:
        names = ", ".join(map(str, sorted(known, key=lambda name: int(known[name]))[:10])) or "none"
        raise InputError(f"{where}: the model has no class {unknown[0][:40]!r}. Its classes: {names}.")
    numbers = [int(known[name]) if isinstance(name, str) else name for name in named]
    classes = getattr(getattr(model.module, "config", None), "num_labels", None)
    outside = [n for n in numbers if isinstance(classes, int) and not 0 <= n < classes]
    if outside and isinstance(classes, int):
        raise InputError(f"{where}: the model has {classes} classes, 0 to {classes - 1}. Got {outside[0]}.")
    return torch.tensor(numbers)


def _with_targets(
    tokenise: Tokeniser, batch: dict[str, Tensor], targets: Sequence[str], model: nn.Module
) -> dict[str, Tensor]:
    """Return a batch with targets as the decoder's input, shifted as the model shifts them, and as labels."""
    if "decoder_input_ids" not in batch:
        raise InputError("Targets are for sequence-to-sequence models, but this model has no separate decoder.")
    answers = tokenise(targets, targets=True)
    ids = answers["input_ids"]
    labels = ids.where(answers.get("attention_mask", torch.ones_like(ids)).bool(), _IGNORED)
    shifted = {name: x for name, x in answers.items() if name.startswith("decoder_")}
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if callable(shift):  # mBART's decoders, for one, begin with the last token, which is the language
        try:
            shifted["decoder_input_ids"] = shift(labels=labels)
        except (ValueError, TypeError, AssertionError) as error:  # a token that the configuration lacks
            raise InputError(f"The model takes no targets ({first_line(error)}).") from error
    return batch | shifted | {"labels": labels}
