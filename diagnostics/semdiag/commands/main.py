"""The program ``semdiag``: its commands, and the border where errors become one line."""

import inspect
import json
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
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from semdiag.commands.check import CHECK, info, list_names, monitor
from semdiag.commands.measuring import command_line, figure_formats, output_folder, refuse_failed, with_options
from semdiag.commands.sweep import sweep
from semdiag.commands.train import train
from semdiag.presenting import options
from semdiag.presenting.question import SAMPLING, Asked, Question
from semdiag.presenting.terminal import apart_from_json, beside_json, say, speak_any_language, tell
from semdiag.questions import registry
from semdiag.questions.registry import QUESTIONS

_REDRAWING = {"redraw", "keep_queries", "show", "out", "as_json", "figures", "quiet"}  # allowed with --from
_PROBE_SAMPLES = 100  # for questions with a command of their own: enough for a first look
_UNFITTING = ArithmeticError, AttributeError, LookupError, TypeError, ValueError  # raised by damaged measurements


def _report(
    noise: Annotated[str, options.NOISE] = "0.01",
    redraw: Annotated[Path | None, typer.Option(
        "--from", help="Redraw a report from its folder, if it was made with --keep-queries; no model is needed.",
    )] = None,
    keep_queries: Annotated[bool, typer.Option(
        "--keep-queries", help="Keep every query in the report's data/, so that --from can redraw it.",
    )] = False,
    thorough: Annotated[bool, options.option(
        "Also measure the loss surface and the empirical Lipschitz estimates. Takes minutes per model.",
        "--thorough",
    )] = False,
    minutes: Annotated[float, options.option(
        "Also run an external model with sparse attention, on as many samples as fit into about this many "
        "minutes. 0: not at all.", "--rerun-minutes", min=0,
    )] = 2,
    lengths: Annotated[str, options.option(
        "Also run an external model on pieces of these lengths, cut from as many samples.", metavar="L,L",
    )] = "",
    show: Annotated[bool, options.output_option("Open the page in the browser.", "--open")] = False,
    *,
    shared: Asked,
) -> None:  # fmt: skip
    """Measure everything and write one report: a page with the verdict, figures, tables and caveats.

    The page opens from disk in any browser. Without a MODEL, [bold]semdiag report[/] reports on every run in
    ./checkpoints.
    """
    from semdiag.measuring.findings.findings import Findings
    from semdiag.measuring.measurements import Measurements
    from semdiag.measuring.plan import ReportOptions
    from semdiag.presenting.answer import MOST
    from semdiag.presenting.progress import Stages
    from semdiag.presenting.tables import say_sentences
    from semdiag.reporting.report import kept_page, one_text_page, write_report
    from semdiag_files import InputError

    values = shared.values
    formats = figure_formats(values["figures"])
    if redraw is not None:
        if values["models"]:
            raise InputError("--from draws saved measurements: do not name models with it.")
        if unused := shared.typed - _REDRAWING:
            names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in unused))
            raise InputError(f"--from draws saved measurements as they are: leave out {names}.")
        whole = (redraw / "data" / "models.parquet").exists()  # a report's folder, not just its data folder
        findings = Findings(Measurements.load(redraw / "data" if whole else redraw, registry.tables().values()))
        look = kept_page(redraw)
    else:
        ks = options.whole_numbers(values["k"], "--k")
        smallest = min((each for each in ks if each > 0), default=None)  # smaller ones are refused with the inputs
        levels = options.positive_numbers(noise, "--noise")
        pieces = options.whole_numbers(lengths, "--lengths") if lengths else ()
        if pieces and not minutes:
            raise InputError("--lengths runs the model with masks, and --rerun-minutes 0 does not: leave one out.")
        asked = ReportOptions(levels, values["seed"], smallest, thorough, 60 * minutes or None, pieces)
        reported_plans = [kind.for_report(asked) for kind in registry.plans()]
        plans = tuple(plan for plan in reported_plans if plan is not None)
        few = {"probe_samples": _PROBE_SAMPLES, "k_lowers": "k" not in shared.typed}
        conditions = shared.conditions(keep_queries, k=ks, plans=plans, **few)
        findings, loaded = shared.measured(values["models"], conditions, keep_queries=keep_queries)
        with apart_from_json(values["as_json"]):
            look = one_text_page(loaded, conditions)
    models = [str(model) for model in findings.measurements.models["model"]]
    folder = shared.folder or output_folder("report", models, values["out"])
    try:
        with Stages("drawing", 1, values["quiet"]) as bar:
            page, content = write_report(
                findings, folder, command_line(), formats, keep_queries, progress=bar, look=look
            )
    except Exception as error:
        if redraw is None and keep_queries and not isinstance(error, InputError):
            place = shared.folder.path
            saved = Path(tempfile.mkdtemp(prefix=f"{place.name}-measurements-", dir=place.parent))
            findings.measurements.save(saved)
            tell(f"semdiag: the report was not drawn. Its measurements are kept: semdiag report --from {saved}")
        if redraw is None or isinstance(error, InputError) or not isinstance(error, _UNFITTING):
            raise
        said = " ".join(str(error).split())[:120]
        raise InputError(
            f"{redraw} cannot be drawn: its files do not fit together ({type(error).__name__}: {said})."
        ) from error
    if values["as_json"]:
        typer.echo(json.dumps(content))
    if not values["quiet"]:
        with beside_json(values["as_json"]):
            say_sentences(content["verdict"][:MOST])
            say(f"Report: {page}")
    if show:
        webbrowser.open(page.resolve().as_uri())
    refuse_failed(findings, "--rerun-minutes 0")


REPORT = Question("report", __name__, ask=_report, takes=("models", "k", *SAMPLING), defaults={"k": "5"})


# Options that --help leaves to --help-all: what few people change.
_RARE = (
    "max_length tokenizer labels batch_size dtype seed min_keys queries max_queries config head jobs ray "
    "per_query figures quiet max_k every thorough keep_queries redraw show junit exit_zero every_layer layout "
    "keys draws absolute block dtype_b mlp_width head_width activation dropout inverse_temperature "
    "pad_as_token norm pooling hash_rounds hash_bits hashes clusters centroid_decay score_gradient "
    "holdout_samples fresh_samples seeds learning_rate_decay gradient_clip optimizer weight_decay precision "
    "compiled query_key_scale frozen exact snapshots overwrite threads text holdout_text vocabulary heads "
    "width blocks global_tokens train_samples gpus_per_run in_a_step retries records planes radius grid "
)
_PLACEHOLDERS = {"<int": "N", "<float": "X", "<path": "PATH", "<str": "TEXT", "<bool": ""}  # by Typer's own


class RepeatedOptions(TyperCommand):
    """A command with short and whole help; ``--k 8 --k 32`` is ``--k 8,32`` where the placeholder has commas."""

    whole = False  # whether the help shows every option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; without the rare options unless all were asked for."""
        rare = [p for p in self.params if p.name in _RARE.split() and (p.name, self.name) != ("seed", "train")]
        for param in self.params:
            param.hidden = param in rare and not self.whole  # type: ignore[attr-defined]
            own = param.display_type(ctx) if hasattr(param, "display_type") else ""  # since Typer 0.26
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
            elif getattr(param, "metavar", None) is None:
                param.metavar = _PLACEHOLDERS.get(own.split()[0].rstrip(">")) if own else None
        if rare and not self.whole:
            self.epilog = f"{len(rare)} more options: {ctx.command_path} --help-all"
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


def add(question: Question, panel: str = "Attention, quantity by quantity") -> None:
    """Add the command of a question."""
    _add(question.name, with_options(question), panel)


# The groups of --help, in this order; any other question is one about a quantity.
_PANELS = {
    "Your model: from Hugging Face, or built by a function of yours": (
        "report", "k-sweep", "look", "compare", "selections",
    ),
    "Attention, quantity by quantity": (),
    "Training": ("train", "sweep", "monitor", "convergence"),
    "Checkpoints": ("info", "check", "list"),
}  # fmt: skip
_commands = {name: with_options(each) for name, each in QUESTIONS.items() if each.help or each.ask}
_commands |= {"report": with_options(REPORT), "check": with_options(CHECK), "train": train, "sweep": sweep}
_commands |= {"info": info, "monitor": monitor, "list": list_names}
_named = {name for names in _PANELS.values() for name in names}
for title, names in _PANELS.items():
    for name in names or (name for name in _commands if name not in _named):
        _add(name, _commands[name], title)


def _show_version(wanted: bool) -> None:
    if wanted:
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
    speak_any_language()
    os.environ["MPLBACKEND"] = "agg"  # figures become files, whatever the user's programs show them with
    debug = "--debug" in sys.argv[1:]
    sys.argv = [word for word in sys.argv if word != "--debug"]  # it may stand anywhere; no command takes it
    RepeatedOptions.whole = "--help-all" in sys.argv[1:]
    sys.argv = ["--help" if word == "--help-all" else word for word in sys.argv]
    warnings.filterwarnings("default", category=UserWarning, module="semdiag")  # said, never raised
    warnings.showwarning = lambda message, *_, **__: tell(f"semdiag: {' '.join(str(message).split())}")
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
    except SystemExit as left:
        if not isinstance(left.__context__, BrokenPipeError):
            *_, (last, _) = traceback.walk_tb(left.__traceback__)
            if last.f_globals["__name__"].partition(".")[0] in ("typer", "click", "rich"):  # completion of words
                raise
            _refuse(f"The model's code ended the program ({_raised(left)}).")
        _leave_unread()  # Typer and rich exit like this, with the exit code of a failed check
    except UnicodeEncodeError as error:
        other = "" if sys.getfilesystemencoding() == "utf-8" else ", or set PYTHONUTF8=1 if it is UTF-8"
        _refuse(f"{error.object[:200]!r} holds bytes that are not text here. Rename the file{other}.")
    except OSError as error:  # a full disk, a name that is too long, a folder without permission
        _refuse(f"{error.filename or 'A file'} cannot be read or written: {error.strerror or error}.")
    except Exception as error:
        # Looked up, not imported: importing the package would import torch, and make --help slow.
        errors = sys.modules.get("semdiag_files.errors")
        if errors is not None and isinstance(error, errors.InputError):
            _refuse(str(error))
        if isinstance(error, ModuleNotFoundError) and error.name in _LIBRARIES:
            _refuse(f"{error.name} is not installed. Install it with: pip install {error.name}")
        if "device-side assert" in str(error):  # CUDA tells of an index later, wherever that may be, and not which
            _refuse(
                "An index lies outside its table on the GPU, most often a token beyond the model's vocabulary. "
                "The same command with --device cpu says which."
            )
        _give_up(error, debug)
    except BaseException as error:  # of no kind that a library would raise
        _refuse(f"The model's code ended the program ({_raised(error)}).")
    else:
        sys.exit(code if isinstance(code, int) else 0)


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
