"""``semdiag check``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semdiag.commands.measuring import FORMATS
from semdiag.presenting import options
from semdiag.presenting.question import CHECKPOINTS, Question, Request
from semdiag.presenting.terminal import print_json, say, tell, terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table
    from torch import Tensor

    from semdiag.capturing.loading import LoadedModel
    from semdiag.reporting.gate import Verification

_judged = partial(options.command_option, panel="What is judged")


def _check(
    rule: Annotated[list[str] | None, _judged(
        "What every model must satisfy, like \"dispersion.p95 < 10\"; repeatable. A metric with .mean or "
        ".p0 … .p100, or accuracy or residual (how far attention recomputed from the capture deviates); <, <=, > "
        "or >=; a number; to choose models and layers, any of layer=0 attention=topk task=even-pairs "
        "model=*seed-1*.",
    )] = None,
    baseline: Annotated[Path | None, _judged(
        "JSON file that an earlier semdiag check --json printed. A number that moved since is a failure.",
    )] = None,
    tolerance: Annotated[float, _judged("With --baseline: how far a number may move, as a share of it.")] = 0.05,
    every_layer: Annotated[bool, _judged(
        "Fail if δ_h < δ_s does not hold at the median of a single layer. Default: fail if it does not hold in "
        "half of the layers or more.", "--every-layer", rare=True,
    )] = False,
    junit: Annotated[Path | None, _judged(
        "Also write the verdicts to this file, as JUnit XML.", rare=True,
    )] = None,
    exit_zero: Annotated[bool, _judged(
        "Report failures, but exit with code 0.", "--exit-zero", rare=True,
    )] = False,
    *,
    request: Request,
) -> None:  # fmt: skip
    """Check that top-k attention has the smaller dispersion: δ_h < δ_s. Made for CI.

    Pairs full and top-k checkpoints of the same task, seed, size, setting and snapshot. In each pair δ_h < δ_s
    must hold at p50, p75, p90 and p95 of the pooled queries, and at the median of more than half of the layers.
    (Untrained models pass, too: a few of many scores have a smaller range to begin with.) In each model attention
    must be captured completely, and no certified mask may change under 1% noise. Your own rules and a baseline
    are checked as well; with either, a model needs no partner. Exit code 0: everything passes; 1: something
    fails; 2: there is nothing to check, or the input is wrong.

    [bold]semdiag check --rule "dispersion.p95 < 10 attention=topk"[/]
    """
    from semdiag.questions.mask_stability import NoisePlan
    from semdiag.reporting.gate import PROBED, junit_xml, parse_rule, read_baseline, verify
    from semdiag_files import InputError, write_text

    if junit is not None:
        _check_junit(junit)
    if not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance must be a fraction of at least 0, like 0.05. Got {tolerance}.")
    if baseline is None and "tolerance" in request.typed:
        raise InputError("--tolerance applies to the numbers of a baseline: add --baseline FILE.")
    earlier = None if baseline is None else read_baseline(baseline)
    rules = [parse_rule(text) for text in rule or ()]
    paired = not rules and earlier is None  # which applies to encoders only
    conditions = request.conditions(plans=(NoisePlan(draws=1),), probe_samples=PROBED, encoders_only=paired)
    findings, _ = request.measured(request.values["models"], conditions)
    result = verify(findings, rules, earlier, tolerance, every_layer)
    if junit is not None:
        write_text(junit, junit_xml(result))
    _show(result, request)
    if result.failures and not exit_zero:
        raise typer.Exit(1)


def _show(result: "Verification", request: Request) -> None:
    from semdiag.commands.printing import conclusion, print_check

    if not request.values["quiet"]:
        say(conclusion(result))
        print_check(result)
    if request.values["as_json"]:
        print_json(result.summary())
    for words in result.failures:
        tell(f"semdiag: {words}.")


def _check_junit(file: Path) -> None:
    from semdiag_files import InputError

    if file.is_dir():
        raise InputError(f"{file} is a folder. Name a file with --junit FILE.")
    if not file.parent.is_dir():
        raise InputError(f"{file} cannot be written: there is no folder {file.parent}.")


CHECK = Question(
    "check",
    __name__,
    ask=_check,
    takes=("models",),
    leave_out=("seed", "min_keys", "out", "per_query", "figures"),
    panel=CHECKPOINTS,
)


def list_names(
    what: Annotated[str, typer.Argument(
        help="tasks, attentions or metrics. Default: all three.", autocompletion=options.names(options.LISTS),
    )] = "all",
) -> None:  # fmt: skip
    """List the tasks with their baselines, the kinds of attention, and the metrics.

    [bold]semdiag list tasks[/]
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from semdiag_files import unknown_name
    from semdiag_models import ATTENTIONS, TASKS, Text

    tasks = Table("task", "question", "classes", "chance", "majority", "shortcut", title="Tasks", box=SIMPLE_HEAD)
    tasks.caption_justify = "left"
    tasks.columns[0].no_wrap = True
    tasks.caption = (
        "chance: accuracy of a uniform guess; majority: of the commonest label; shortcut: of the best rule that "
        f"looks at one token. {_out_of_reach()}"
    )
    for task in TASKS.values():
        numbers = (f"{task.chance:.0%}", f"{task.majority:.0%}", f"{task.shortcut[0]:.0%}")
        tasks.add_row(task.name, task.summary, str(task.classes), *numbers)
    tasks.add_row(Text.name, f"{Text.summary} (--text FILE)", "pieces", "–", "–", "–")
    attentions = Table("attention", "what a query attends to", title="Attentions", box=SIMPLE_HEAD)
    for name, kind in ATTENTIONS.items():
        attentions.add_row(name, kind.meaning)
    tables = {"tasks": tasks, "attentions": attentions, "metrics": _metrics()}
    if what not in (*tables, "all"):
        raise unknown_name("list", what, tables)
    console = terminal()
    for name, table in tables.items():
        if what in (name, "all"):
            console.print(table)


def _metrics() -> "Table":
    """Return the table of metrics, and of what else is measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from semdiag.measuring.metrics import METRICS

    table = Table("metric", "definition", "monitor", "commands", title="Metrics", box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    table.caption_justify = "left"
    table.caption = (
        "_kK: as if each query kept its K largest scores. monitor: what it records of a head's queries, and "
        "alarms for. check: what a rule may limit."
    )
    for metric in METRICS.values():
        suffix = ("[_kK]" if metric.takes(None) else "_kK") if metric.takes(1) else ""
        commands = {metric.command: metric.command, "check": metric.gated}
        meaning = f"{metric.symbol}: {metric.meaning}".removeprefix(": ")
        table.add_row(
            metric.name + suffix,
            f"{meaning} ({metric.unit})" if metric.unit else meaning,
            metric.by_head,
            ", ".join(command for command, possible in commands.items() if possible),
        )
    for name, definition, command in _OF_MODELS:
        table.add_row(name, definition, "", command)
    return table


def _out_of_reach() -> str:
    """Return which tasks local attention cannot represent, at the recipes' lengths and blocks."""
    from semdiag.measuring.reach import cannot_represent
    from semdiag_models import TASKS, configure
    from semdiag_models.kinds import LOCAL

    limits = []
    for kind in LOCAL:
        names = []
        for task in TASKS.values():
            config, _ = configure(task, {"attention": kind, "k": _K})
            names += [task.name] * cannot_represent(task, config)
        limits.append(f"{kind} on {', '.join(names)}")
    return (
        f"With the recipes' lengths and blocks and k = {_K}, no weights are right on every input for "
        f"{'; '.join(limits)}. One global token removes this limit."
    )


_K = 5  # of the examples
_OF_MODELS = (  # what is measured of a model, and is no metric of a query or key
    ("softmax stability ξ", "change of attention weights per change of scores, ℓ1", "stability"),
    ("response", "mean change of attention weights under input noise", "stability"),
    ("unchanged masks", "share under input noise: certified, predicted, observed", "mask-stability"),
    ("mask agreement", "share of a query's kept keys unchanged by input noise", "mask-stability"),
    ("Lipschitz estimates", "secants, gradients, block Jacobians, from below", "lipschitz"),
    ("loss surface", "loss and accuracy, or δ and Δ, on planes of parameters", "landscape"),
    ("Lipschitz bounds λ", "of attention, block, tensor and loss; Corollary 1", "bounds"),
)

_SPLITS = ("train", "holdout")
_FACTS = {name: name for name in ("path", "sha256", "source", "snapshot", "task", "seed", "epoch")} | {
    "weights": "weights_sha256"
}


def info(
    model: Annotated[Path, typer.Argument(
        help="A checkpoint (.pt), the folder of a run, hf:PATH, or package.module:function.",
        autocompletion=options.models,
    )],
    config: options.Config = None,
    head: options.Head = "auto",
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Show what is in a checkpoint: architecture, training, accuracy, provenance.

    A hash of the weights is compared with the one recorded in the checkpoint, and with the one in manifest.json
    beside the run's folder, if there is one. Exit code 1 if they differ.

    [bold]semdiag info checkpoints/even-pairs-topk-5-seed-153476998[/]
    """
    from rich.table import Column, Table

    from semdiag.capturing.loading import load_all, state_dict_in
    from semdiag.commands.measuring import read_config

    weights = state_dict_in(model)
    if weights is not None:
        _show_weights(model, weights, as_json)
        return
    (loaded,) = load_all([model], read_config(config), head)
    recorded = _recorded_weights(loaded)
    sections = _sections(loaded, recorded)
    if as_json:
        from semdiag.measuring.findings.findings import MODEL_FACTS, json_ready, schema

        config_values = {} if loaded.external else loaded.encoder.config.to_dict()
        attention = config_values.get("attention")
        facts = (loaded.path, loaded.sha256, loaded.task, attention, config_values.get("k"), loaded.epoch)
        content = {"results": [dict(zip(MODEL_FACTS, facts, strict=True))], **sections}
        print_json(json_ready({"schema": schema("info"), **content}))
        raise typer.Exit(bool(loaded.contradicted_by))
    say(f"{loaded.path}: {_opening(loaded)}.")
    say(f"Weights {recorded}.")
    console = terminal()
    for title, entries in sections.items():
        table = Table("", Column(overflow="fold"), title=title, title_justify="left", show_header=False)
        for name, value in entries.items():
            table.add_row(name, _cell(value))
        console.print(table if entries else f"{title}: not in this file")
    raise typer.Exit(bool(loaded.contradicted_by))


def _opening(loaded: "LoadedModel") -> str:
    """Return what a model is: "even-pairs, top-5, 5 blocks of 64, 125,122 parameters, 100% held out"."""
    from semdiag.measuring.words import counted, number, percent
    from semdiag_models.text import perplexity

    parameters = counted(sum(p.numel() for p in loaded.module.parameters()), "parameter")
    if loaded.external:
        return f"{type(loaded.module).__name__}, {parameters}"
    config = loaded.encoder.config
    kind = {"full": "full attention", "topk": f"top-{config.k}"}.get(config.attention, config.attention)
    parts = [kind, f"{counted(config.blocks, 'block')} of {config.width}", parameters]
    if loaded.task is not None:
        parts.insert(0, loaded.task)
    accuracy = loaded.history.get("holdout_accuracy")
    loss = loaded.history.get("holdout_loss")
    if loss and loaded.training is not None and loaded.training.text is not None:
        parts.append(f"perplexity {number(perplexity(loss[-1]))} held out")
    elif accuracy:
        parts.append(f"{percent(accuracy[-1], '.0f', strict=True)} held out")
    return ", ".join(parts)


def _show_weights(path: Path, weights: "Mapping[str, Tensor]", as_json: bool) -> None:
    """Show names, shapes and types of weights without their model."""
    from rich.table import Column, Table

    from semdiag.capturing.loading import LOAD_WEIGHTS
    from semdiag.measuring.findings.findings import schema
    from semdiag.measuring.words import counted
    from semdiag_files import visible

    rows: list[dict[str, Any]] = [
        {"name": str(name), "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in weights.items()
    ]
    numbers = sum(tensor.numel() for tensor in weights.values())
    if as_json:
        content = {"schema": schema("info"), "results": [], "weights": rows, "parameters": numbers}
        print_json(content)
        return
    say(f"{path}: weights without their model: {counted(len(rows), 'tensor')} of {counted(numbers, 'number')}.")
    table = Table("name", Column("shape", justify="right"), "type")
    for row in rows:
        table.add_row(visible(row["name"]), " × ".join(map(str, row["shape"])) or "1", row["dtype"])
    terminal().print(table)
    say(LOAD_WEIGHTS.format(path=path))


def _recorded_weights(loaded: "LoadedModel") -> str:
    """Return whether the weights have the recorded hash, and where that stands."""
    if loaded.contradicted_by:
        return f"NOT those recorded in {' and '.join(loaded.contradicted_by)}"
    if loaded.recorded_weights:
        return f"as recorded in {' and '.join(loaded.recorded_weights)}"
    return "not recorded"


def _sections(loaded: "LoadedModel", recorded: str) -> dict[str, dict[str, Any]]:
    """Return what is in a checkpoint, by the titles of its parts."""
    from semdiag.capturing.loading import describe_model
    from semdiag_models.text import perplexity

    checkpoint = {name: getattr(loaded, attribute) for name, attribute in _FACTS.items()}
    training = {} if loaded.training is None else loaded.training.to_dict()
    last_epoch = {name: column[-1] for name, column in loaded.history.items() if column}
    sections = {
        "checkpoint": checkpoint | {"verified": recorded},
        "model": describe_model(loaded),
        "training": training,
    }
    text = training.pop("text", None)
    if text is not None:
        text["model"] = f"SentencePiece, {len(text['model']) * 3 // 4:,} bytes"
        sections["text"] = text
        if last_epoch:
            perplexities = {f"{split}_perplexity": perplexity(last_epoch[f"{split}_loss"]) for split in _SPLITS}
            last_epoch |= perplexities
    return sections | {"last epoch": last_epoch, "provenance": loaded.provenance}


def _cell(value: Any) -> str:
    """Return a value as the table of ``semdiag info`` shows it."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "–" if value is None or text in ("", "unknown") else text


def monitor(
    file: Annotated[
        Path, typer.Argument(help="A monitor's .csv or .parquet: that of its layers, or of its heads beside it.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Draw the whole run, layers against steps, to this .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Show a training as a monitor saw it: the extremes of its heads and the alarms; with --out a figure.

    In Python: with semdiag.Monitor(model, path="attention.csv", alarm={"max_logit": 50}): …

    [bold]semdiag monitor attention.csv --out run.png[/]
    """
    from semdiag.measuring.calls.monitor_alarms import extremes_of, read_heads
    from semdiag.presenting.drawing.panels import monitored_run
    from semdiag_files import InputError

    heads = read_heads(file)
    if out is not None:
        if out.suffix[1:] not in FORMATS:
            raise InputError(f"--out takes a .png, .svg or .pdf. Got {out}.")
        if heads.empty:
            raise InputError(f"{file} has no rows: no step was looked at, and there is nothing to draw.")
        try:
            monitored_run(heads).savefig(out, dpi=150)
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror or error}.") from None
    for line in extremes_of(heads):
        say(line)
    if out is not None:
        say(f"Figure: {out}")
