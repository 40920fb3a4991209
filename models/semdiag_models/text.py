"""Language modelling: predict the next piece of a text."""

import base64
import binascii
import hashlib
import io
import math
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semdiag_files import LARGEST_TEXT, InputError, read_bytes, unknown_name
from semdiag_models.config import Recipe, TextSource
from semdiag_models.listops import Samples

TOKENIZERS = "unigram", "bpe"  # the likeliest cut under a unigram model; merges of the commonest neighbours
_LARGEST_VOCABULARY = 99_999  # largest vocabulary of a model, without PAD
_LONGEST_LINE = 4192  # bytes; SentencePiece's default, below which a limit changes nothing
_LINES_AT_ONCE = 10_000  # Python's lists of numbers are ten times the size of tensors


class Pieces(NamedTuple):
    """Lines as piece ids, one after the other."""

    ids: Tensor  # (sum of lengths,) int32
    lengths: Tensor  # (lines,) int64, pieces per line


class Text:
    """The task of naming the piece after C consecutive pieces of a line."""

    name = "text"
    summary = "the next piece of any UTF-8 text file"

    def __init__(self, source: TextSource, window: int | None = None) -> None:
        self.source = source
        self._window = window
        self.classes = source.vocabulary  # each piece may come next
        self.vocabulary_size = source.vocabulary + 1
        self._names = source.file, source.holdout_file or "the held-out lines"

    @cached_property
    def recipe(self) -> Recipe:
        """The paper's smallest model of Penn Treebank, on all windows of the text."""
        pieces = self._pieces()
        window = self._window if self._window is not None else int(pieces[0].lengths.double().mean())
        if window < 1:
            raise InputError(f"The lines of {self.source.file} are too short: fewer than one piece on average.")
        counts = [_count(part, window, name) for part, name in zip(pieces, self._names, strict=True)]
        return Recipe(window, 50, 8, 1.0, 0.99, 32, 128, 32, 128, *counts)

    def draw(self, train: int, holdout: int, length: int, generator: torch.Generator) -> tuple[Samples, Samples]:
        """Draw windows without replacement, in random order: training samples, then held-out ones."""
        train_pieces, holdout_pieces = self._pieces()
        train_name, holdout_name = self._names
        samples = _draw_windows(train_pieces, train, length, train_name, generator)
        return samples, _draw_windows(holdout_pieces, holdout, length, holdout_name, generator)

    def draw_from(self, path: Path, n: int, length: int, generator: torch.Generator) -> Samples:
        """Draw windows of another text, which this text's tokenizer cuts into pieces."""
        pieces = self._encode(read_lines(path)[0])
        return _draw_windows(pieces, min(n, _count(pieces, length, str(path))), length, str(path), generator)

    def _pieces(self) -> tuple[Pieces, Pieces]:
        source = self.source
        lines = _unchanged(source.file, source.sha256)
        if source.holdout_file is None:
            train, holdout = split_lines(Path(source.file), lines)
        else:
            train = lines
            holdout = _unchanged(source.holdout_file, source.holdout_sha256)
        return self._encode(train), self._encode(holdout)

    def _encode(self, lines: list[str]) -> Pieces:
        try:
            model = base64.b64decode(self.source.model, validate=True)
        except binascii.Error:
            raise InputError("The stored tokenizer is damaged: it is not base64.") from None
        return encode(model, self.source.vocabulary, lines)


def _count(pieces: Pieces, window: int, name: str) -> int:
    total = int((pieces.lengths - window).clamp(min=0).sum())
    if total == 0:
        way = "Longer lines, or training with a smaller --window, would give some."
        raise InputError(f"No line of {name} has more than {window} pieces: no window has a next piece. {way}")
    return total


def _draw_windows(pieces: Pieces, n: int, length: int, name: str, generator: torch.Generator) -> Samples:
    """Draw windows without replacement, in random order."""
    total = _count(pieces, length, name)
    if n > total:
        raise InputError(f"{name} has {total} windows of {length} pieces; {n} were asked for.")
    return windows(pieces, length, torch.randperm(total, generator=generator)[:n])


def windows(pieces: Pieces, length: int, numbers: Tensor) -> Samples:
    """Cut windows out of lines, by their numbers."""
    per_line = (pieces.lengths - length).clamp(min=0)
    # Before the first window of a line lie the pieces of earlier lines, of which some begin no window.
    without = (pieces.lengths - per_line).cumsum(0) - (pieces.lengths - per_line)
    start = numbers + without[torch.searchsorted(per_line.cumsum(0), numbers, right=True)]
    return pieces.ids.unfold(0, length, 1)[start].long(), pieces.ids[start + length].long()


def perplexity(loss: float) -> float:
    """Return exp(mean cross-entropy), the number of equally likely pieces between which the model hesitates."""
    return math.inf if loss > 709 else math.exp(loss)  # which overflows


def unigram_perplexity(train_labels: Tensor, holdout_labels: Tensor, classes: int) -> float:
    """Return the held-out perplexity of the training labels' frequencies, each counted once more: the baseline."""
    counts = torch.bincount(train_labels.cpu(), minlength=classes).double() + 1
    return perplexity(-float((counts / counts.sum()).log()[holdout_labels.cpu()].mean()))


def open_text(file: Path, holdout_file: Path | None, tokenizer: str, vocabulary: int) -> TextSource:
    """Read a text and train a tokenizer on its training lines."""
    lines, sha256 = read_lines(file)
    holdout = (None, None) if holdout_file is None else (str(holdout_file), read_lines(holdout_file)[1])
    model = train_tokenizer(split_lines(file, lines)[0] if holdout_file is None else lines, tokenizer, vocabulary)
    return TextSource(str(file), sha256, tokenizer, vocabulary, base64.b64encode(model).decode("ascii"), *holdout)


def read_lines(path: Path) -> tuple[list[str], str]:
    """Read the lines of a UTF-8 file, stripped, without the blank ones, and the file's hash."""
    content = read_bytes(path, LARGEST_TEXT)
    if b"\0" in content:
        raise InputError(f"{path} is not a text: it holds zero bytes. Name a UTF-8 text file.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        at = f"byte {content[error.start]:#04x} in line {line}"
        way = "Convert it, for instance with: iconv -f latin1 -t utf-8."
        raise InputError(f"{path} is not UTF-8: {at}. {way}") from None
    lines = list(filter(None, map(str.strip, io.StringIO(text, newline=None))))
    if not lines:
        raise InputError(f"{path} is empty: there is no line with text in it.")
    return lines, hashlib.sha256(content).hexdigest()


def split_lines(path: Path, lines: list[str]) -> tuple[list[str], list[str]]:
    """Split training and held-out lines: the last tenth, and at least one line, is held out."""
    if len(lines) < 2:
        ways = "Break the text into lines, or name a second file with --holdout-text."
        raise InputError(f"{path} has one line; the last tenth is held out, so two are needed at least. {ways}")
    held_out = max(1, len(lines) // 10)
    return lines[:-held_out], lines[-held_out:]


def _unchanged(file: str, sha256: str | None) -> list[str]:
    way = "Any text works with --inputs FILE.txt."
    if not Path(file).exists():
        raise InputError(f"The text {file} of this run is not here. {way}")
    lines, new_sha256 = read_lines(Path(file))
    if new_sha256 != sha256:
        hashes = f"SHA-256 {new_sha256[:8]}…, was {str(sha256)[:8]}…"
        raise InputError(f"The text {file} has changed since the run ({hashes}). {way}")
    return lines


def train_tokenizer(lines: list[str], kind: str, vocabulary: int) -> bytes:
    """Train a SentencePiece model with the library's settings, except for kind, size and one thread."""
    if kind not in TOKENIZERS:
        raise unknown_name("tokenizer", kind, TOKENIZERS)
    if not 3 <= vocabulary <= _LARGEST_VOCABULARY:
        raise InputError(f"--vocabulary must lie in 3 … {_LARGEST_VOCABULARY}. Got {vocabulary}.")
    model = io.BytesIO()
    longest = max(len(line.encode()) for line in lines)
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, model_type=kind, vocab_size=vocabulary,
            max_sentence_length=max(_LONGEST_LINE, longest + 1),  # longer lines would be left out
            num_threads=1, minloglevel=3,
        )  # fmt: skip
    except RuntimeError as error:
        why = f"SentencePiece cannot learn pieces from this text ({str(error).splitlines()[0]})."
        if most := re.search(r"to a value <= (\d+)", str(error)):
            why = f"--vocabulary {vocabulary} is more than this text supports. Use --vocabulary {most[1]} or less."
        if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", str(error)):
            need = f"less than the {least[1]} this text needs for its characters alone"
            why = f"--vocabulary {vocabulary} is {need}. Use --vocabulary {least[1]} or more."
        raise InputError(why) from None
    return model.getvalue()


def encode(model: bytes, vocabulary: int, lines: list[str]) -> Pieces:
    """Cut lines into pieces, without begin and end marks."""
    try:
        processor = _sentencepiece().SentencePieceProcessor(model_proto=model)
        pieces = processor.vocab_size()
    except RuntimeError:
        raise InputError("The stored tokenizer is damaged: SentencePiece cannot read it.") from None
    if pieces != vocabulary:
        raise InputError(f"The stored tokenizer is damaged: it has {pieces} pieces, not {vocabulary}.")
    ids = list[Tensor]()
    lengths = list[int]()
    for first in range(0, len(lines), _LINES_AT_ONCE):
        encoded = processor.encode(lines[first : first + _LINES_AT_ONCE], out_type=int, num_threads=1)
        lengths += map(len, encoded)
        ids.append(torch.tensor([i for line in encoded for i in line], dtype=torch.int32))
    return Pieces(torch.cat(ids), torch.tensor(lengths, dtype=torch.int64))


def _sentencepiece() -> Any:
    try:
        return import_module("sentencepiece")
    except ImportError:
        raise InputError("Text needs sentencepiece, which is not installed: pip install sentencepiece") from None
