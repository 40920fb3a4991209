"""Measure what the shared options name, in this process or in others, and deliver the results."""

import hashlib
import inspect
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from semdiag.measuring.progress import SurveyProgress
from semdiag.presenting import options
from semdiag.presenting.question import SAMPLING, Question

if TYPE_CHECKING:
    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.measure import Conditions
    from semdiag.measuring.measurements import Measurements
    from semdiag.reporting.folder import ReportFolder

FORMATS = ("png", "svg", "pdf")


def command_line() -> str:
    """Return the command as the user would type it again."""
    return shlex.join(["semdiag", *sys.argv[1:]])


def figure_formats(text: str) -> tuple[str, ...]:
    """Read ``"png,svg"``; ``"none"`` gives none."""
    from semdiag_files import unknown_name

    formats = tuple(part.strip() for part in text.split(",") if part.strip() and part.strip() != "none")
    for name in formats:
        if name not in FORMATS:
            raise unknown_name("figure format", name, [*FORMATS, "none"])
    return formats


def read_config(path: Path | None) -> dict[str, Any] | None:
    """Read the configuration of a checkpoint of the paper's code."""
    from semdiag_files import InputError, read_json

    if path is None:
        return None
    try:
        content = read_json(path)
    except InputError as error:
        raise InputError(f"--config {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"--config {path} must hold a JSON object. Got {type(content).__name__}.")
    return content


def _with_reference(paths: list[Path], against: Path) -> list[Path]:
    from semdiag.capturing.loading import find_checkpoints
    from semdiag_files import InputError

    reference = find_checkpoints([against])
    if len(reference) != 1:
        raise InputError(f"--against takes one checkpoint. {against} holds {len(reference)}.")
    compared = [path for path in paths if path.resolve() != reference[0].resolve()]
    if not compared:
        raise InputError(f"There is nothing to compare: name a model besides --against {against}.")
    return [*compared, *reference]


def check_per_query(path: Path | None) -> None:
    """Refuse a name for :func:`write_per_query` before anything is measured."""
    from semdiag_files import InputError

    if path is not None and path.suffix != ".parquet":
        raise InputError(f"--per-query takes a file name that ends in .parquet. Got {path}.")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")


def write_per_query(path: Path, measurements: "Measurements") -> None:
    """Write the queries to ``path`` and the key loads to ``<name>.load.parquet`` beside it."""
    from semdiag_files import InputError

    tables = {path: measurements.queries, path.with_suffix(".load.parquet"): measurements.loads}
    temporary = {target: target.with_name(f".{target.name}.tmp") for target in tables}
    try:
        for target, table in tables.items():
            table.to_parquet(temporary[target], index=False)
        for target in tables:
            temporary[target].replace(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)


_SHARED = options.of_plan(options.Shared)
_OF_SOME = ("models", "against", "k", "every", *SAMPLING)  # taken on request
_OF_TEXTS = ("max_length", "tokenizer", "labels")
_OF_CONDITIONS = ("inputs", "samples", "batch_size", "device", "dtype", "seed", "min_keys", "head", *SAMPLING)


@dataclass
class TypedRequest:
    """What the user typed: implements :class:`semdiag.presenting.question.Request`."""

    question: Question
    values: dict[str, Any]
    typed: frozenset[str]
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the command ends
    folder: "ReportFolder | None" = None  # of the page; this command's alone once the models are known

    def conditions(self, keep_queries: bool = False, **more: Any) -> "Conditions":
        """Return the conditions of the measurement; every option is checked first."""
        from semdiag.capturing.inputs import TextOptions
        from semdiag.measuring.measure import Conditions
        from semdiag.reporting.folder import check_folder

        figure_formats(self.values.get("figures", ""))
        check_per_query(self.values.get("per_query"))
        if (folder := self.values.get("out")) is not None:
            check_folder(folder, keep_queries)
        values = {name: self.values[name] for name in _OF_CONDITIONS if name in self.values}
        if "k" in self.values:
            values["k"] = options.whole_numbers(self.values["k"], "--k")
        texts = TextOptions(*(self.values.get(name) for name in _OF_TEXTS))
        more = {"config": read_config(self.values.get("config")), **self.question.conditions, **more}
        return Conditions(**{**values, "texts": texts, **more})

    def measured(
        self,
        models: Sequence[Path] | None,
        conditions: "Conditions",
        run: Callable[..., "Measurements"] | None = None,
        more_stages: int = 0,
        against: Path | None = None,
        keep_queries: bool = False,
    ) -> "tuple[Findings, Sequence[LoadedModel]]":
        """Find the checkpoints, load them, reserve the page's folder and measure, with progress on stderr."""
        from semdiag.capturing.loading import load_all
        from semdiag.measuring.findings.findings import Findings
        from semdiag.measuring.survey import check_inputs
        from semdiag.measuring.words import counted
        from semdiag.presenting.progress import Stages
        from semdiag.presenting.terminal import tell
        from semdiag.reporting.folder import reserved

        quiet = self.values["quiet"]
        paths = self._checkpoints(models, against)
        if run is None:
            check_inputs(paths, conditions)
        steps = len(paths) * (1 + len(conditions.plans) + more_stages)
        with Stages("measuring", steps, quiet, counted(len(paths), "model")) as bar:
            loaded = load_all(paths, conditions.config, conditions.head)
            if "out" in self.values:
                folder = output_folder(self.question.name, [model.path for model in loaded], self.values["out"])
                self.folder = self.resources.enter_context(reserved(folder, keep_queries))
            encoders = [model for model in loaded if not model.external and model.sha256]
            self._check_k(paths, encoders)
            limited = self._limited(self._resumable(conditions, loaded), encoders)
            if run is None:
                run = self._runner(limited, len(paths), only_encoders=len(encoders) == len(paths))
            with self._telling_how_to_go_on(limited.unfinished):
                measurements = run(loaded, limited, bar)
        if against is not None:  # before the first question: answers are remembered
            measurements.provenance["against"] = str(paths[-1])
        measurements.provenance["command"] = ["semdiag", *sys.argv[1:]]
        measurements.provenance["date"] = _date()
        findings = Findings(measurements)
        if not quiet:
            held_out = limited.samples if limited.samples < conditions.samples else None
            for sentence in self._remarks(findings, held_out):
                tell(f"semdiag: {sentence}")
        return findings, loaded

    def _resumable(self, conditions: "Conditions", models: "Sequence[LoadedModel]") -> "Conditions":
        """Return conditions with the folder of finished parts, if the user named one and models run with masks."""
        from semdiag.reporting.folder import UNFINISHED
        from semdiag_files import InputError

        if self.folder is None or self.values.get("out") is None:
            return conditions
        if any(plan.can_go_on(model.external) for plan in conditions.plans for model in models):
            return replace(conditions, unfinished=self.folder.unfinished([model.path for model in models]))
        if (self.folder.path / UNFINISHED).exists():
            raise InputError(
                f"{self.folder.path / UNFINISHED} holds runs of an unfinished command, which this one would "
                "delete. Repeat that command, or name another folder with --out DIR."
            )
        return conditions

    @contextmanager
    def _telling_how_to_go_on(self, unfinished: "Path | None") -> Iterator[None]:
        """Tell an interrupted user where finished runs are kept."""
        from semdiag.presenting.terminal import tell

        try:
            yield
        except KeyboardInterrupt:
            if unfinished is not None and any(unfinished.glob("*/*.jsonl")):
                tell(f"semdiag: finished runs are kept in {unfinished}: the same command goes on.")
            raise

    def _checkpoints(self, models: Sequence[Path] | None, against: Path | None) -> list[Path]:
        """Return the paths of the models, that of the reference at the end."""
        from semdiag.capturing.loading import find_checkpoints, without_other_files
        from semdiag.presenting.terminal import tell
        from semdiag_files import InputError

        jobs = self.values.get("jobs")
        if jobs is not None and jobs < 1:
            raise InputError(f"--jobs must be at least 1. Got {jobs}.")
        named, other_files = without_other_files(list(models or ()))
        if other_files and not self.values["quiet"]:
            tell(f"semdiag: left out, as they are no checkpoints: {', '.join(map(str, other_files))}.")
        paths = find_checkpoints(named or None)
        return paths if against is None else _with_reference(paths, against)

    def _check_k(self, paths: Sequence[Path], encoders: "Sequence[LoadedModel]") -> None:
        """Refuse ``--k`` where each model has a mask of its own."""
        from semdiag.capturing.attention_call import DENSE
        from semdiag_files import InputError

        dense = [model.encoder.config.attention in DENSE for model in encoders]
        if "k" in self.typed and dense == [False] * len(paths):
            raise InputError(
                f"--k applies only to models that attend to every key: {paths[0]} has a mask of its own."
            )

    def _limited(self, conditions: "Conditions", encoders: "Sequence[LoadedModel]") -> "Conditions":
        """Return conditions with as many samples as each run held out, if the user named no number."""
        if "samples" in self.typed:
            return replace(conditions, first=conditions.samples)
        runs = [model.training for model in encoders if model.training is not None]
        held_out = [run.holdout_samples for run in runs if run.text is None]  # fresh samples and texts have no end
        if conditions.inputs is not None or min(held_out, default=conditions.samples) >= conditions.samples:
            return conditions
        return replace(conditions, samples=min(held_out))

    def _runner(
        self, conditions: "Conditions", models: int, *, only_encoders: bool
    ) -> Callable[..., "Measurements"]:
        """Return what measures a number of models: this process or others."""
        from semdiag.measuring.survey import survey

        jobs = self.values.get("jobs")
        ray = self.values.get("ray", "")
        many = only_encoders and models >= _MANY and conditions.plans
        if jobs or ray or (many and _several_cores(conditions.device)):
            return partial(measure_in_processes, jobs=jobs, ray=ray)
        return partial(survey, may_move_models=True)

    def _remarks(self, findings: "Findings", held_out: int | None) -> Iterator[str]:
        """Return what stderr tells about a measurement; ``held_out`` is the number of samples that limited it."""
        from semdiag.capturing.attention_call import DENSE, external
        from semdiag.capturing.audit import WARNING
        from semdiag.measuring.findings.findings import unlearned_sentences
        from semdiag.measuring.words import counted
        from semdiag.reporting.page import diverged_sentences

        models = findings.measurements.models
        for remark in findings.measurements.remarks.to_dict("records"):
            if remark["severity"] == WARNING:
                yield f"{remark['model']}: {remark['text']}."
        if held_out is not None:
            run_of = "one of the runs" if len(models) > 1 else "the run"
            yield f"measured on {counted(held_out, 'sample')}: {run_of} held out no more."
        masked = models.loc[~models["attention"].isin(DENSE) & ~external(models), "model"]
        if "k" in self.typed and len(masked):
            yield f"--k applies only to models that attend to every key, not to {', '.join(masked)}."
        yield from diverged_sentences(findings)
        yield from unlearned_sentences(findings)

    def deliver(self, findings: "Findings", sections: Sequence[str] | None = None) -> None:
        """Write the page with its figures; print answer and tables, or one JSON object."""
        from semdiag.measuring.findings.estimates import partial_sentences
        from semdiag.measuring.findings.findings import seed_sentence
        from semdiag.presenting.answer import opening_of, show
        from semdiag.presenting.progress import Stages
        from semdiag.presenting.tables import say_sentences
        from semdiag.presenting.terminal import print_json, say, tell
        from semdiag.questions.registry import QUESTIONS
        from semdiag.reporting.report import write_report

        question = self.question
        values = self.values
        quiet = values["quiet"]
        as_json = values["as_json"]
        per_query = values.get("per_query")
        formats = figure_formats(values["figures"])
        sections = sections or [question.name]
        assert self.folder is not None
        with Stages("drawing", 1, quiet) as bar:
            page, _ = write_report(findings, self.folder, command_line(), formats, sections=sections, progress=bar)
        if per_query is not None:
            write_per_query(per_query, findings.measurements)
            if not quiet:
                for sentence in partial_sentences(findings):
                    tell(f"semdiag: {per_query} does not hold everything: {sentence}.")
        if as_json:
            print_json(findings(question.json))
        if not quiet:
            say_sentences(opening_of([QUESTIONS[name].answered(findings) for name in sections]))
            say_sentences(filter(None, [seed_sentence(findings.measurements.models)]))
            show(question.answered(findings), values.get("every", False))
            say(f"Page: {page}")
        refuse_failed(findings, "--no-rerun")


def refuse_failed(findings: "Findings", without: str) -> None:
    """End with an error if a run with masks failed, once everything else was delivered."""
    from semdiag.presenting.answer import sentences_of
    from semdiag.questions.k_sweep.changes import failure_claims
    from semdiag_files import InputError

    if failures := failure_claims(findings):
        raise InputError(
            f"{' '.join(sentences_of(failures))} All else was measured; without these runs: {without}."
        )


def _measure_and_show(plan: Any, request: TypedRequest) -> None:
    from semdiag.measuring.findings.estimates import check_supposed_k

    conditions = request.conditions(plans=() if plan is None else (plan,))
    findings, _ = request.measured(request.values["models"], conditions, against=request.values.get("against"))
    if plan is not None and "k" in request.typed:
        check_supposed_k(findings, plan.k)
    request.deliver(findings)


def with_options(question: Question) -> Callable[..., None]:
    """Return the command of a question: its own options, those of its plan's fields, and the shared ones."""
    ask = question.ask or _measure_and_show
    planned = options.of_plan(question.plan)
    shared = [name for name in _SHARED if _is_taken(name, question)]

    def command(context: typer.Context, **typed_values: Any) -> None:
        typed = _typed(context, typed_values)
        values = {name: typed_values.pop(name) for name in shared}
        plan_values = {name: typed_values.pop(name) for name in planned}
        if question.plan is not None:
            typed_values["plan"] = options.plan_from(question.plan, plan_values, values)
        elif question.ask is None:
            typed_values["plan"] = None
        with ExitStack() as resources:
            ask(**typed_values, request=TypedRequest(question, values, typed, resources))

    parameters = _parameters(question, ask, planned | {name: _SHARED[name] for name in shared})
    return options.with_parameters(command, parameters, question.help or ask.__doc__)


def _typed(context: typer.Context, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of what stands on the command line."""
    sources = {name: context.get_parameter_source(name) for name in values}
    # Before click 8.2, an omitted argument counts as given on the command line, as None.
    return frozenset(
        name
        for name, source in sources.items()
        if source and source.name == "COMMANDLINE" and values[name] is not None
    )


def _parameters(
    question: Question, ask: Callable[..., None], declared: Mapping[str, tuple[Any, Any]]
) -> list[inspect.Parameter]:
    """Return a command's parameters: the context, those of ``ask``, and declared options with its defaults."""
    signature = inspect.signature(ask).parameters.values()
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [parameter for parameter in signature if parameter.name not in ("plan", "request")]
    usual: dict[str, Any] = {} if question.pictured else {"figures": "none"}
    for name, (annotation, default) in declared.items():
        default = question.defaults.get(name, usual.get(name, default))
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        )
    parameters.sort(key=lambda parameter: parameter.name != "models")  # first in the help
    return parameters


def _is_taken(name: str, question: Question) -> bool:
    if name == "models" and question.ask is None:
        return True
    if name in _OF_TEXTS and "inputs" in question.leave_out:
        return name in question.takes
    return name in question.takes if name in _OF_SOME else name not in question.leave_out


def output_folder(command: str, models: Sequence[str], out: Path | None) -> Path:
    """Return the folder of a command's output, by default like ``reports/dispersion-even-pairs-topk-5-seed-1``."""
    from semdiag.presenting.answer import file_safe
    from semdiag.presenting.terminal import tell
    from semdiag_files import InputError, read_json

    name = file_safe(models[0]) if len(models) == 1 else f"{len(models)}-models"
    folder = out or Path("reports") / f"{command}-{name}"
    try:
        results = read_json(folder / "summary.json")["results"]
        models_there = _normalised([str(row["model"]) for row in results])
    except (InputError, OSError, KeyError, TypeError):  # no report
        models_there = None
    if models_there is None or models_there == _normalised(models):
        return folder
    if out is None:
        digest = hashlib.sha256("\n".join(sorted(_normalised(models))).encode()).hexdigest()
        return folder.with_name(f"{folder.name}-{digest[:8]}")
    tell(f"Replaces in {folder}: a report on {', '.join(sorted(models_there))}.")
    return folder


def _normalised(models: Sequence[str]) -> set[str]:
    """Return names that are equal for the same model, however the user wrote it."""
    return {os.path.normpath(model).removesuffix(f"{os.sep}last.pt") for model in models}


def _date() -> str:
    """Return today's date, or that of ``SOURCE_DATE_EPOCH``, as in other programs that write files."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(fixed) if fixed.isdecimal() and len(fixed) < 12 else time.time()
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


_MANY = 4  # checkpoints that are worth the start of other processes


def _several_cores(device: str) -> bool:
    """Return whether models are measured on a CPU with more than one core."""
    from semdiag_files.workers import cores
    from semdiag_models.train import find_device

    return find_device(device).type == "cpu" and cores() > 1


def measure_in_processes(
    loaded: "Sequence[LoadedModel]",
    conditions: "Conditions",
    progress: "SurveyProgress",
    *,
    jobs: int | None,
    ray: str,
) -> "Measurements":
    """Measure models in other processes, by default in as many as there is room for.

    Of one model on a CPU the masks of its reruns are divided among the processes, since models cannot be.
    """
    from semdiag.measuring.survey import one_thread, run_in_parallel, run_order, survey, survey_elsewhere
    from semdiag_files.workers import LocalWorkers, RayWorkers

    divided = None if ray else _with_divided_masks(loaded, conditions, jobs)
    if divided is not None:
        with one_thread():  # as each of the processes has
            return survey(loaded, divided, _StagesAlone(progress))

    def ended(path: str) -> None:
        for _ in range(1 + len(conditions.plans)):
            progress.announce(path, 0)
        progress.advance(0)

    def measure_paths(paths: list[str], decided: "Conditions") -> "list[Measurements]":
        orders = [(path, (path, decided)) for path in paths]
        if ray:
            return run_in_parallel(orders, RayWorkers(ray, 0.0, jobs, run_order), ended)
        largest = max(model.size for model in loaded)
        return run_in_parallel(orders, LocalWorkers(jobs, run_order, len(orders), largest), ended)

    return survey_elsewhere(loaded, conditions, measure_paths)


def _with_divided_masks(
    loaded: "Sequence[LoadedModel]", conditions: "Conditions", jobs: int | None
) -> "Conditions | None":
    """Return conditions whose plans divide the masks of a single model among processes; None if none does."""
    from semdiag.questions.k_sweep import KSweepPlan
    from semdiag_models.train import find_device

    if len(loaded) != 1 or jobs is None or jobs < 2 or find_device(conditions.device).type != "cpu":
        return None
    reruns = [
        plan for plan in conditions.plans if isinstance(plan, KSweepPlan) and plan.reruns(loaded[0].external)
    ]
    if not reruns:
        return None
    plans = tuple(
        replace(plan, jobs=jobs) if isinstance(plan, KSweepPlan) and plan in reruns else plan
        for plan in conditions.plans
    )
    return replace(conditions, plans=plans)


class _StagesAlone(SurveyProgress):
    """Passes on the stages of a survey whose steps are made in other processes."""

    def __init__(self, progress: SurveyProgress) -> None:
        self._progress = progress

    def announce(self, stage: str, steps: int) -> None:
        """Start a stage of unknown length."""
        self._progress.announce(stage, 0)

    def say(self, text: str) -> None:
        """Pass on what a long run will take."""
        self._progress.say(text)
