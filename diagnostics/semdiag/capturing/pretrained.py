"""Models in Hugging Face folders: size checks, configuration, safetensors, tokenizer. Nothing is downloaded."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from semdiag_files import InputError, counted, open_file, read_json

_LARGEST_HEADER = 16 * 2**20  # bytes, enough for 100,000 tensors
_FACTOR = 3  # allowance for tied weights, which count twice
_MORE = 10**7  # and for heads and poolers
_NUMBERS = {"F64", "F32", "F16", "BF16", "C64", "C128", "I64", "BOOL"}  # of each element a number or a position
_WHOLE = {"U8", "I16", "U16", "I32", "U32", "U64"}  # of packed numbers, or of masks and positions in buffers
_PACKED = "weight", "blocks", "W_q", "qdata", "qzeros"  # parts of the names of packed weights
_FEW = 1000  # layers or labels up to which a configuration is never suspicious


class _TooLargeError(Exception):
    """Raised once a model has more parameters than its files can hold."""


def check_sizes(spec: str, folder: Path, config: Any, weights: Sequence[Path], kind: Any) -> None:
    """Refuse a configuration that describes a far larger model than its files hold."""
    held = [shape for path in weights for shape in _shapes(path)]
    elements = sum(map(math.prod, held))
    if not held or not isinstance(config, dict):
        return  # the library reports what is wrong
    _check_numbers(spec, config, len(held), elements)
    allowed = _FACTOR * elements + _MORE
    made = 0

    def count(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal made
        made += 0 if parameter is None else parameter.numel()
        if made > allowed:
            raise _TooLargeError

    hook = register_module_parameter_registration_hook(count)
    try:
        transformers = transformers_for(spec)
        auto = transformers.AutoModel
        places = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(folder, **places)
        with torch.device("meta"):
            (kind.from_config if kind is auto else kind)(config)
    except _TooLargeError:
        raise InputError(
            f"{spec}: its config.json describes a model of more than {allowed:,} parameters, but its files hold "
            f"{counted(elements, 'number')}. They are not of one model."
        ) from None
    except Exception:  # loading will report it
        return
    finally:
        hook.remove()


def _check_numbers(spec: str, config: dict[str, Any], tensors: int, elements: int) -> None:
    """Refuse more layers than tensors, or more labels than numbers."""
    for name, value in _numbers(config):
        if "layer" in name or "block" in name:
            limit = tensors
        elif name == "num_labels":
            limit = elements
        else:
            continue
        if value > max(_FEW, limit):
            raise InputError(
                f"{spec}: its config.json says {name} = {value:.3g}, but its files hold "
                f"{counted(tensors, 'tensor')} with {counted(elements, 'number')}. They are not of one model."
            )


def quantised_tensor(weights: Sequence[Path]) -> str:
    """Return the name and declared type of a tensor of packed or scaled numbers; empty if there is none."""
    for path in weights:
        for name, entry in _header(path).items():
            kind = str(entry.get("dtype"))
            short = name.rsplit(".", 1)[-1]
            if kind not in _NUMBERS and (kind not in _WHOLE or any(part in short for part in _PACKED)):
                return f"{name} of type {kind}"
    return ""


def _shapes(path: Path) -> list[tuple[int, ...]]:
    """Return the shapes in a safetensors header; none for a damaged file, which the library reports."""
    try:
        shapes = [tuple(entry["shape"]) for entry in _header(path).values()]
    except (KeyError, TypeError):
        return []
    # A shape is whole numbers whose product a file can address.
    valid = all(type(length) is int and length >= 0 for shape in shapes for length in shape)
    return shapes if valid and all(math.prod(shape) < 2**63 for shape in shapes) else []


def _header(path: Path) -> dict[str, dict[str, Any]]:
    with open_file(path) as file:
        try:
            header = read_header(path, file)
            header.pop("__metadata__", None)
            return dict(header) if all(isinstance(entry, dict) for entry in header.values()) else {}
        except InputError:
            raise
        except (ValueError, RecursionError, AttributeError, TypeError):
            return {}


def read_header(path: Path, file: BufferedReader) -> Any:
    """Read the header at the beginning of a safetensors file."""
    size = int.from_bytes(file.read(8), "little")
    if size > _LARGEST_HEADER and size < os.fstat(file.fileno()).st_size:
        raise InputError(
            f"{path}: its header has {size:,} bytes; that of a safetensors file has up to {_LARGEST_HEADER:,}."
        )
    if not 0 < size <= _LARGEST_HEADER:
        raise ValueError(f"not a safetensors file: its header would have {size:,} bytes")
    return json.loads(file.read(size))


def _numbers(config: dict[str, Any], depth: int = 5) -> list[tuple[str, int]]:
    numbers = [(name, value) for name, value in config.items() if isinstance(value, int)]
    inner = [value for value in config.values() if isinstance(value, dict)] if depth else []
    return numbers + [pair for value in inner for pair in _numbers(value, depth - 1)]


PREFIX = "hf:"
HEADS = "auto", "none"  # the configured head, or the body alone
_OTHER_WEIGHTS = "pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack"
_TOKENIZER_FILES = "*token*", "vocab*", "spiece.model", "*.spm"
_INSTALL = "pip install transformers"


def find_folder(spec: str) -> Path:
    """Find the folder that ``hf:PATH`` names."""
    name = spec.removeprefix(PREFIX)
    folder = Path(name)
    package, *inside = folder.parts or ("",)
    if not folder.is_dir() and package.isidentifier():
        with suppress(ValueError, ImportError):  # for __main__, or a package that is being imported
            installed = find_spec(package)
            places = [] if installed is None else list(installed.submodule_search_locations or ())
            folder = next((p for p in (Path(place, *inside) for place in places) if p.is_dir()), folder)
    if not folder.is_dir():
        why = f"there is no folder {name}"
        if folder.is_file():
            why = f"{name} is a file in the folder hf:{folder.parent}"
        raise InputError(f"{spec}: {why}. Models are read from disk and never downloaded. {_advice(name)}")
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{spec}: the folder holds an adapter, not a model. Merge it first: "
            'model.merge_and_unload().save_pretrained("NEW").'
        )
    if not (folder / "config.json").exists():
        raise InputError(f"{spec}: the folder holds no config.json, so it is not a Hugging Face model.")
    check_files(folder)
    read_json(folder / "config.json")
    return folder


def hint_of_hub(name: str) -> str:
    """Return how to fetch a model of the Hub whose name this may be; empty if it is none: "gpt2", "org/name"."""
    owner, _, repository = name.rpartition("/")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}", repository) or Path(owner or "nowhere").exists():
        return ""
    if owner and not re.fullmatch(r"[A-Za-z0-9][\w-]{0,95}", owner):
        return ""
    fetching = f"hf download {name} --local-dir {repository}"
    return f" A model of the Hub is fetched by: {fetching}; then name hf:{repository}."


def check_files(folder: Path) -> None:
    """Refuse a folder with anything but regular files among those that the library opens."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if not file.is_dir():
            open_file(file).close()


def _advice(name: str) -> str:
    """Return what would work in place of a folder that is not there."""
    with suppress(ImportError, OSError, ValueError):
        from huggingface_hub import snapshot_download

        return f"Name its copy in the cache, hf:{snapshot_download(name, local_files_only=True)}."
    hint = hint_of_hub(name)
    return hint.lstrip() or "Name a folder that model.save_pretrained() or hf download --local-dir wrote."


def load_pretrained(spec: str, head: str = "auto") -> tuple[nn.Module, str, dict[str, str]]:
    """Build the model that a folder describes, with its weights, offline."""
    folder = find_folder(spec)
    transformers = transformers_for(spec)
    config = read_json(folder / "config.json")
    kind = _class_of(transformers, config, head)
    weights = _weights_of(spec, folder, config, _class_of(transformers, config, "auto"))
    packed = quantised_tensor(weights)
    if packed:
        raise InputError(
            f"{spec}: its weights are quantised ({packed}), and such files are not read. Load it with its own "
            "library, model.dequantize(), and save it."
        )
    with silent(transformers):
        check_sizes(spec, folder, config, weights, kind)
        try:
            offline = {"local_files_only": True, "trust_remote_code": False}
            config = transformers.AutoConfig.from_pretrained(folder, **offline)
            for part in (config, *vars(config).values()):
                if isinstance(part, transformers.PreTrainedConfig):
                    vars(part).pop("quantization_config", None)  # a record of quantised weights
            model, report = kind.from_pretrained(
                folder, config=config, use_safetensors=True, output_loading_info=True, **offline
            )  # fmt: skip
        except Exception as error:  # the library's readers raise anything
            raise InputError(f"{spec} cannot be loaded ({first_line(error)}).") from error
    _check_complete(spec, report, model)
    return model.eval(), _sha256(weights), {"transformers": str(transformers.__version__)}


_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def _weights_of(spec: str, folder: Path, config: Any, kind: type) -> list[Path]:
    """Return the files from which the library reads the weights, all inside the folder."""
    first = config.get("transformers_weights") if isinstance(config, dict) else None
    if first is None:
        first = next((name for name in (_SINGLE_FILE, _INDEX) if (folder / name).is_file()), None)
    if first is None:
        raise _without_weights(spec, folder, kind)
    names = [first]
    if isinstance(first, str) and first.endswith(".safetensors.index.json"):
        names = _names_in(_inside(spec, folder, first))
    weights = [_inside(spec, folder, name) for name in names]
    missing = [name for name, file in zip(names, weights, strict=True) if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{spec} lacks {missing[0]}{more} of the {counted(len(names), 'file')} of its weights: copy the whole "
            "folder."
        )
    for file in weights:
        open_file(file).close()
    return weights


def _names_in(index: Path) -> list[str]:
    """Return the names of the files in an index of weights."""
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{index} is no index of weights: it has no weight_map from parameters to files.")
    return sorted(set(places.values()))


def _inside(spec: str, folder: Path, name: object) -> Path:
    """Return the path of a file of weights; refuse a name that leads out of the folder, or of another format."""
    within = isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
    if not within or not str(name).endswith((".safetensors", ".safetensors.index.json")):
        shown = " ".join(repr(name).split())[:120]
        raise InputError(
            f"{spec}: its weights would be read from {shown}. They must be .safetensors files inside its folder."
        )
    return folder / str(name)


def _without_weights(spec: str, folder: Path, kind: type) -> InputError:
    """Return the error for a folder without weights, which says what is there instead."""
    ways = "the library reads model.safetensors, or the files that model.safetensors.index.json names"
    unread = sorted(folder.glob("*.safetensors"))
    if unread:
        return InputError(f"{spec} holds {unread[0].name}, but {ways}.")
    weights = next((file for end in _OTHER_WEIGHTS for file in sorted(folder.glob(end))), None)
    if weights is None:
        return InputError(
            f"{spec} holds no .safetensors file; other formats are not read. Write one with: "
            "model.save_pretrained(DIRECTORY)."
        )
    if not weights.name.startswith("pytorch_model"):
        return InputError(
            f"{spec} holds no .safetensors file, but {weights.name}, which is not read. Load it with its own "
            "library, and write the model, in plain numbers, with: model.save_pretrained(DIRECTORY)."
        )
    classes = [kind.__name__]
    if any(map(any, map(folder.glob, _TOKENIZER_FILES))):
        classes.append("AutoTokenizer")
    copies = "; ".join(f'{name}.from_pretrained({str(folder)!r}).save_pretrained("NEW")' for name in classes)
    return InputError(
        f"{spec} holds no .safetensors file, but {weights.name}, which may hold code and is not read. If "
        f"you trust it, write a copy in Python: from transformers import {', '.join(classes)}; {copies}"
    )


def transformers_for(spec: str) -> Any:
    """Return the transformers library; refuse if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise InputError(f"{spec} needs the library transformers. Install it with: {_INSTALL}.") from None
    return transformers


@contextmanager
def silent(transformers: Any) -> Iterator[None]:
    """Silence the library's progress bars and reports; restore its settings afterwards."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _class_of(transformers: Any, named: Any, head: str) -> Any:
    listed = named.get("architectures") if isinstance(named, dict) else None
    name = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""
    kind: Any = getattr(transformers, name, None) if head == "auto" and name.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return transformers.AutoModel
    config_class = getattr(kind, "config_class", None)
    same_type = getattr(config_class, "model_type", None) == named.get("model_type")
    return kind if same_type else transformers.AutoModel


def _check_complete(spec: str, report: dict[str, Any], model: nn.Module) -> None:
    """Refuse a model with random weights, except for the pooler of a body."""
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
    shown = ", ".join([*missing[:3], "…"] if len(missing) > 3 else missing)
    raise InputError(
        f"{spec} lacks {len(missing)} parameters of the head of {type(model).__name__} ({shown}): its predictions "
        "would be random. To measure the model without a head: --head none."
    )


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """Return an error's type and text on one line of at most about 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
