"""Models in a folder of the Hugging Face format: configuration, safetensors, tokenizer. Nothing is downloaded."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing.declared_sizes import check_sizes
from semdiag_models import InputError
from semdiag_models.reading import open_file, read_json

PREFIX = "hf:"
HEADS = "auto", "none"  # of a model: that which its configuration names, or none
_INSTALL = "pip install 'semdiag[hf]'"
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.bpe", "*.tiktoken")
# Of a text so many characters are tokenised at most: no tokenizer needs more for what the model takes.
_CHARACTERS, _MARGIN = 32, 10_000


def find_folder(spec: str) -> Path:
    """Find the folder that ``hf:DIRECTORY`` names.

    Args:
        spec: with its prefix; DIRECTORY is a path, or PACKAGE/FOLDER inside an installed package, which is
            found without being imported.

    Returns:
        A folder that holds ``config.json``.

    Raises:
        InputError: if there is none.
    """
    name = spec.removeprefix(PREFIX)
    folder = Path(name)
    package, *inside = folder.parts or ("",)
    if not folder.is_dir() and package.isidentifier():
        try:
            found = find_spec(package)
        except (ValueError, ImportError):  # of __main__, and of what is half imported
            found = None
        places = list(found.submodule_search_locations or ()) if found is not None else []
        folder = next((p for p in (Path(place, *inside) for place in places) if p.is_dir()), folder)
    if not folder.is_dir():
        raise InputError(
            f"{spec}: there is no folder {name}. Models are read from disk and never downloaded: name a folder "
            "that model.save_pretrained() wrote."
        )
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{spec}: the folder holds an adapter, not a model. Merge it first: "
            'model.merge_and_unload().save_pretrained("NEW").'
        )
    if not (folder / "config.json").exists():
        raise InputError(f"{spec}: the folder holds no config.json, so it is not a Hugging Face model.")
    for file in folder.iterdir():  # the library opens what it finds
        if not file.is_dir():
            open_file(file).close()
    read_json(folder / "config.json")
    return folder


def build(spec: str, head: str = "auto") -> tuple[nn.Module, str, dict[str, str]]:
    """Build the model that a folder describes, with its weights, offline.

    Weights are read from safetensors only, and code that comes with a model is never run.

    Args:
        spec: ``hf:DIRECTORY``.
        head: ``auto`` builds the class that ``architectures`` in its configuration names, with its head; where the
            library knows none of that name, and with ``none``, what ``AutoModel`` builds: the body.

    Returns:
        The model in evaluation mode, the SHA-256 of its weight files, and the versions of what read it.

    Raises:
        InputError: if transformers is absent, the folder is no such model, its kind needs code of its own, its
            weights are damaged or incomplete.
    """
    folder = find_folder(spec)
    transformers = _transformers(spec)
    config = read_json(folder / "config.json")
    weights = _weights_of(spec, folder, config)
    kind = _class_of(transformers, config, head)
    with _silent(transformers):
        check_sizes(spec, config, weights, kind)
        try:
            model, report = kind.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # the library raises what its readers stumble over
            raise InputError(f"{spec} cannot be loaded ({_first_line(error)}).") from error
    _check_complete(spec, report, model)
    return model.eval(), _sha256(weights), {"transformers": str(transformers.__version__)}


def _weights_of(spec: str, folder: Path, config: Any) -> list[Path]:
    """The files of the weights; what is there instead of them, or missing, is named."""
    packed = config.get("quantization_config") if isinstance(config, dict) else None
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, dict) else None
        raise InputError(
            f"{spec}: its weights are packed ({method or 'quantization_config'}), and what is packed is not read. "
            "Load it with its own library, model.dequantize(), delete config.quantization_config, and save it."
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        other = next(iter(sorted((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))), None)
        if other is None:
            raise InputError(
                f"{spec} holds no .safetensors file; other formats are not read. Write one with: "
                "model.save_pretrained(DIRECTORY)."
            )
        raise InputError(
            f"{spec} holds no .safetensors file, but {other.name}, which may hold code and is not read. If "
            f'you trust it: AutoModel.from_pretrained("{spec.removeprefix(PREFIX)}").save_pretrained("NEW").'
        )
    index = folder / "model.safetensors.index.json"
    places = read_json(index).get("weight_map") if index.exists() else None
    named = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{spec} lacks {missing[0]}{more} of the {len(named)} files of its weights: copy the whole folder."
        )
    return weights


class Tokeniser:
    """A function from texts to a model's input: a dictionary of tensors (N, L), padded and cut to its longest.

    Args:
        spec: for messages.
        tokenizer: of transformers. One without a token for padding pads with 0, which the mask leaves out.
        model: an encoder–decoder gets the same texts, shifted, as decoder input.
        most: tokens at which texts are cut, if the model takes more; None: what it takes.

    Attributes:
        longest: how many tokens a text keeps at most; None if nothing says so.
        takes: how many the model takes; None if nothing says so.
    """

    def __init__(self, spec: str, tokenizer: Any, model: nn.Module, most: int | None = None) -> None:
        self.takes = _longest(tokenizer, model)
        self.longest = min((n for n in (self.takes, most) if n is not None), default=None)
        self._spec, self._tokenizer, self._config = spec, tokenizer, getattr(model, "config", None)
        self._known = _vocabulary(model)

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """The model's input.

        Raises:
            InputError: if the tokenizer fails or is another model's, a text has no token, or an encoder–decoder
                does not say how its decoder begins.
        """
        cut = {"truncation": self.longest is not None, "max_length": self.longest}
        if self._tokenizer.pad_token is None:
            left = self._tokenizer.padding_side == "left"
            found = _padded(self._tokens(texts, return_attention_mask=True, **cut), left)
        else:
            found = self._tokens(texts, return_tensors="pt", padding=True, **cut)
        self._check(texts, found)
        return _with_decoder(self._spec, found, self._config)

    def _check(self, texts: Sequence[str], found: dict[str, Tensor]) -> None:
        ids = found["input_ids"]
        kept = found.get("attention_mask", torch.ones_like(ids)).bool()
        if not ids.shape[1] or not bool(kept.any(1).all()):
            empty = 0 if not ids.shape[1] else int((~kept.any(1)).nonzero()[0])
            raise InputError(f"{self._spec}: its tokenizer finds no token in the text {texts[empty][:40]!r}.")
        largest = int(ids[kept].max())
        if self._known is not None and largest >= self._known:
            raise InputError(
                f"{self._spec}: its tokenizer gives the token id {largest}, and the model has {self._known} "
                "tokens: it is another model's. Name its own with --tokenizer DIR."
            )

    def mask(self, ids: Tensor, seed: int, share: float = 0.15) -> tuple[Tensor, Tensor] | None:
        """Mask some of the tokens, as masked-language models are trained.

        Args:
            ids: (B, L).
            seed: of the choice.
            share: of the tokens that are no special ones; at least one of each sample.

        Returns:
            The ids with the token for masks, and (B, L) labels: the ids at these places, -100 elsewhere. None
            where the tokenizer has no token for masks.
        """
        token = self._tokenizer.mask_token_id
        if token is None:
            return None
        special = torch.isin(ids, torch.tensor(self._tokenizer.all_special_ids))
        drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(special, 2.0)
        count = ((~special).sum(1) * share).round().clamp(min=1).long()
        chosen = (drawn.argsort(1).argsort(1) < count[:, None]) & ~special
        return ids.masked_fill(chosen, token), ids.masked_fill(~chosen, -100)

    def cut(self, texts: Sequence[str]) -> int:
        """How many of the texts are longer than the model takes."""
        if self.longest is None:
            return 0
        return sum(len(ids) > self.longest for ids in self._tokens(texts)["input_ids"])

    def _tokens(self, texts: Sequence[str], **how: Any) -> dict[str, Any]:
        import transformers

        most = None if self.longest is None else _CHARACTERS * self.longest + _MARGIN
        try:
            with _silent(transformers):
                return dict(self._tokenizer([text[:most] for text in texts], **how))
        except Exception as error:  # a configuration that says what no tokenizer can do
            raise InputError(f"{self._spec}: its tokenizer cannot be used ({_first_line(error)}).") from error


def tokeniser(
    spec: str, model: nn.Module, tokenizer_folder: Path | None = None, most: int | None = None
) -> Tokeniser:
    """Find what makes inputs of texts.

    Args:
        spec: ``hf:DIRECTORY``, with the tokenizer's files.
        model: from :func:`build`.
        tokenizer_folder: that of another tokenizer; None: the model's.
        most: tokens at which texts are cut; None: what the model takes.

    Returns:
        A function from texts to the model's input.

    Raises:
        InputError: if the folder holds no tokenizer.
    """
    transformers = _transformers(spec)
    folder = find_folder(spec) if tokenizer_folder is None else tokenizer_folder
    if tokenizer_folder is not None:
        spec = str(tokenizer_folder)
        if not folder.is_dir():
            raise InputError(f"--tokenizer takes a folder with a tokenizer's files. There is no folder {folder}.")
        for file in folder.iterdir():  # the library opens what it finds
            if not file.is_dir():
                open_file(file).close()
    instead = "Give token ids with --inputs FILE.pt."
    if not any(file for pattern in _VOCABULARIES for file in folder.glob(pattern)):
        # The library would make up a tokenizer to which every word is unknown.
        raise InputError(f"{spec} holds no tokenizer: none of {', '.join(_VOCABULARIES)}. {instead}")
    with _silent(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise InputError(f"{spec}: its tokenizer cannot be used ({_first_line(error)}). {instead}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return Tokeniser(spec, tokenizer, model, most)


def _transformers(spec: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError(f"{spec} needs the library transformers. Install it with: {_INSTALL}.") from None
    return transformers


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Without the library's progress bars and reports; its settings are restored."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _class_of(transformers: Any, named: Any, head: str) -> Any:
    """Return the class of the library that a configuration names, else ``AutoModel``."""
    listed = named.get("architectures") if isinstance(named, dict) else None
    name = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""
    kind: Any = getattr(transformers, name, None) if head == "auto" and name.isidentifier() else None
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    own = known and getattr(kind.config_class, "model_type", None) == named.get("model_type")
    return kind if own else transformers.AutoModel


def _check_complete(spec: str, report: dict[str, Any], model: nn.Module) -> None:
    """Refuse a model part of which would be random; of a body the pooler, which comes last, may be."""
    headless = getattr(model, "base_model", model) is model
    names = sorted(str(name) for name in report["missing_keys"])
    missing = [name for name in names if not (headless and "pooler" in name)]
    if not missing:
        return
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    body = [name for name in missing if headless or name.startswith(prefix)]
    if body and not all("pooler" in name for name in body):
        raise InputError(
            f"{spec} lacks {len(missing)} of the model's parameters ({body[0]}): they would be random, so "
            "measurements would mean nothing."
        )
    said = f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
    raise InputError(
        f"{spec} lacks {len(missing)} parameters of the head of {type(model).__name__} ({said}): its predictions "
        "would be random. To measure the model without a head: --head none."
    )


def _vocabulary(model: nn.Module) -> int | None:
    """Rows of the table in which a model looks its tokens up; None where it does not say which that is."""
    named = getattr(model, "get_input_embeddings", None)
    try:
        table = named() if callable(named) else None
    except Exception:  # of some kinds of models the library has none, and says so in its own way
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _longest(tokenizer: Any, model: nn.Module) -> int | None:
    """Tokens that the model takes at most; None if nothing says so."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    known = (tokenizer.model_max_length, positions)
    limits = [n for n in known if isinstance(n, int) and 0 < n < 10**9]
    for name, part in model.named_modules():
        counted = isinstance(part, nn.Embedding) and "position" in name and part.num_embeddings == positions
        if counted and part.padding_idx is not None:  # of RoBERTa's kind: they begin behind that of padding
            limits.append(positions - part.padding_idx - 1)
    return min(limits, default=None)


def _padded(found: dict[str, list[list[int]]], left: bool) -> dict[str, Tensor]:
    """Lists of unequal length as tensors, filled up with zeros, also in the mask."""
    longest = max(map(len, found["input_ids"]))

    def filled(row: list[int]) -> list[int]:
        zeros = [0] * (longest - len(row))
        return zeros + row if left else row + zeros

    return {name: torch.tensor([filled(row) for row in rows]) for name, rows in found.items()}


def _with_decoder(spec: str, batch: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    if getattr(config, "is_encoder_decoder", False) is not True:
        return batch
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    start = next((number for number in named if isinstance(number, int)), None)
    if start is None:
        raise InputError(f"{spec}: its config.json does not say how its decoder begins (decoder_start_token_id).")
    ids = batch["input_ids"]
    first = ids.new_full((len(ids), 1), start)
    shifted = {"decoder_input_ids": torch.cat([first, ids[:, :-1]], 1)}
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        shifted["decoder_attention_mask"] = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)
    return batch | shifted


def _sha256(files: Sequence[Path]) -> str:
    """Of the files' content, one after the other; of one file it is that file's."""
    digest = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}"
