"""Inputs from files: arrays, token ids and texts, with their tokenizers, labels and targets."""

import inspect
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from semdiag.capturing import batches
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.pretrained import check_files, find_folder, first_line, silent, transformers_for
from semdiag_files import InputError, check_packed, counted, open_file, require_memory
from semdiag_models.checkpoint import read_plain
from semdiag_models.text import read_lines

_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.bpe", "*.tiktoken")
_CHARACTERS = 32  # most characters per token to tokenise, beside a margin: no tokenizer needs more
_MARGIN = 10_000
_UNKNOWN = "\ufffd"  # what decoders write for invalid bytes


class Tokeniser:
    """Turns texts into a model's input: a dictionary of tensors (N, L), padded and cut to the limit."""

    def __init__(self, spec: str, tokenizer: Any, model: nn.Module, most: int | None = None) -> None:
        self.takes = _longest(tokenizer, model)
        self.longest = min((n for n in (self.takes, most) if n is not None), default=None)
        self._spec = spec
        self._tokenizer = tokenizer
        self._config = getattr(model, "config", None)
        table = batches.named_embedding(model)
        self._vocabulary_size = table.num_embeddings if isinstance(table, nn.Embedding) else None
        if getattr(self._config, "summary_type", None) != "last":
            tokenizer.padding_side = "right"

    def __call__(self, texts: Sequence[str], targets: bool = False) -> dict[str, Tensor]:
        """Tokenise texts."""
        cut = {"truncation": self.longest is not None, "max_length": self.longest}
        if self._tokenizer.pad_token is None:
            left = self._tokenizer.padding_side == "left"
            batch = _padded(self._tokens(texts, targets, return_attention_mask=True, **cut), left)
        else:
            batch = self._tokens(texts, targets, return_tensors="pt", padding=True, **cut)
        self._check(texts, batch)
        return _with_decoder(self._spec, batch, self._config)

    def _check(self, texts: Sequence[str], batch: dict[str, Tensor]) -> None:
        ids = batch["input_ids"]
        real = batch.get("attention_mask", torch.ones_like(ids)).bool()
        without_token = ~real.any(1)
        if bool(without_token.any()):
            empty = int(without_token.nonzero()[0])
            raise InputError(f"{self._spec}: its tokenizer makes no token of the text {texts[empty][:40]!r}.")
        largest = int(ids[real].max())
        if self._vocabulary_size is not None and largest >= self._vocabulary_size:
            raise InputError(
                f"{self._spec}: its tokenizer gives the token id {largest}, but the model has "
                f"{self._vocabulary_size} tokens: it is another model's tokenizer. Name the right one with "
                "--tokenizer DIR."
            )

    def mask(self, ids: Tensor, seed: int, share: float = 0.15) -> tuple[Tensor, Tensor] | None:
        """Mask some of the tokens, as in the training of masked language models."""
        token = self._tokenizer.mask_token_id
        if token is None:
            return None
        special = torch.isin(ids, torch.tensor(self._tokenizer.all_special_ids))
        order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(special, 2.0)
        count = ((~special).sum(1) * share).round().clamp(min=1).long()
        chosen = (order.argsort(1).argsort(1) < count[:, None]) & ~special
        return ids.masked_fill(chosen, token), ids.masked_fill(~chosen, -100)

    def cut(self, texts: Sequence[str]) -> int:
        """Return how many of the texts are longer than the limit."""
        if self.longest is None:
            return 0
        return sum(len(ids) > self.longest for ids in self._tokens(texts)["input_ids"])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; for part of a character, the token's name in the vocabulary."""
        with _usable(self._spec):
            texts = [str(self._tokenizer.decode([each], clean_up_tokenization_spaces=False)) for each in ids]
            names = self._tokenizer.convert_ids_to_tokens(list(ids))
        names = [str(each if name is None else name) for each, name in zip(ids, names, strict=True)]
        return [text if text and _UNKNOWN not in text else name for text, name in zip(texts, names, strict=True)]

    def _tokens(self, texts: Sequence[str], targets: bool = False, **options: Any) -> dict[str, Any]:
        most = None if self.longest is None else _CHARACTERS * self.longest + _MARGIN
        cut = [text[:most] for text in texts]
        with _usable(self._spec):
            if targets:
                return dict(self._tokenizer(text_target=cut, **options))
            return dict(self._tokenizer(cut, **options))


@contextmanager
def _usable(spec: str, instead: str = "") -> Iterator[None]:
    """Refuse a tokenizer that raises anything in the context: a configuration may ask for what none can do."""
    with silent(transformers_for(spec)):
        try:
            yield
        except Exception as error:
            raise InputError(f"{spec}: its tokenizer cannot be used ({first_line(error)}).{instead}") from error


def read_tokenizer(spec: str, tokenizer_folder: Path | None = None) -> Any:
    """Read a tokenizer of transformers; if it has no padding token, it pads with another one."""
    transformers = transformers_for(spec)
    folder = find_folder(spec) if tokenizer_folder is None else tokenizer_folder
    if tokenizer_folder is not None:
        spec = str(tokenizer_folder)
        if not folder.is_dir():
            raise InputError(f"--tokenizer needs a folder with a tokenizer's files. There is no folder {folder}.")
        check_files(folder)
    instead = "Give token ids with --inputs FILE.pt"
    instead += "." if tokenizer_folder else ", or name another model's tokenizer with --tokenizer DIR."
    if not has_tokenizer(folder):
        # The library would invent a tokenizer to which every word is unknown.
        raise InputError(f"{spec} holds no tokenizer: none of {', '.join(_VOCABULARIES)}. {instead}")
    with _usable(spec, f" {instead}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer's files."""
    return any(file for pattern in _VOCABULARIES for file in folder.glob(pattern))


def _longest(tokenizer: Any, model: nn.Module) -> int | None:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    limits = [n for n in (tokenizer.model_max_length, positions) if isinstance(n, int) and 0 < n < 10**9]
    for name, part in model.named_modules():
        table = isinstance(part, nn.Embedding) and "position" in name and part.num_embeddings == positions
        if table and part.padding_idx is not None:  # as in RoBERTa: positions begin after padding's
            limits.append(positions - part.padding_idx - 1)
    return min(limits, default=None)


def _padded(rows_by_name: dict[str, list[list[int]]], left: bool) -> dict[str, Tensor]:
    longest = max(map(len, rows_by_name["input_ids"]))

    def filled(row: list[int]) -> list[int]:
        zeros = [0] * (longest - len(row))
        return zeros + row if left else row + zeros

    return {name: torch.tensor([filled(row) for row in rows]) for name, rows in rows_by_name.items()}


def _with_decoder(spec: str, batch: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    if getattr(config, "is_encoder_decoder", False) is not True:
        return batch
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    start = next((number for number in named if isinstance(number, int)), None)
    if start is None:
        raise InputError(
            f"{spec}: its config.json lacks decoder_start_token_id, the token with which its decoder starts."
        )
    ids = batch["input_ids"]
    first = ids.new_full((len(ids), 1), start)
    shifted = {"decoder_input_ids": torch.cat([first, ids[:, :-1]], 1)}
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        shifted["decoder_attention_mask"] = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)
    return batch | shifted


SUFFIXES = ".txt", ".jsonl"
_KEYS = "text", "label", "target"
_IGNORED = -100  # label of padding, which the loss ignores
_NUMBER = re.compile(r"-?[0-9]{1,18}")  # a class; anything else is a name


@dataclass(frozen=True)
class TextOptions:
    """How texts become inputs."""

    max_length: int | None = None  # number of tokens to which texts are cut; None means the model's limit
    tokenizer: Path | None = None  # folder of a tokenizer; None means the model's own
    labels: Path | None = None  # file with the class of each text, one per line

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise InputError(f"--max-length must be at least 2. Got {self.max_length}.")


AS_THEY_ARE = TextOptions()


class Texts(NamedTuple):
    """Texts, with labels or targets."""

    texts: list[str]  # at least one
    labels: Sequence[int | str] = ()  # class of each text, a number or a name; empty if unknown
    targets: Sequence[str] = ()  # right output of a sequence-to-sequence model for each text; empty if unknown


def read_texts(path: Path) -> Texts:
    r"""Read texts from a file."""
    lines = read_lines(path)[0]
    if path.suffix == ".txt":
        return Texts(lines)
    columns: dict[str, list[Any]] = {name: [] for name in _KEYS}
    for number, line in enumerate(lines, 1):
        row = _row(path, number, line)
        for name in _KEYS:
            if name in row:
                columns[name].append(row[name])
        if any(0 < len(columns[name]) < number for name in _KEYS):
            raise InputError(f"{path}, line {number}: label and target must be in every line or in none.")
    wrong = [label for label in columns["label"] if not _is_label(label)]
    wrong += [target for target in columns["target"] if not isinstance(target, str)]
    if wrong:
        what = "a label must be a whole number or a name, a target a text"
        raise InputError(f"{path}: {what}. Got {str(wrong[0])[:40]}.")
    return Texts(columns["text"], columns["label"], columns["target"])


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the object in a line of JSON lines; refuse one without a text."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"].strip():
        raise InputError(f'{path}, line {number}: each line must be an object like {{"text": "…"}}.')
    return row


def _is_label(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and abs(value) < 2**63)


def text_batches(path: Path, model: LoadedModel, size: int, options: TextOptions) -> list[Batch]:
    """Make batches of the texts in a file."""
    tokenise = tokeniser_of(path, model, options)
    content = read_texts(path)
    labels = _classes(path, content, model.module, options)
    made: list[Batch] = []
    for part in (slice(first, first + size) for first in range(0, len(content.texts), size)):
        batch: dict[str, Tensor] = tokenise(content.texts[part])
        if labels is not None:
            batch["labels"] = labels[part]
        elif content.targets:
            batch = _with_targets(tokenise, batch, content.targets[part], model.module)
        made.append(batch)
    return made


def tokeniser_of(path: Path, model: LoadedModel, options: TextOptions) -> Tokeniser:
    """Return the tokenizer for a model's inputs."""
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


def _classes(path: Path, content: Texts, model: nn.Module, options: TextOptions) -> Tensor | None:
    """Return the number of each text's class; None where no classes are given."""
    labels = content.labels
    source = path
    if options.labels is not None:
        source = options.labels
        labels = [int(line) if _NUMBER.fullmatch(line) else line for line in read_lines(source)[0]]
    if not labels:
        return None
    if len(labels) != len(content.texts):
        texts = counted(len(content.texts), "text")
        raise InputError(f"{source} has {counted(len(labels), 'label')}, but {path} has {texts}.")
    _check_classifier(source, model)
    return torch.tensor(_class_numbers(source, labels, getattr(model, "config", None)))


def _check_classifier(source: Path, model: nn.Module) -> None:
    """Refuse classes of texts for a model that takes no labels, or those of tokens."""
    if "labels" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{source}: {type(model).__name__} takes no labels. Name a model with a classification head."
        )
    head = getattr(model, "get_output_embeddings", None)
    if head is not None and head() is not None:
        raise InputError(
            f"{source} names a class for each text, but {type(model).__name__} predicts tokens. Leave the "
            "classes out, or name a model with a classification head."
        )


def _class_numbers(source: Path, labels: Sequence[int | str], config: Any) -> list[int]:
    """Return labels as numbers of the model's classes; refuse those that it does not have."""
    number_of = getattr(config, "label2id", None) or {}
    classes: Any = getattr(config, "num_labels", None)
    unknown = [name for name in labels if isinstance(name, str) and name not in number_of]
    if unknown:
        names = ", ".join(map(str, sorted(number_of, key=lambda name: int(number_of[name]))[:10])) or "none"
        raise InputError(f"{source}: the model has no class {unknown[0][:40]!r}. Its classes: {names}.")
    numbers = [int(number_of[label]) if isinstance(label, str) else label for label in labels]
    outside = [n for n in numbers if isinstance(classes, int) and not 0 <= n < classes]
    if outside:
        raise InputError(f"{source}: the model has {classes} classes, 0 to {classes - 1}. Got {outside[0]}.")
    return numbers


def _with_targets(
    tokenise: Tokeniser, batch: dict[str, Tensor], targets: Sequence[str], model: nn.Module
) -> dict[str, Tensor]:
    """Return a batch with targets as labels and, shifted as the model shifts them, as the decoder's input."""
    if "decoder_input_ids" not in batch:
        raise InputError("Targets are for sequence-to-sequence models, but this model has no separate decoder.")
    answers = tokenise(targets, targets=True)
    ids = answers["input_ids"]
    labels = ids.where(answers.get("attention_mask", torch.ones_like(ids)).bool(), _IGNORED)
    shifted = {name: x for name, x in answers.items() if name.startswith("decoder_")}
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if callable(shift):  # mBART's decoders, for example, begin with the last token, which is the language
        try:
            shifted["decoder_input_ids"] = shift(labels=labels)
        except (ValueError, TypeError, AssertionError) as error:  # a token that the configuration lacks
            raise InputError(f"The model takes no targets ({first_line(error)}).") from error
    return batch | shifted | {"labels": labels}


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_inputs(path: Path) -> Tensor:
    """Read token ids from a file."""
    content = _read(path)
    tokens = content.get("tokens") if isinstance(content, dict) else content
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not tokens.numel() or not _whole(tokens):
        what = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"{path} must hold whole token ids of shape (N, L), at least one. Got {what}.")
    require_memory(8 * tokens.numel(), f"{path}, as token ids,")
    ids = tokens.long()
    if tokens.dtype == torch.uint64 and (ids < 0).any():
        raise InputError(f"{path} holds the token id {int(ids.min()) + 2**64}; token ids must be below 2^63.")
    return ids


def read_batches(path: Path, model: LoadedModel, size: int, texts: TextOptions = AS_THEY_ARE) -> list[Batch]:
    """Read inputs for any kind of model."""
    if path.suffix in SUFFIXES:
        return text_batches(path, model, size, texts)
    if texts != AS_THEY_ARE:
        raise InputError(
            f"--max-length, --tokenizer and --labels are for texts (.txt, .jsonl). Got {path}. Of other inputs, "
            "semdiag.k_sweep(…, labels=…) takes labels, in Python."
        )
    content = _read(path)
    if isinstance(content, Mapping) and set(content) == {"tokens"}:
        content = content["tokens"]
    split = batches.split(content, size)
    if not split:
        raise InputError(f"{path} holds no sample.")
    return split


def cut_texts(path: Path, model: LoadedModel, first: int, texts: TextOptions) -> tuple[int, int | None]:
    """Count the texts that :func:`read_batches` cut because they are too long for the model."""
    tokenise = tokeniser_of(path, model, texts)
    return tokenise.cut(read_texts(path).texts[:first]), tokenise.longest


def _read(path: Path) -> Any:
    if path.suffix == ".pt":
        content = read_plain(path)
        for batch in content if isinstance(content, list | tuple) else (content,):
            for tensor in batches.tensors_of(batch) if isinstance(batch, Tensor | Mapping | list | tuple) else ():
                size = tensor.numel() * tensor.element_size()  # a file of a kilobyte may expand to 10¹² numbers
                require_memory(size, f"{path}: a tensor of shape {tuple(tensor.shape)}")
        return content
    if path.suffix in (".npy", ".npz"):
        return _read_numpy(path)
    as_array = f'numpy.save("{path.stem}.npy", numpy.loadtxt("{path.name}", delimiter=",", dtype=int))'
    table = f" A table becomes an array with: {as_array}." if path.suffix == ".csv" else ""
    raise InputError(
        "Inputs come as .npy, .npz or .pt token ids of shape (N, L), or as .txt or .jsonl for hf: models and "
        f"models of text. Got {path.name}.{table}"
    )


def _whole(tokens: Tensor) -> bool:
    plain = tokens.layout == torch.strided and not tokens.is_meta
    return plain and not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)


def _read_numpy(path: Path) -> Tensor:
    try:
        with open_file(path) as file:
            packed = zipfile.is_zipfile(file)
            file.seek(0)
            if not packed:
                check_header(path, file)
                file.seek(0)
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return array_tensor(path, content)
            names = content.files
            if not names:
                raise InputError(f"{path} holds no array. Write one with: numpy.savez(FILE, tokens=ARRAY).")
            name = "tokens" if "tokens" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise InputError(f"{path} holds {', '.join(names)}: name one of them tokens.")
            member = content.zip.getinfo(name if name in content.zip.namelist() else f"{name}.npy")
            check_member(path, member)
            with content.zip.open(member) as array:
                check_header(path, array)
            return array_tensor(path, content[name])
    except InputError:
        raise
    except Exception as error:  # on damaged files numpy raises anything
        reason = str(error).split("\n", 1)[0][:120] or type(error).__name__
        raise InputError(f"{path} cannot be read as an array of numbers ({reason}).") from None


def array_tensor(path: Path, array: "np.ndarray[Any, Any]") -> Tensor:
    """Return the tensor of an array in any byte order."""
    try:
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        # torch warns of read-only arrays
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError:
        raise InputError(f"{path} cannot be read as an array of numbers (it holds {array.dtype}).") from None


def check_member(path: Path, member: zipfile.ZipInfo) -> None:
    """Refuse an archive member that exceeds memory, or is compressed beyond belief."""
    check_packed(path, member.file_size, member.compress_size)


def check_header(path: Path, file: IO[bytes]) -> None:
    """Refuse an array whose header declares more than memory holds, before it is allocated."""
    read = _HEADERS.get(np.lib.format.read_magic(file))
    if read is not None:  # else numpy reports what is wrong
        shape, _, kind = read(file)
        require_memory(math.prod(shape) * kind.itemsize, f"{path}: an array of shape {shape}")
