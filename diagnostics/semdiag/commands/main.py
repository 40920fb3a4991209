"""The program ``semdiag``: its commands, and the border where errors become one line."""

import inspect
import os
import sys
import tempfile
import traceback
import warnings
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from semdiag.commands.check import CHECK, info, list_names, monitor
from semdiag.commands.measuring import command_line, figure_formats, output_folder, refuse_failed, with_options
from semdiag.commands.sweep import sweep
from semdiag.commands.train import train
from semdiag.presenting import options
from semdiag.presenting.question import CHECKPOINTS, PANELS, SAMPLING, TRAINING, YOUR_MODEL, Question, Request
from semdiag.presenting.terminal import print_json, say, speak_any_language, stdout_for_json, tell
from semdiag.questions import registry
from semdiag.questions.registry import QUESTIONS

if TYPE_CHECKING:
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.plan import ReportOptions

    _Drawn = tuple[Findings, Path, dict[str, Any]]  # what was drawn, its page, and its content as plain values

_REDRAWING = {"redraw", "keep_queries", "show", "out", "as_json", "figures", "quiet"}  # allowed with --from
_PROBE_SAMPLES = 100  # for questions with a command of their own: enough for a first look
_UNFITTING = ArithmeticError, AttributeError, LookupError, TypeError, ValueError  # raised by damaged measurements


def _report(
    noise: Annotated[str, options.NOISE] = "0.01",
    redraw: Annotated[Path | None, typer.Option(
        "--from", help="Redraw a report from its folder, if it was made with --keep-queries; no model is needed.",
        hidden=True,
    )] = None,
    keep_queries: Annotated[bool, typer.Option(
        "--keep-queries", help="Keep every query in the report's data/, so that --from can redraw it.",
        hidden=True,
    )] = False,
    thorough: Annotated[bool, options.command_option(
        "Also measure the loss surface and the empirical Lipschitz estimates, and secants of texts above 1,024 "
        "tokens. Takes minutes per model.",
        "--thorough", rare=True,
    )] = False,
    minutes: Annotated[float | None, options.command_option(
        "Run the models with masks on as many samples as fit into about this many minutes each. 0: not at all. "
        "Default: on all.", "--rerun-minutes", min=0, show_default=False,
    )] = None,
    lengths: Annotated[str, options.command_option(
        "Also run an external model on pieces of these lengths, cut from as many samples.", metavar="L,L",
    )] = "",
    show: Annotated[bool, options.output_option("Open the page in the browser.", "--open", rare=True)] = False,
    *,
    request: Request,
) -> None:  # fmt: skip
    """Measure everything and write one report: a page with the verdict, figures, tables and caveats.

    The page opens from disk in any browser. Without a MODEL, [bold]semdiag report[/] reports on every run in
    ./checkpoints.
    """
    from semdiag.measuring.findings.findings import seed_sentence
    from semdiag.presenting.answer import MOST
    from semdiag.presenting.tables import say_sentences

    values = request.values
    if redraw is not None:
        findings, page, content = _redraw(redraw, request, keep_queries)
    else:
        report_options = _report_options(noise, thorough, minutes, lengths, values)
        findings, page, content = _measure_and_draw(report_options, request, keep_queries)
    if values["as_json"]:
        print_json(content)
    if not values["quiet"]:
        say_sentences(content["verdict"][:MOST])
        say_sentences(filter(None, [seed_sentence(findings.measurements.models)]))
        say(f"Report: {page}")
    if show:
        webbrowser.open(page.resolve().as_uri())
    refuse_failed(findings, "--rerun-minutes 0")


def _report_options(
    noise: str, thorough: bool, minutes: float | None, lengths: str, values: dict[str, Any]
) -> "ReportOptions":
    """Return the options that plans read for a report."""
    from semdiag.measuring.plan import ReportOptions
    from semdiag_files import InputError

    ks = options.whole_numbers(values["k"], "--k")
    smallest = min((k for k in ks if k > 0), default=None)  # smaller ones are refused with the inputs
    levels = options.positive_numbers(noise, "--noise")
    pieces = options.whole_numbers(lengths, "--lengths") if lengths else ()
    if pieces and minutes == 0:
        raise InputError("--lengths runs the model with masks, and --rerun-minutes 0 does not: leave one out.")
    seconds = 60 * minutes if minutes else None
    return ReportOptions(levels, values["seed"], smallest, thorough, minutes != 0, seconds, pieces)


def _measure_and_draw(report_options: "ReportOptions", request: Request, keep_queries: bool) -> "_Drawn":
    """Measure what every question of a report needs, and draw it; what was measured is saved if drawing fails."""
    from semdiag.presenting.progress import Stages
    from semdiag.reporting.report import one_text_page, write_report
    from semdiag_files import InputError

    values = request.values
    formats = figure_formats(values["figures"])
    plans = [plan for kind in registry.plans() if (plan := kind.for_report(report_options)) is not None]
    conditions = request.conditions(
        keep_queries,
        k=options.whole_numbers(values["k"], "--k"),
        plans=tuple(plans),
        probe_samples=_PROBE_SAMPLES,
        k_lowers="k" not in request.typed,
    )
    findings, loaded = request.measured(values["models"], conditions, keep_queries=keep_queries)
    look = one_text_page(loaded, conditions)
    folder = request.folder
    try:
        with Stages("drawing", 1, values["quiet"]) as bar:
            page, content = write_report(
                findings, folder, command_line(), formats, keep_queries, progress=bar, look=look
            )
    except Exception as error:
        if keep_queries and not isinstance(error, InputError):
            prefix = f"{folder.path.name}-measurements-"
            saved = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.path.parent))
            findings.measurements.save(saved)
            tell(f"semdiag: the report was not drawn. Its measurements are kept: semdiag report --from {saved}")
        raise
    return findings, page, content


def _redraw(folder: Path, request: Request, keep_queries: bool) -> "_Drawn":
    """Draw the saved measurements of a report once more."""
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.measurements import Measurements
    from semdiag.presenting.progress import Stages
    from semdiag.reporting.report import kept_page, write_report
    from semdiag_files import InputError

    values = request.values
    formats = figure_formats(values["figures"])
    if values["models"]:
        raise InputError("--from draws saved measurements: do not name models with it.")
    if unused := request.typed - _REDRAWING:
        names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in unused))
        raise InputError(f"--from draws saved measurements as they are: leave out {names}.")
    data = folder / "data"
    if not (data / "models.parquet").exists():  # the data folder itself
        data = folder
    findings = Findings(Measurements.load(data, registry.tables().values()))
    look = kept_page(folder)
    models = [str(model) for model in findings.measurements.models["model"]]
    out = output_folder("report", models, values["out"])
    try:
        with Stages("drawing", 1, values["quiet"]) as bar:
            page, content = write_report(
                findings, out, command_line(), formats, keep_queries, progress=bar, look=look
            )
    except InputError:
        raise
    except _UNFITTING as error:
        text = " ".join(str(error).split())[:120]
        raise InputError(
            f"{folder} cannot be drawn: its files do not fit together ({type(error).__name__}: {text})."
        ) from error
    return findings, page, content


REPORT = Question(
    "report",
    __name__,
    ask=_report,
    takes=("models", "k", *SAMPLING),
    defaults={"k": "5"},
    panel=YOUR_MODEL,
    pictured=True,
)


_PLACEHOLDERS = {"<int": "N", "<float": "X", "<path": "PATH", "<str": "TEXT", "<bool": ""}  # by Typer's own


class RepeatedOptions(TyperCommand):
    """A command with short and whole help; ``--k 8 --k 32`` is ``--k 8,32`` where the placeholder has commas."""

    every_option = False  # whether the help shows the rare ones, too

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # An option without help has another name today, and is never shown.
        self.rare: list[Any] = [
            param for param in self.params if getattr(param, "hidden", False) and getattr(param, "help", None)
        ]
        for param in self.rare:
            param.hidden = False  # only --help leaves it out: completion offers it

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with stdout_for_json(ctx.params.get("as_json", False)):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; without the rare options unless all were asked for."""
        for param in self.params:
            kind = param.display_type(ctx) if hasattr(param, "display_type") else ""  # since Typer 0.26
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
            elif getattr(param, "metavar", None) is None:
                param.metavar = _PLACEHOLDERS.get(kind.split()[0].rstrip(">")) if kind else None
        for param in self.rare:
            param.hidden = not self.every_option
        if self.rare and not self.every_option:
            self.epilog = f"{len(self.rare)} more options: {ctx.command_path} --help-all"
        super().format_help(ctx, formatter)

    def make_parser(self, ctx: Any) -> Any:
        """Return a parser that keeps every value."""
        parser: Any = super().make_parser(ctx)
        lists = {p.name for p in self.params if "," in (getattr(p, "metavar", None) or "")}
        single = {}
        for option in (*parser._long_opt.values(), *parser._short_opt.values()):
            if option.action == "store" and option.nargs == 1:
                option.action = "append"  # click would keep only the last
                single[option.dest] = option.obj
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            options, rest, order = parse(args=args)
            for name in single.keys() & options.keys():
                values = options[name]
                if len(values) > 1 and name not in lists:
                    ctx.fail(f"{single[name].opts[0]} is given {len(values)} times, and takes one value.")
                options[name] = values[0] if len(values) == 1 else ",".join(values)
            return options, rest, order

        parser.parse_args = parse_args
        return parser


# Typer bundles click under a name that differs between its versions; its own exports lead there.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_LONGEST = 2000  # characters of a message
_BROKEN_PIPE = 141
_LIBRARIES = (
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "seaborn",
    "matplotlib",
    "jinja2",
    "filelock",
    "loky",
)
_OWN_ERROR = 70  # EX_SOFTWARE of sysexits.h


class _Program(TyperGroup):
    """The command group; Ctrl-C becomes an Abort for :func:`main`, not one of Typer's exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure what attention does in trained transformers: yours, or ones that semdiag trains. To begin: "
    "[bold]semdiag report hf:PATH --inputs texts.txt[/], or [bold]semdiag report[/] for the reference "
    "checkpoints.",
)


def _reflowed(docstring: str) -> str:
    """Return a command's help without the line breaks of its source, except in indented examples."""
    parts = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else " ".join(part.split()) for part in parts)


def _add(name: str, command: Callable[..., None], panel: str) -> None:
    help_text = _reflowed(command.__doc__ or "")
    app.command(name, cls=RepeatedOptions, help=help_text, rich_help_panel=panel)(command)


def add(question: Question) -> None:
    """Add the command of a question."""
    _add(question.name, with_options(question), question.panel)


def _commands() -> list[tuple[str, Callable[..., None], str]]:
    """Return name, function and group of every command, in the order of ``semdiag --help``."""
    commands: list[tuple[str, Callable[..., None], str]] = [
        ("train", train, TRAINING),
        ("sweep", sweep, TRAINING),
        ("monitor", monitor, TRAINING),
        ("info", info, CHECKPOINTS),
        (CHECK.name, with_options(CHECK), CHECK.panel),
        ("list", list_names, CHECKPOINTS),
    ]
    questions = [REPORT, *(question for question in QUESTIONS.values() if question.help or question.ask)]
    commands += [(question.name, with_options(question), question.panel) for question in questions]
    return sorted(commands, key=lambda command: PANELS.index(command[2]))


for name, command, panel in _commands():
    _add(name, command, panel)


def _show_version(show: bool) -> None:
    if show:
        typer.echo(version("semdiag"))
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error of semdiag's own. Goes anywhere.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program: exit code 0 fine, 1 a check failed, 2 the input was wrong, 130 interrupted."""
    debug = _prepare()
    if not all(map(str.strip, sys.argv[1:])):  # as a path, an empty word would be the working folder
        _refuse("An argument of the command is empty. Is a shell variable unset?")
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        _explain(error)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("semdiag: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        _leave_unread()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            _refuse_end(end)
        _leave_unread()  # Typer and rich exit like this, with the exit code of a failed check
    except Exception as error:
        _refuse_input(error)
        _give_up(error, debug)
    except BaseException as error:  # of no kind that a library would raise
        _refuse(f"The model's code ended the program ({_raised(error)}).")
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _prepare() -> bool:
    """Set up streams, warnings and figures, take out words that no command takes; return whether to debug."""
    speak_any_language()
    os.environ["MPLBACKEND"] = "agg"  # figures become files, whatever the user's programs show them with
    debug = "--debug" in sys.argv[1:]
    sys.argv = [word for word in sys.argv if word != "--debug"]  # it may stand anywhere; no command takes it
    RepeatedOptions.every_option = "--help-all" in sys.argv[1:]
    sys.argv = ["--help" if word == "--help-all" else word for word in sys.argv]
    warnings.filterwarnings("default", category=UserWarning, module="semdiag")  # said, never raised
    warnings.showwarning = lambda message, *_, **__: tell(f"semdiag: {' '.join(str(message).split())}")
    return debug


def _refuse_end(end: SystemExit) -> NoReturn:
    """Tell that a model's code ended the program, unless a library of the command line did."""
    *_, (last, _) = traceback.walk_tb(end.__traceback__)
    if last.f_globals["__name__"].partition(".")[0] in ("typer", "click", "rich"):  # completion of words
        raise end
    _refuse(f"The model's code ended the program ({_raised(end)}).")


def _refuse_input(error: Exception) -> None:
    """End with one line for an error of the user's input, files or machine; return from one of semdiag's own."""
    # Looked up, not imported: importing the package would import torch, and make --help slow.
    errors = sys.modules.get("semdiag_files.errors")
    if errors is not None and isinstance(error, errors.InputError):
        _refuse(str(error))
    if isinstance(error, UnicodeEncodeError):
        remedy = "Rename the file."
        if sys.getfilesystemencoding() != "utf-8":
            remedy = "Rename the file, or set PYTHONUTF8=1 if it is UTF-8."
        _refuse(f"{error.object[:200]!r} holds bytes that are not text here. {remedy}")
    if isinstance(error, OSError):  # a full disk, a name that is too long, a folder without permission
        _refuse(f"{error.filename or 'A file'} cannot be read or written: {error.strerror or error}.")
    if isinstance(error, ModuleNotFoundError) and error.name in _LIBRARIES:
        _refuse(f"{error.name} is not installed. Install it with: pip install {error.name}")
    if "device-side assert" in str(error):  # CUDA tells of an index later, wherever that may be, and not which
        _refuse(
            "An index lies outside its table on the GPU, most often a token beyond the model's vocabulary. "
            "The same command with --device cpu says which."
        )


def _explain(error: _UsageError) -> NoReturn:
    if not error.format_message():  # no command was given, and the help has been printed
        sys.exit(0)
    where = "semdiag" if error.ctx is None else error.ctx.command_path
    _refuse(f"{error.format_message()} See: {where} --help")


def _raised(error: BaseException) -> str:
    """Return what was raised, and where."""
    *_, last = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
    return f"{text}, in {last.name}, line {last.lineno} of {Path(last.filename).name}"


def _leave_unread() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.close()
    sys.exit(_BROKEN_PIPE)


def _give_up(error: Exception, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    more = "" if debug else ", with what the same command prints with --debug"
    tell(f"semdiag: an error of semdiag itself, not of your input: {_raised(error)}. Please report it{more}.")
    sys.exit(_OWN_ERROR)


def _refuse(message: str) -> NoReturn:
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 2 :]}"
    tell(f"semdiag: {message}".replace("\n", " "))
    sys.exit(2)


if __name__ == "__main__":
    main()
