"""Language modelling: predict the next piece of a text."""

import base64
import binascii
import hashlib
import io
import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from semdiag_models.config import TextSource
from semdiag_models.reading import LARGEST_TEXT, InputError, read_bytes
from semdiag_models.tasks.expressions import Pieces, encode, train_tokenizer
from semdiag_models.tasks.task import Recipe, Samples


def read_lines(path: Path) -> tuple[list[str], str]:
    """Read the lines of a UTF-8 file, stripped, without the blank ones."""
    content = read_bytes(path, LARGEST_TEXT)
    if b"\0" in content:
        raise InputError(f"{path} is not a text: it holds zero bytes. Name a UTF-8 text file.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not UTF-8: byte {content[error.start]:#04x} in line {line}. "
            "Convert it, for instance with: iconv -f latin1 -t utf-8."
        ) from None
    stripped = (line.strip() for line in io.StringIO(text, newline=None))
    lines = [line for line in stripped if line]
    if not lines:
        raise InputError(f"{path} is empty: there is no line with text in it.")
    return lines, hashlib.sha256(content).hexdigest()


def split_lines(path: Path, lines: list[str]) -> tuple[list[str], list[str]]:
    """Split training and held-out lines: the last tenth, and at least one line, is held out."""
    if len(lines) < 2:
        raise InputError(
            f"{path} has one line; the last tenth of the lines is held out, so two are needed at least. "
            "Break the text into lines, or name a second file with --holdout-text."
        )
    held_out = max(1, len(lines) // 10)
    return lines[:-held_out], lines[-held_out:]


class Text:
    """The task of naming the piece after C consecutive pieces of a line."""

    name = "text"
    summary = "the next piece of any UTF-8 text file"

    def __init__(self, source: TextSource, window: int | None = None) -> None:
        self.source = source
        self._window = window

    @property
    def classes(self) -> int:
        """Number of pieces, each of which may come next."""
        return self.source.vocabulary

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, PAD included."""
        return self.source.vocabulary + 1

    @cached_property
    def recipe(self) -> Recipe:
        """The paper's smallest model of Penn Treebank, on all windows of the text."""
        train, holdout = self._pieces()
        window = self._window if self._window is not None else int(train.lengths.double().mean())
        if window < 1:
            raise InputError(f"The lines of {self.source.file} are too short: fewer than one piece on average.")
        return Recipe(
            length=window,
            epochs=50,
            blocks=8,
            learning_rate=1.0,
            learning_rate_decay=0.99,
            width=32,
            mlp_width=128,
            head_width=32,
            batch_size=128,
            train_samples=self._count(train, window, self.source.file),
            holdout_samples=self._count(holdout, window, self.source.holdout_file or "the held-out lines"),
        )

    def draw(self, train: int, holdout: int, length: int, generator: torch.Generator) -> tuple[Samples, Samples]:
        """Draw windows without replacement, in random order; see :meth:`Classification.draw`."""
        there = self._pieces()
        names = self.source.file, self.source.holdout_file or "the held-out lines"
        drawn = []
        for pieces, n, name in zip(there, (train, holdout), names, strict=True):
            total = self._count(pieces, length, name)
            if n > total:
                raise InputError(f"{name} has {total} windows of {length} pieces; {n} were asked for.")
            drawn.append(windows(pieces, length, torch.randperm(total, generator=generator)[:n]))
        return drawn[0], drawn[1]

    def draw_from(self, path: Path, n: int, length: int, generator: torch.Generator) -> Samples:
        """Draw windows of another text, which this text's tokenizer cuts into pieces."""
        pieces = self._encode(read_lines(path)[0])
        total = self._count(pieces, length, str(path))
        return windows(pieces, length, torch.randperm(total, generator=generator)[:n])

    def _pieces(self) -> tuple[Pieces, Pieces]:
        """Training and held-out lines in pieces, from unchanged files."""
        source = self.source
        lines = _unchanged(source.file, source.sha256)
        if source.holdout_file is None:
            train, holdout = split_lines(Path(source.file), lines)
        else:
            train, holdout = lines, _unchanged(source.holdout_file, source.holdout_sha256)
        return self._encode(train), self._encode(holdout)

    def _encode(self, lines: list[str]) -> Pieces:
        try:
            model = base64.b64decode(self.source.model, validate=True)
        except binascii.Error:
            raise InputError("The stored tokenizer is damaged: it is not base64.") from None
        return encode(model, self.source.vocabulary, lines)

    @staticmethod
    def _count(pieces: Pieces, window: int, name: str) -> int:
        total = int((pieces.lengths - window).clamp(min=0).sum())
        if not total:
            raise InputError(
                f"No line of {name} has more than {window} pieces: there is no window with a next piece. "
                "Longer lines, or training with a smaller --window, would give some."
            )
        return total


def open_text(file: Path, holdout_file: Path | None, tokenizer: str, vocabulary: int) -> TextSource:
    """Read a text and train a tokenizer on its training lines."""
    lines, sha256 = read_lines(file)
    held = read_lines(holdout_file) if holdout_file is not None else None
    train = lines if held is not None else split_lines(file, lines)[0]
    model = train_tokenizer(train, tokenizer, vocabulary)
    return TextSource(
        file=str(file),
        sha256=sha256,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        model=base64.b64encode(model).decode("ascii"),
        holdout_file=None if holdout_file is None else str(holdout_file),
        holdout_sha256=None if held is None else held[1],
    )


def windows(pieces: Pieces, length: int, chosen: Tensor) -> Samples:
    """Cut windows out of lines."""
    per_line = (pieces.lengths - length).clamp(min=0)
    # Before the first window of a line lie the pieces of earlier lines, of which some begin no window.
    without = (pieces.lengths - per_line).cumsum(0) - (pieces.lengths - per_line)
    line = torch.searchsorted(per_line.cumsum(0), chosen, right=True)
    start = chosen + without[line]
    tokens = pieces.ids.unfold(0, length, 1)[start]
    return tokens.long(), pieces.ids[start + length].long()


def perplexity(loss: float) -> float:
    """Return exp(mean cross-entropy), the number of equally likely pieces between which the model hesitates."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def unigram_perplexity(train_labels: Tensor, holdout_labels: Tensor, classes: int) -> float:
    """Return the held-out perplexity of the training labels' frequencies, each counted once more: the baseline."""
    counts = torch.bincount(train_labels.cpu(), minlength=classes).double() + 1
    return perplexity(-float((counts / counts.sum()).log()[holdout_labels.cpu()].mean()))


def _unchanged(file: str, sha256: str | None) -> list[str]:
    """Return the lines of a run's text; refuse a file that is gone or changed."""
    path = Path(file)
    if not path.exists():
        raise InputError(f"The text {file} of this run is not here. Any other text works with --inputs FILE.txt.")
    lines, found = read_lines(path)
    if found != sha256:
        raise InputError(
            f"The text {file} has changed since the run (SHA-256 {found[:8]}…, was {str(sha256)[:8]}…). "
            "It works with --inputs FILE.txt, as a new text."
        )
    return lines
