"""Turn texts into a model's input with the tokenizer of a Hugging Face folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.pretrained import check_files, find_folder, first_line, silent, transformers_for
from semdiag_models import InputError

_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.bpe", "*.tiktoken")
# At most so many characters per token, plus a margin, are tokenised: no tokenizer needs more.
_CHARACTERS, _MARGIN = 32, 10_000
_UNKNOWN = "\ufffd"  # what decoders write for invalid bytes


class Tokeniser:
    """Turns texts into a model's input: a dictionary of tensors (N, L), padded, and cut to the limit."""

    def __init__(self, spec: str, tokenizer: Any, model: nn.Module, most: int | None = None) -> None:
        self.takes = _longest(tokenizer, model)
        self.longest = min((n for n in (self.takes, most) if n is not None), default=None)
        self._spec, self._tokenizer, self._config = spec, tokenizer, getattr(model, "config", None)
        self._known = _vocabulary(model)
        if getattr(self._config, "summary_type", None) != "last":
            tokenizer.padding_side = "right"

    def __call__(self, texts: Sequence[str], targets: bool = False) -> dict[str, Tensor]:
        """Return the model's input."""
        cut: dict[str, Any] = {
            "truncation": self.longest is not None,
            "max_length": self.longest,
            "targets": targets,
        }
        if self._tokenizer.pad_token is None:
            left = self._tokenizer.padding_side == "left"
            batch = _padded(self._tokens(texts, return_attention_mask=True, **cut), left)
        else:
            batch = self._tokens(texts, return_tensors="pt", padding=True, **cut)
        self._check(texts, batch)
        return _with_decoder(self._spec, batch, self._config)

    def _check(self, texts: Sequence[str], batch: dict[str, Tensor]) -> None:
        ids = batch["input_ids"]
        kept = batch.get("attention_mask", torch.ones_like(ids)).bool()
        if not ids.shape[1] or not bool(kept.any(1).all()):
            empty = 0 if not ids.shape[1] else int((~kept.any(1)).nonzero()[0])
            raise InputError(f"{self._spec}: its tokenizer makes no token of the text {texts[empty][:40]!r}.")
        largest = int(ids[kept].max())
        if self._known is not None and largest >= self._known:
            raise InputError(
                f"{self._spec}: its tokenizer gives the token id {largest}, but the model has {self._known} "
                "tokens: it is another model's tokenizer. Name the right one with --tokenizer DIR."
            )

    def mask(self, ids: Tensor, seed: int, share: float = 0.15) -> tuple[Tensor, Tensor] | None:
        """Mask some of the tokens, as masked-language models are trained."""
        token = self._tokenizer.mask_token_id
        if token is None:
            return None
        special = torch.isin(ids, torch.tensor(self._tokenizer.all_special_ids))
        drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(special, 2.0)
        count = ((~special).sum(1) * share).round().clamp(min=1).long()
        chosen = (drawn.argsort(1).argsort(1) < count[:, None]) & ~special
        return ids.masked_fill(chosen, token), ids.masked_fill(~chosen, -100)

    def cut(self, texts: Sequence[str]) -> int:
        """Return how many of the texts are longer than the limit."""
        if self.longest is None:
            return 0
        return sum(len(ids) > self.longest for ids in self._tokens(texts)["input_ids"])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of single tokens; for part of a character, the token's name in the vocabulary."""
        import transformers

        try:
            with silent(transformers):
                texts = [str(self._tokenizer.decode([each], clean_up_tokenization_spaces=False)) for each in ids]
                names = self._tokenizer.convert_ids_to_tokens(list(ids))
        except Exception as error:  # a configuration that says what no tokenizer can do
            raise InputError(f"{self._spec}: its tokenizer cannot be used ({first_line(error)}).") from error
        known = [str(each if name is None else name) for each, name in zip(ids, names, strict=True)]
        return [text if text and _UNKNOWN not in text else name for text, name in zip(texts, known, strict=True)]

    def _tokens(self, texts: Sequence[str], targets: bool = False, **how: Any) -> dict[str, Any]:
        import transformers

        most = None if self.longest is None else _CHARACTERS * self.longest + _MARGIN
        cut = [text[:most] for text in texts]
        try:
            with silent(transformers):
                return dict(self._tokenizer(text_target=cut, **how) if targets else self._tokenizer(cut, **how))
        except Exception as error:  # a configuration that says what no tokenizer can do
            raise InputError(f"{self._spec}: its tokenizer cannot be used ({first_line(error)}).") from error


def read_tokenizer(spec: str, tokenizer_folder: Path | None = None) -> Any:
    """Read a tokenizer of transformers; one without a token for padding pads with another, if it has one."""
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
    with silent(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise InputError(f"{spec}: its tokenizer cannot be used ({first_line(error)}). {instead}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer's files."""
    return any(file for pattern in _VOCABULARIES for file in folder.glob(pattern))


def _vocabulary(model: nn.Module) -> int | None:
    """Return the rows of a model's token embedding; None if the model does not say which table that is."""
    named = getattr(model, "get_input_embeddings", None)
    try:
        table = named() if callable(named) else None
    except Exception:  # some models have none, and raise anything
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _longest(tokenizer: Any, model: nn.Module) -> int | None:
    """Return the number of tokens that the model takes at most; None if nothing says so."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    known = (tokenizer.model_max_length, positions)
    limits = [n for n in known if isinstance(n, int) and 0 < n < 10**9]
    for name, part in model.named_modules():
        counted = isinstance(part, nn.Embedding) and "position" in name and part.num_embeddings == positions
        if counted and part.padding_idx is not None:  # as in RoBERTa: they begin after padding's
            limits.append(positions - part.padding_idx - 1)
    return min(limits, default=None)


def _padded(rows_by_name: dict[str, list[list[int]]], left: bool) -> dict[str, Tensor]:
    """Turn lists of unequal length into tensors, padded with zeros, in the mask too."""
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
