"""The options that commands share, their values and their completion."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from semdiag_models import kinds

TASKS = ("parity", "even-pairs", "missing-duplicate", "stack-manipulation", "cycle-navigation",
         "modular-arithmetic", "solve-equation", "listops", "text")  # fmt: skip
ATTENTIONS = tuple(kinds.ATTENTIONS)
LISTS = ("tasks", "attentions", "metrics")
SUPPOSED_K = 5  # heavy hitters of the mask that a full-attention model would choose
_MOST = 200  # number of runs offered


def names(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Complete one of several names."""
    return lambda incomplete: [name for name in choices if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Complete a model: run folders among the checkpoints, and any path that starts with the word."""
    folder = Path(os.environ.get("SEMDIAG_CHECKPOINTS", "checkpoints"))
    runs = sorted(file.parent for file in folder.rglob("last.pt"))[:_MOST]
    matching = [str(run) for run in runs if run.name.startswith(incomplete) or str(run).startswith(incomplete)]
    parent, start = os.path.split(incomplete)
    try:
        there = sorted(Path(parent or ".").iterdir())
    except OSError:
        return matching
    beside = [path for path in there if path.name.startswith(start) and (start or path.name[0] != ".")]
    paths = [os.path.join(parent, path.name) + os.sep * path.is_dir() for path in beside]
    return [*matching, *(path for path in paths if path.rstrip(os.sep) not in matching)]


# Headings of the help.
MEASURE = "What is measured"
WHERE = "Where it runs"
OUTPUT = "Output"


def command_option(help: str, *names: str, panel: str = MEASURE, rare: bool = False, **more: Any) -> Any:
    """Declare an option, for the ``Annotated`` type of a parameter; only ``--help-all`` shows a rare one."""
    return typer.Option(*names, help=help, rich_help_panel=panel, hidden=rare, **more)


def option_field(
    default: Any, help: Any, *flags: str, read: Callable[[str, str], Any] | None = None, **more: Any
) -> Any:
    """Return the field of a plan that is an option, declared by its help; ``read`` makes its value from a text."""
    info = command_option(help, *flags, **more) if isinstance(help, str) else help
    return field(default=default, metadata={"option": info, "read": read})


def shared_field(default: Any) -> Any:
    """Return the field of a plan whose value is that of the shared option with its name."""
    return field(default=default, metadata={"shared": True})


place_option, output_option = (partial(command_option, panel=panel) for panel in (WHERE, OUTPUT))

Config = Annotated[
    Path | None,
    command_option(
        "For a checkpoint of the paper's code whose file name does not state its configuration: a JSON file "
        "with mask_type, mask_size, n_heads …",
        rare=True,
    ),
]
Head = Annotated[
    str,
    command_option(
        "Of Hugging Face models: auto loads the configured class, with its head, so that losses and predictions "
        "are the model's own; none loads the body.",
        metavar="auto|none",
        rare=True,
    ),
]
NOISE = command_option(
    "Standard deviation of the Gaussian noise added to the embedded tokens, relative to each token's "
    "root mean square, like 0.01 or 0.001,0.01,0.1.",
    "--noise",
    metavar="LEVEL,LEVEL",
)
Ray = Annotated[
    str,
    place_option(
        "Run on a Ray cluster: its address, or auto for the one on this machine, which is started if needed.",
        metavar="auto|ADDRESS",
        rare=True,
    ),
]
Json = Annotated[bool, output_option("Print one JSON object on stdout.", "--json")]
Quiet = Annotated[bool, output_option("Show no progress and no tables.", "--quiet", rare=True)]


@dataclass(frozen=True)
class Shared:
    """The options that commands share, with their usual defaults, in the order of the help."""

    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoints (.pt), also of the paper's code, run folders, hf:PATH (a Hugging Face model on "
            "disk), or package.module:function (a function of yours that returns a model, or a model and its "
            "inputs). Default: every run in ./checkpoints, or in $SEMDIAG_CHECKPOINTS if that is set.",
            show_default=False,
            autocompletion=models,
        ),
    ] = None
    against: Path | None = option_field(
        None, "Compare every model with this one. Default: each full-attention model is compared with the models "
        "of the same task, seed, size and snapshot.", metavar="MODEL", autocompletion=models,
    )  # fmt: skip
    k: str = option_field(
        "", "For full-attention models: also show what the quantity would be if each query kept its k largest "
        "scores, like 5 or 4,8,16.", "--k", metavar="K,K",
    )  # fmt: skip
    every: bool = option_field(
        False, "Show every row: all heads of large models, every k of a k-sweep.", "--all", panel=OUTPUT,
        rare=True,
    )  # fmt: skip
    inputs: Path | None = option_field(
        None, "File of inputs to measure. Token ids of shape (N, L): .npy, .npz or .pt. Hugging Face models also "
        "take a .txt with one text per line, or a .jsonl of objects with text and, if known, label or target; "
        "models of text that semdiag trained take a .txt, from which --samples windows are drawn; Hugging Face "
        "models and your own also take a .pt with a dictionary of the model's arguments. Default: the samples "
        "that the run held out; for the paper's code, fresh samples of the task.",
    )  # fmt: skip
    max_length: int | None = option_field(
        None, "Cut texts of --inputs to this many tokens. Default: as many as the model takes.", metavar="TOKENS",
        rare=True,
    )  # fmt: skip
    tokenizer: Path | None = option_field(
        None, "Folder of the tokenizer for texts of --inputs. Default: the model's own.", metavar="DIR", rare=True,
    )  # fmt: skip
    labels: Path | None = option_field(
        None, "File with the class of each text of --inputs, a number or a name a line, for models that tell "
        "classes.", metavar="FILE", rare=True,
    )  # fmt: skip
    samples: int = option_field(
        500, "How many inputs to measure, of a run at most what it held out; all by default where those are "
        "fewer, or with --inputs.",
    )  # fmt: skip
    batch_size: int = option_field(100, "Samples in one forward pass.", rare=True)
    device: str = option_field(
        "auto", "cpu, cuda, mps, or another accelerator that torch finds. auto takes cuda, else mps, else cpu.",
        autocompletion=names(("auto", "cpu", "cuda", "mps")),
    )  # fmt: skip
    dtype: str = option_field(
        "auto", "Precision of the model and its scores: float32 or float64; of external models also bfloat16 or "
        "float16, with scores in float32. auto: float64 for semdiag's and the paper's encoders alone, so that "
        "numbers are the same on every processor; else, and on mps, float32.", rare=True,
    )  # fmt: skip
    seed: int = option_field(
        0, "Seed of everything drawn at random: samples, noise, keys, queries, directions.", rare=True,
    )  # fmt: skip
    min_keys: int = option_field(
        1, "Leave out queries that may attend to fewer keys than this. Key loads (separation) still count them.",
        rare=True,
    )  # fmt: skip
    queries: int | None = option_field(
        None, "For long sequences: measure only this many random queries per sample and head of the longest "
        "sequence, and the same share of shorter ones. Numbers are then estimates with intervals, and quantities "
        "that need every query are not given. Default: every query.", show_default=False, rare=True,
    )  # fmt: skip
    max_queries: int = option_field(
        20_000_000, "How many queries and keys of a model are kept one by one. Beyond that, counts, means and "
        "extremes stay exact; percentiles come from a random sample, with their error.", rare=True,
    )  # fmt: skip
    config: Config = None
    head: Head = "auto"
    jobs: int | None = option_field(
        None, "Processes, each with one CPU thread. They divide the models, or the masks with which one model is "
        "rerun. Their number changes no bit of a result. Default: one a core for four or more checkpoints on a "
        "CPU; else this one alone.", show_default=False, panel=WHERE,
        rare=True,
    )  # fmt: skip
    ray: Ray = ""
    out: Path | None = option_field(
        None, "Folder for the page with its figures and tables. Default: reports/COMMAND-MODEL.", panel=OUTPUT,
    )  # fmt: skip
    as_json: Json = False
    per_query: Path | None = option_field(
        None, "Write one row per query to this .parquet file, and key loads to another beside it: with --queries "
        "the drawn ones, beyond --max-queries a random sample.", panel=OUTPUT, rare=True,
    )  # fmt: skip
    figures: str = option_field(
        "png,svg", "Figure formats: any of png, svg, pdf, separated by commas; or none.",
        metavar="FORMAT,FORMAT", panel=OUTPUT, rare=True,
    )  # fmt: skip
    quiet: Quiet = False


def _listed(text: str, read: Callable[[str], Any], usage: str) -> tuple[Any, ...]:
    from semdiag_files import InputError

    try:
        return tuple(read(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"{usage}. Got {text!r}.") from None


def listed_numbers(text: str, what: str, example: str) -> tuple[int, ...]:
    """Read ``"5,3,3"``: whole numbers in their order."""
    return _listed(text, int, f"{what} separated by commas, like {example}")


def length_range(text: str | None) -> tuple[int | None, int | None]:
    """Read ``"40"`` or ``"5:20"``: the shortest length, if given, and the longest."""
    from semdiag_files import InputError

    if text is None:
        return None, None
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise InputError(f"--length takes a number of tokens or a range of them, like 40 or 5:20. Got {text!r}.")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read ``"4,8,16"``: different whole numbers in ascending order."""
    return tuple(sorted(set(listed_numbers(text, f"{option} takes whole numbers", "4,8,16"))))


def positive_numbers(text: str, option: str) -> tuple[float, ...]:
    """Read ``"0.001,0.01"``."""
    from semdiag_files import InputError

    usage = f"{option} takes positive numbers separated by commas, like 0.01,0.1"
    numbers = tuple(sorted(set(_listed(text, float, usage))))
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise InputError(f"{usage}. Got {text!r}.")
    return numbers


def targets(text: str, option: str) -> tuple[tuple[str, float], ...]:
    """Read ``"0.95,listops=0.35"``: a value for all tasks, of an empty name, and values for single tasks."""

    def pair(part: str) -> tuple[str, float]:
        task, _, number = part.strip().rpartition("=")
        return task, float(number)

    return _listed(text, pair, f"{option} takes an accuracy like 0.95, or TASK=0.35 for one task")


_MOST_REPEATS = 1_000_000
_REPEATS = {"draws", "planes", "directions"}


def check_least(plan: object, **least: int) -> None:
    """Refuse fields of a plan that are below their least values, and repeats without end."""
    from semdiag_files import InputError

    for name, number in least.items():
        value = getattr(plan, name)
        if value < number:
            raise InputError(f"{name} must be at least {number}. Got {value}.")
        if name in _REPEATS and value > _MOST_REPEATS:
            raise InputError(f"{name} must be at most {_MOST_REPEATS:,}. Got {value:,}.")


def listed_names(text: str, option: str = "") -> tuple[str, ...]:
    """Read ``"bf16,fp16"``."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _declared(one: "Field[Any]") -> tuple[Any, Any, Any]:
    """Return type, declaration and reading function of a field's option; no declaration: it is none."""
    if get_origin(one.type) is Annotated:
        return *get_args(one.type), None
    return one.type, one.metadata.get("option"), one.metadata.get("read")


def of_plan(plan: type | None) -> dict[str, tuple[Any, Any]]:
    """Return type with help and default of the options that a plan's fields declare, by field."""
    declared = {}
    for one in fields(plan) if plan is not None else ():
        kind, info, read = _declared(one)
        if info is not None:
            default: Any = one.default
            text = ",".join(map(str, default)) if read and default else ""
            declared[one.name] = (Annotated[str, info], text) if read else (Annotated[kind, info], default)
    return declared


def plan_from(plan: type, typed: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return a plan with what the user typed, read from texts, and with values of shared options."""
    settings = {one.name: values[one.name] for one in fields(plan) if "shared" in one.metadata}
    for one in (one for one in fields(plan) if one.name in typed):
        _, info, read = _declared(one)
        flags = [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("--")]
        name = flags[0] if flags else f"--{one.name.replace('_', '-')}"
        settings[one.name] = read(typed[one.name], name) if read else typed[one.name]
    return plan(**settings)


def with_parameters(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter], help: str | None
) -> Callable[..., None]:
    """Return a command that shows these parameters to Typer, all by name."""
    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    command.__doc__ = help
    return command
