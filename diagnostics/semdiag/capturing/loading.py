"""Load any model that a user names (a checkpoint, a folder, a factory), or say what is wrong with the name."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semdiag.capturing import paper_code, pretrained
from semdiag.capturing.attention_call import EXTERNAL_SOURCES
from semdiag.capturing.batches import as_whole_number, as_whole_numbers
from semdiag.capturing.patches import replaced
from semdiag.capturing.rules import TopK
from semdiag_files import LARGEST_TEXT, InputError, read_bytes, read_json, require_memory, unknown_name
from semdiag_models import Encoder, Text, TrainingConfig, draw_data, find_task, weights_sha256
from semdiag_models.checkpoint import FORMAT, checkpoint_of, is_checkpoint, read_hashed

Place = tuple[int, str]  # id of a module, and name of its parameter


class WeightsWatch:
    """Weights that calls of ``load_state_dict`` left out; it fills while the function runs."""

    def __init__(self) -> None:
        self._unexpected: list[str] = []  # names of weights that no module took
        self._missed: dict[Place, float] = {}  # parameters without weights, with a sum that shows later writes
        self._loaded: set[Place] = set()
        self._modules: list[nn.Module] = []  # keeps modules alive, so that no id is reused

    def add(self, module: nn.Module, names: set[str], missing: list[str], unexpected: list[str]) -> None:
        """Record one call."""
        self._modules.append(module)
        self._unexpected += unexpected
        places = {name: (place, parameter) for place, name, parameter in _places(module, twice=True)}
        self._missed |= {places[name][0]: _sum(places[name][1]) for name in missing if name in places}
        self._loaded |= {places[name][0] for name in names - set(unexpected) if name in places}

    def not_loaded(self, model: nn.Module) -> list[str]:
        """Return the names of a model's parameters that no call loaded and neither a tie nor a copy wrote."""
        every = _places(model)
        loaded = {id(parameter) for place, _, parameter in every if place in self._loaded}
        left = ((place, name, parameter) for place, name, parameter in every if id(parameter) not in loaded)
        return [name for place, name, parameter in left if self._missed.get(place) == _sum(parameter)]

    def described(self, model: nn.Module) -> str:
        """Return a description of what was left out; empty if nothing was."""
        lost = self.not_loaded(model)
        if not lost:
            return ""
        count = len(list(model.parameters()))
        described = f"{len(lost)} of its {count} parameters were not loaded ({_first_three(lost)})"
        unexpected = list(dict.fromkeys(self._unexpected))
        if unexpected:
            described += f"; {len(unexpected)} weights fit nothing in it ({_first_three(unexpected)})"
        return described


def _first_three(names: list[str]) -> str:
    return ", ".join([*names[:3], "…"] if len(names) > 3 else names)


def _sum(parameter: Tensor) -> float:
    """Return a number that changes when the parameter is written; 0 for a meta parameter."""
    return 0.0 if parameter.is_meta else float(parameter.detach().double().abs().sum())


def _places(model: nn.Module, twice: bool = False) -> list[tuple[Place, str, Tensor]]:
    """Return place, dotted name and value of each parameter; shared modules once, or ``twice``."""
    return [
        ((id(part), name), f"{prefix}.{name}".removeprefix("."), parameter)
        for prefix, part in model.named_modules(remove_duplicate=not twice)
        for name, parameter in part.named_parameters(recurse=False)
    ]


@contextmanager
def watched_weights() -> Iterator[WeightsWatch]:
    """Watch every ``load_state_dict`` in the context."""
    weights = WeightsWatch()

    def load(original: Any, module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        names = {str(name) for name in state_dict}
        result = original(module, state_dict, *args, **kwargs)
        weights.add(module, names, list(result.missing_keys), list(result.unexpected_keys))
        return result

    with replaced(nn.Module, "load_state_dict", load):
        yield weights


_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def names_factory(spec: str) -> bool:
    """Return whether a text names a factory, ``package.module:function``, and no file has that name."""
    return _SPEC.fullmatch(spec) is not None and not Path(spec).exists()


def imported_function(spec: str) -> Callable[..., Any]:
    """Import the user's module and return its function. This runs the user's code."""
    name, _, function = spec.partition(":")
    with _current_folder_first():
        try:
            module = importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may do anything when imported
            place = ""
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                folder = Path.cwd().name
                place = f" It is looked for in {folder}/, the current folder, and among installed packages."
            raise InputError(f"{name} cannot be imported ({_described(error)}).{place}") from error
    imported = getattr(module, function, None)
    if not callable(imported):
        defined = {n for n, value in vars(module).items() if getattr(value, "__module__", "") == name}
        raise unknown_name(f"function of {name}", function, sorted(defined) or ["none"])
    return imported  # type: ignore[no-any-return]


def call_factory(spec: str) -> tuple[nn.Module, Any]:
    """Import the user's module and call its factory. This runs the user's code."""
    factory = imported_function(spec)
    with _current_folder_first():
        try:
            built = factory()
        except (InputError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InputError(f"{spec} failed ({_described(error)}). It is called without arguments.") from error
    model, batches = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{spec} must return a torch.nn.Module, or one and its inputs. Got {type(model).__name__}."
        )
    return model, batches


def in_evaluation_mode(module: nn.Module) -> nn.Module:
    """Put a module into evaluation mode, including one from ``torch.export``, which refuses ``eval()``."""
    try:
        return module.eval()
    except NotImplementedError:
        for part in module.modules():
            part.training = False
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the user's code
        raise InputError(f"{type(module).__name__}.eval() failed ({_described(error)}).") from error
    return module


@contextmanager
def _current_folder_first() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have edited the path
            sys.path.remove(here)


def _described(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


SCHEMA = "semdiag.budget/1"


def read_budget(path: str | Path, name: str | None = None) -> dict[int | str | tuple[str, int], TopK]:
    """Read a budget from ``semdiag k-sweep --budget``, for :func:`~semdiag.capturing.sparsify.sparsify`.

    Args:
        path: JSON file in the form of docs/commands/k-sweep.md.
        name: name of a budget in the file, like ``weight-95``; None for the file's default.

    Returns:
        Rules by module and occurrence.

    Raises:
        InputError: if the file is missing, is no budget file, or has no budget of that name.
    """
    content = read_json(Path(path))
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InputError(
            f"{path} is not a budget: semdiag k-sweep MODEL --rerun --budget FILE.json writes one ({SCHEMA})."
        )
    budgets = content.get("budgets")
    budget_name = content.get("default") if name is None else name
    if not isinstance(budgets, dict) or not budgets:
        raise InputError(f"{path} holds no budget.")
    budget = budgets.get(budget_name) if isinstance(budget_name, str) else None
    if not isinstance(budget, dict):
        raise InputError(f"{path} has no budget called {budget_name}. It has {', '.join(budgets)}.")
    try:
        block = as_whole_number(budget["block"], "block")
        layers = budget["layers"]
        rules = [TopK(as_whole_numbers(layer["k"], "k"), block=block) for layer in layers]
        places = [(str(layer["module"]), as_whole_number(layer["occurrence"], "occurrence")) for layer in layers]
        return dict(zip(places, rules, strict=True))
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}: a budget has a block and layers, each with module, occurrence and k, one number a head."
        ) from None


OF_YOUR_OWN = "for a model of your own write a function that builds it: package.module:function"
_MODELS = f"Models are .pt files, folders of runs and hf:PATH; {OF_YOUR_OWN}."
_OTHERS = {
    **dict.fromkeys((".safetensors", ".bin"), "holds weights without the model they belong to"),
    ".ckpt": "is a checkpoint of another program",
    ".onnx": "is an exported graph",
    ".csv": "is a table, not a model",
    **dict.fromkeys((".npy", ".npz"), "is an array, not a model; inputs go to --inputs"),
    ".txt": "is a text, not a model; inputs go to --inputs",
}


def _functions(path: Path) -> list[str]:
    """Return the public functions without required arguments of a Python file, which is parsed, not run."""
    try:
        parsed = ast.parse(read_bytes(path, LARGEST_TEXT))
    except (InputError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [
        node.name
        for node in parsed.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)
    ]


def refuse_other_kinds(path: Path, runs: list[Path]) -> None:
    """Refuse a path that cannot be a checkpoint of ours, and say what would work."""
    if path.is_dir() and (path / "config.json").exists():
        raise InputError(f"{path} is a folder of the Hugging Face format: name it hf:{path}")
    if path.suffix in _OTHERS and path.is_file():
        folder = f"name its folder: hf:{path.parent}; " if (path.parent / "config.json").exists() else ""
        raise InputError(f"{path} {_OTHERS[path.suffix]}. Models are .pt files of semdiag; {folder}{OF_YOUR_OWN}.")
    if path.suffix == ".py" and path.is_file():
        names = [f"{path.stem}:{name}" for name in _functions(path)[:3]]
        meant = f"Did you mean {' or '.join(names)}?" if names else "It has none that takes no arguments."
        raise InputError(f"{path} is a program: name the function in it that builds the model. {meant}")
    if not path.exists():
        raise InputError(f"{path} does not exist.{_hint_for(path, runs)}")


def _hint_for(path: Path, runs: list[Path]) -> str:
    """Return what the user may have meant by a path that does not exist."""
    if str(path).strip(",").isdecimal():
        return " Is it a number of a list? A list has commas and no spaces: --k 4,8."
    run_of = {name: run for run in runs for name in (run.name, str(run))}
    near = get_close_matches(str(path), run_of, n=1) or get_close_matches(path.name, run_of, n=1)
    if near:
        return f" Did you mean {run_of[near[0]]}?"
    if path.suffix == ".pt":
        return ""
    return f" {_MODELS}{pretrained.hint_of_hub(str(path))}"


FOLDER_VARIABLE = "SEMDIAG_CHECKPOINTS"
_BESIDE = (".md", ".json", ".csv", ".py", ".toml", ".txt", ".log", ".html", ".png", ".svg", ".yaml", ".yml")


def find_checkpoints(models: list[Path] | None) -> list[Path]:
    """Return the checkpoints that a command is about."""
    folder = _folder()
    files = [file for model in models for file in _files(model)] if models else _below(folder)
    twice = next((file for i, file in enumerate(files) if file in files[:i]), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice.")
    if not files:
        raise InputError(
            f"No checkpoint in {folder}. Make one in a minute with: "
            "semdiag train even-pairs --attention topk --k 5 --epochs 5"
        )
    return files


def without_other_files(models: list[Path]) -> tuple[list[Path], list[Path]]:
    """Split what a shell's ``*`` matched into possible models and other files beside them."""
    beside = [model for model in models if model.suffix in _BESIDE and model.is_file()]
    possible = [model for model in models if model not in beside]
    return (possible, beside) if possible else (models, [])


def _folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE, "checkpoints"))


def _files(model: Path) -> list[Path]:
    if not model.is_dir():
        return [model]
    runs = _below(model)
    if not runs:
        refuse_other_kinds(model, [])
        raise InputError(f"The folder {model} holds no checkpoint (.pt).")
    return runs


def _below(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and its subfolders, except hidden ones: environments hold .pt files."""
    every = ((file, file.relative_to(folder).parts) for file in folder.rglob("*.pt"))
    files = sorted(file for file, parts in every if not any(part.startswith(".") for part in parts))
    runs = {file.parent for file in files if file.name == "last.pt"}
    return [file for file in files if file.name == "last.pt" or file.parent not in runs]


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A model in evaluation mode, and its origin.

    Attributes:
        path: path or name as the user gave it.
        sha256: hash of the file, or of a Hugging Face model's weight files; empty if there is no file.
        module: model; an encoder of semdiag_models, or any other module.
        source: origin: ``semdiag``, ``paper code``, ``hugging face``, ``factory``, ``module`` or ``python``.
        snapshot: snapshot of the run: ``initialisation``, ``last``, ``best``, ``epoch N`` or ``unknown``.
        task: name of the task; None if unknown.
        seed: random seed of the run; None if unknown.
        epoch: number of finished epochs; None if unknown.
        training: data and optimisation of the run; None if unknown.
        history: one list per column, one entry per epoch; empty if unknown.
        provenance: versions, command and device of the training run.
        batches: inputs that came with the model; None if there are none.
        weights_sha256: hash of the parameters alone, for checkpoints of semdiag and the paper.
        recorded_weights: recorded hashes of the parameters by place: the file, a manifest beside its folder.
        not_loaded: description of the weights that the factory left out; empty if none.
        tokenizers: tokenizers that were read, by folder; None stands for the model's own folder.
    """

    path: str
    sha256: str
    module: nn.Module
    source: str
    snapshot: str
    task: str | None = None
    seed: int | None = None
    epoch: int | None = None
    training: TrainingConfig | None = None
    history: dict[str, list[float]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    batches: Any = None
    weights_sha256: str = ""
    recorded_weights: dict[str, str] = field(default_factory=dict)
    not_loaded: str = ""
    tokenizers: dict[Path | None, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        run = ", ".join(str(part) for part in (self.task, self.snapshot) if part)
        parameters = sum(p.numel() for p in self.module.parameters())
        return f"LoadedModel {self.path} ({self.source}, {run}, {parameters:,} parameters)"

    @property
    def size(self) -> int:
        """Number of bytes of its parameters and buffers."""
        return sum(t.nbytes for t in (*self.module.parameters(), *self.module.buffers()))

    @property
    def external(self) -> bool:
        """Whether neither semdiag nor the paper's code made the model, so that only its attention is known."""
        return self.source in EXTERNAL_SOURCES

    @property
    def contradicted_by(self) -> list[str]:
        """Places where a different hash of the weights is recorded: ``file``, ``manifest``."""
        return [place for place, digest in self.recorded_weights.items() if digest != self.weights_sha256]

    @property
    def encoder(self) -> Encoder:
        """The model as an encoder of semdiag_models, with known parts; any other is refused."""
        if isinstance(self.module, Encoder):
            return self.module
        raise InputError(
            f"{self.path} is a {type(self.module).__name__}: this needs one of semdiag's encoders, all of "
            "whose parts are known. These work on any model: semdiag info, dispersion, separation, stability, "
            "mask-stability, k-sweep, overlap, compare, report, and check with --rule or --baseline."
        )

    def default_inputs(self, samples: int, seed: int) -> tuple[Tensor, Tensor, str]:
        """Return tokens (N, L), labels (N,) and their origin: the run's held-out samples, else fresh ones."""
        config = self.encoder.config
        if self.training is not None:
            # The user cannot know a text's number of windows: a small text gives all of them.
            if samples > self.training.holdout_samples and self.training.text is None:
                raise InputError(
                    f"{self.path} has {self.training.holdout_samples} held-out samples; --samples must not be "
                    f"larger. Got --samples {samples}."
                )
            all_samples = self.training.train_samples + self.training.holdout_samples
            require_memory(16 * all_samples * config.length, f"Drawing the samples that {self.path} declares")
            holdout = draw_data(self.training, config.length, config.pad_id)[1]
            source = "the run's own held-out samples"
            if self.training.text is not None:
                source += f" (overlapping windows of {self.training.text.holdout_file or self.training.text.file})"
            return holdout.tokens[:samples], holdout.labels[:samples], source
        if self.task is None:
            raise InputError(f"The task of {self.path} is unknown: name its inputs with --inputs FILE.")
        length = min(find_task(self.task).recipe.length, config.length)
        fresh = TrainingConfig(self.task, length, 1, seed, samples, 1)
        tokens, labels = draw_data(fresh, config.length, config.pad_id)[0]
        return tokens, labels, f"fresh samples of {self.task} (seed {seed}), not the model's own held-out data"

    def text_inputs(self, path: Path, samples: int, seed: int) -> tuple[Tensor, Tensor, str]:
        """Return windows (N, L) of the user's text, their labels and origin, for a model of text."""
        if self.training is None or self.training.text is None:
            raise InputError(f"{self.path} was not trained on text: --inputs takes token ids (.npy, .npz or .pt).")
        generator = torch.Generator().manual_seed(seed)
        text = Text(self.training.text)
        tokens, labels = text.draw_from(path, samples, self.training.length, generator)
        return tokens, labels, f"{len(tokens)} windows of {path} (given)"


def load(path: str | Path, config: Mapping[str, Any] | None = None, head: str = "auto") -> LoadedModel:
    """Load a model: a checkpoint, a Hugging Face folder, or the result of the user's function.

    Args:
        path: a ``.pt`` file of semdiag or of the paper's released code, or a run's folder (its ``last.pt``);
            ``hf:PATH`` (offline, safetensors; PATH may be PACKAGE/FOLDER of an installed package); or
            ``package.module:function``, which is called and returns a module, or a module and its inputs.
        config: configuration that the file name does not give, for checkpoints of the paper's code only.
        head: head of a Hugging Face model: ``auto`` for the configured one, ``none`` for the body alone.

    Returns:
        The model in evaluation mode on the CPU. Torch's random state is left as it was.

    Raises:
        InputError: if it is missing, none of these, contains code, is incomplete, or contradicts itself.
    """
    with torch.random.fork_rng(devices=[]):  # modules draw initial weights before they load their own
        spec = str(path)
        if head not in pretrained.HEADS:
            raise InputError(f"head is {' or '.join(pretrained.HEADS)}. Got {head!r}.")
        if spec.startswith(pretrained.PREFIX):
            model, digest, versions = pretrained.load_pretrained(spec, head)
            return LoadedModel(spec, digest, model, "hugging face", "unknown", provenance=versions)
        if names_factory(spec):
            with watched_weights() as weights:
                model, batches = call_factory(spec)
            source = "python" if isinstance(model, Encoder) else "factory"
            return LoadedModel(
                spec, "", in_evaluation_mode(model), source, snapshot="unknown", batches=batches,
                not_loaded=weights.described(model),
            )  # fmt: skip
        return _load_checkpoint(path, config)


def load_all(
    models: Iterable[str | Path | LoadedModel], config: Mapping[str, Any] | None, head: str = "auto"
) -> list[LoadedModel]:
    """Load several models with :func:`load`; leave loaded ones as they are."""
    loaded = [model if isinstance(model, LoadedModel) else load(model, config, head) for model in models]
    if config is not None and not any(model.source == "paper code" for model in loaded):
        raise InputError(
            f"--config describes checkpoints of the paper's code, but {loaded[0].path} is not one: leave out "
            "--config."
        )
    return loaded


def describe_model(model: LoadedModel) -> dict[str, Any]:
    """Return the architecture of a model, as far as it is known."""
    parameters = sum(p.numel() for p in model.module.parameters())
    if not model.external:
        return {**model.encoder.config.to_dict(), "parameters": parameters}
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.module.parameters()})
    facts: dict[str, Any] = {"class": type(model.module).__name__, "dtype": ", ".join(kinds)}
    if model.source == "hugging face":
        written: dict[str, Any] = model.module.config.to_diff_dict()  # type: ignore[union-attr, operator]
        facts |= {name: value for name, value in written.items() if isinstance(value, int | float | str)}
    return facts | {"parameters": parameters}


LOAD_WEIGHTS = (
    "Write a file mymodel.py whose function build() makes the model, calls "
    'model.load_state_dict(torch.load("{path}", weights_only=True)) and returns it. Then name mymodel:build '
    "instead of the file."
)


def _is_state_dict(content: Any) -> bool:
    """Return whether the content of a file is weights by name."""
    return isinstance(content, dict) and bool(content) and all(map(torch.is_tensor, content.values()))


def state_dict_in(path: str | Path) -> dict[str, Tensor] | None:
    """Return the weights by name in a file that holds nothing else; None for any other."""
    file = Path(path)
    if file.suffix not in (".pt", ".pth") or not file.is_file():
        return None
    content, _ = read_hashed(file)
    return content if _is_state_dict(content) and not paper_code.is_released_code(content) else None


def _load_checkpoint(path: str | Path, config: Mapping[str, Any] | None) -> LoadedModel:
    file = Path(path)
    if (file / "last.pt").exists():
        file /= "last.pt"
    refuse_other_kinds(file, [run.parent for run in _below(_folder()) if run.name == "last.pt"])
    content, digest = read_hashed(file)
    if paper_code.is_released_code(content):
        encoder, description = paper_code.build_encoder(file, content, config)
        weights = weights_sha256(encoder.state_dict())
        return LoadedModel(str(path), digest, encoder, "paper code", weights_sha256=weights, **description)
    if not is_checkpoint(content):
        if _is_state_dict(content):
            how = LOAD_WEIGHTS.format(path=path)
            raise InputError(f"{path} holds weights without their model (a state dict). {how}")
        raise InputError(
            f"{path} is not a semdiag checkpoint (no format entry {FORMAT!r}). "
            f"Make one with: semdiag train even-pairs --attention topk --k 5; {OF_YOUR_OWN}."
        )
    checkpoint = checkpoint_of(file, content)
    snapshot = {0: "initialisation"}.get(checkpoint.epoch, f"epoch {checkpoint.epoch}")
    if file.stem in ("last", "best"):
        snapshot = file.stem
    training = checkpoint.training
    module = checkpoint.build().with_exact_positions()
    return LoadedModel(
        str(path), digest, module, "semdiag", snapshot, training.task_label, training.seed, checkpoint.epoch,
        training, checkpoint.history, checkpoint.provenance, weights_sha256=weights_sha256(checkpoint.state),
        recorded_weights=_recorded(file, checkpoint.recorded_weights),
    )  # fmt: skip


def _recorded(file: Path, inside: str) -> dict[str, str]:
    """Return the hashes of the weights recorded in a checkpoint and in the ``manifest.json`` beside its folder."""
    recorded = {"file": inside} if inside else {}
    folder = file.absolute().parent
    with suppress(InputError):
        manifest = read_json(folder.parent / "manifest.json")
        for entry in manifest if isinstance(manifest, list) else ():
            if isinstance(entry, dict) and entry.get("run") == folder.name:
                hashes = entry.get("weights_sha256")
                digest = hashes.get(file.name) if isinstance(hashes, dict) else None
                recorded |= {"manifest": digest} if isinstance(digest, str) else {}
    return recorded
