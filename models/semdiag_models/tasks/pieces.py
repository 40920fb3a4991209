"""Cutting text into pieces with SentencePiece, which is imported only here and only when it is needed."""

import io
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semdiag_models.errors import InputError, unknown_name

TOKENIZERS = {
    "unigram": "the likeliest cut under a unigram model of pieces",
    "bpe": "byte-pair encoding: the commonest neighbours are merged",
}
_LARGEST_VOCABULARY = 99_999  # and PAD: what a model may have
_LONGEST_LINE = 4192  # bytes; SentencePiece's default, below which raising it changes nothing
_LINES_AT_ONCE = 10_000  # python's lists of numbers are ten times the size of tensors


class Pieces(NamedTuple):
    """Lines as piece ids, one after the other."""

    ids: Tensor  # (sum of lengths,) int32
    lengths: Tensor  # (lines,) int64, pieces per line


def train_tokenizer(lines: list[str], kind: str, vocabulary: int) -> bytes:
    """Train a SentencePiece model: all settings are the library's but kind, size and one thread."""
    if kind not in TOKENIZERS:
        raise unknown_name("tokenizer", kind, TOKENIZERS)
    if not 3 <= vocabulary <= _LARGEST_VOCABULARY:
        raise InputError(f"--vocabulary must lie in 3 … {_LARGEST_VOCABULARY}. Got {vocabulary}.")
    model = io.BytesIO()
    longest = max(len(line.encode()) for line in lines)
    library = _sentencepiece()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=vocabulary,
            max_sentence_length=max(_LONGEST_LINE, longest + 1),  # longer lines would be left out
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise InputError(_refusal(str(error), vocabulary)) from None
    return model.getvalue()


def encode(model: bytes, vocabulary: int, lines: list[str]) -> Pieces:
    """Cut lines into pieces; no begin or end marks are added."""
    library = _sentencepiece()
    try:
        processor = library.SentencePieceProcessor(model_proto=model)
        found = processor.vocab_size()
    except RuntimeError:
        raise InputError("The stored tokenizer is damaged: SentencePiece cannot read it.") from None
    if found != vocabulary:
        raise InputError(f"The stored tokenizer is damaged: it has {found} pieces, not {vocabulary}.")
    ids: list[Tensor] = []
    lengths: list[int] = []
    for first in range(0, len(lines), _LINES_AT_ONCE):
        encoded = processor.encode(lines[first : first + _LINES_AT_ONCE], out_type=int, num_threads=1)
        lengths += map(len, encoded)
        ids.append(torch.tensor([i for line in encoded for i in line], dtype=torch.int32))
    return Pieces(torch.cat(ids), torch.tensor(lengths, dtype=torch.int64))


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise InputError(
            "Text needs the package sentencepiece, which is not installed: pip install sentencepiece"
        ) from None
    return sentencepiece


def _refusal(message: str, vocabulary: int) -> str:
    """Return sentencePiece's refusal of a vocabulary in our words."""
    if most := re.search(r"to a value <= (\d+)", message):
        return f"--vocabulary {vocabulary} is more than this text supports. Use --vocabulary {most[1]} or less."
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return (
            f"--vocabulary {vocabulary} is less than the {least[1]} this text needs for its characters alone. "
            f"Use --vocabulary {least[1]} or more."
        )
    return f"SentencePiece cannot learn pieces from this text ({message.splitlines()[0]})."
