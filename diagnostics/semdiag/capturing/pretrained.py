"""Models in Hugging Face folders: configuration, safetensors, tokenizer. Nothing is downloaded."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from semdiag.capturing.declared_sizes import check_sizes, quantised_tensor
from semdiag_models import InputError
from semdiag_models.reading import open_file, read_json

PREFIX = "hf:"
HEADS = "auto", "none"  # the head that the configuration names, or none
_OTHER_WEIGHTS = "pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack"
_TOKENIZER_FILES = "*token*", "vocab*", "spiece.model", "*.spm"
_INSTALL = "pip install 'semdiag[hf]'"


def find_folder(spec: str) -> Path:
    """Find the folder that ``hf:DIRECTORY`` names."""
    name = spec.removeprefix(PREFIX)
    folder = Path(name)
    package, *inside = folder.parts or ("",)
    if not folder.is_dir() and package.isidentifier():
        try:
            installed = find_spec(package)
        except (ValueError, ImportError):  # for __main__, or a package that is being imported
            installed = None
        places = list(installed.submodule_search_locations or ()) if installed is not None else []
        folder = next((p for p in (Path(place, *inside) for place in places) if p.is_dir()), folder)
    if not folder.is_dir():
        raise InputError(
            f"{spec}: {_why_no_folder(folder, name)}. Models are read from disk and never downloaded: name a "
            f"folder that model.save_pretrained() or hf download --local-dir wrote{_copy_in_cache(name)}."
        )
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


def check_files(folder: Path) -> None:
    """Refuse a folder with anything but regular files among those that the library opens."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if not file.is_dir():
            open_file(file).close()


def _why_no_folder(path: Path, name: str) -> str:
    """Say what is at the path instead of a folder."""
    return f"{name} is a file in the folder hf:{path.parent}" if path.is_file() else f"there is no folder {name}"


def _copy_in_cache(name: str) -> str:
    """Name the copy of a model of the Hub in this machine's cache; empty if there is none."""
    try:
        from huggingface_hub import snapshot_download

        return f", like the copy in the cache, hf:{snapshot_download(name, local_files_only=True)}"
    except (ImportError, OSError, ValueError):
        return ""


def build(spec: str, head: str = "auto") -> tuple[nn.Module, str, dict[str, str]]:
    """Build the model that a folder describes, with its weights, offline."""
    folder = find_folder(spec)
    transformers = transformers_for(spec)
    config = read_json(folder / "config.json")
    kind = _class_of(transformers, config, head)
    weights = _weights_of(spec, folder, _class_of(transformers, config, "auto"))
    packed = quantised_tensor(weights)
    if packed:
        raise InputError(
            f"{spec}: its weights are quantised ({packed}), and such files are not read. Load it with its own "
            "library, model.dequantize(), and save it."
        )
    with silent(transformers):
        check_sizes(spec, config, weights, kind)
        try:
            model, report = kind.from_pretrained(
                folder,
                config=_plain_config(transformers, folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # the library's readers raise anything
            raise InputError(f"{spec} cannot be loaded ({first_line(error)}).") from error
    _check_complete(spec, report, model)
    return model.eval(), _sha256(weights), {"transformers": str(transformers.__version__)}


def _plain_config(transformers: Any, folder: Path) -> Any:
    """Return the folder's configuration; that its weights were quantised before they were written says nothing."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for part in (config, *vars(config).values()):
        if isinstance(part, transformers.PreTrainedConfig):
            vars(part).pop("quantization_config", None)
    return config


def _weights_of(spec: str, folder: Path, kind: type) -> list[Path]:
    """Return the weight files; if there are none or some are missing, say what is there instead."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        other = next((file for end in _OTHER_WEIGHTS for file in sorted(folder.glob(end))), None)
        if other is None:
            raise InputError(
                f"{spec} holds no .safetensors file; other formats are not read. Write one with: "
                "model.save_pretrained(DIRECTORY)."
            )
        if not other.name.startswith("pytorch_model"):
            raise InputError(
                f"{spec} holds no .safetensors file, but {other.name}, which is not read. Load it with its own "
                "library, and write the model, in plain numbers, with: model.save_pretrained(DIRECTORY)."
            )
        classes = [kind.__name__, *["AutoTokenizer"] * any(map(any, map(folder.glob, _TOKENIZER_FILES)))]
        copies = "; ".join(f'{name}.from_pretrained({str(folder)!r}).save_pretrained("NEW")' for name in classes)
        raise InputError(
            f"{spec} holds no .safetensors file, but {other.name}, which may hold code and is not read. If "
            f"you trust it, write a copy in Python: from transformers import {', '.join(classes)}; {copies}"
        )
    index = folder / "model.safetensors.index.json"
    found = read_json(index) if index.exists() else {"weight_map": {}}
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{index} is no index of weights: it has no weight_map from parameters to files.")
    named = sorted(set(places.values()))
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{spec} lacks {missing[0]}{more} of the {len(named)} files of its weights: copy the whole folder."
        )
    for name in named:
        open_file(folder / name).close()
    return weights


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
    """Return the library's class that a configuration names, else ``AutoModel``."""
    listed = named.get("architectures") if isinstance(named, dict) else None
    name = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""
    kind: Any = getattr(transformers, name, None) if head == "auto" and name.isidentifier() else None
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    own = known and getattr(kind.config_class, "model_type", None) == named.get("model_type")
    return kind if own else transformers.AutoModel


def _check_complete(spec: str, report: dict[str, Any], model: nn.Module) -> None:
    """Refuse a model whose weights would be partly random, except for the pooler of a body."""
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
    shown = f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
    raise InputError(
        f"{spec} lacks {len(missing)} parameters of the head of {type(model).__name__} ({shown}): its predictions "
        "would be random. To measure the model without a head: --head none."
    )


def _sha256(files: Sequence[Path]) -> str:
    """Return the hash of the files' concatenated content."""
    digest = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """Return an error's type and text on one line of about 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
