"""How far can a top-k be trusted?"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from semdiag.presenting import options
from semdiag.presenting.options import command_option
from semdiag.presenting.question import YOUR_MODEL, Question, Request

if TYPE_CHECKING:
    from pandas import DataFrame

    from semdiag.presenting.answer import Answer

_asked = partial(command_option, panel="What is asked")
_OF_MODELS = ("inputs", "max_length", "tokenizer", "batch_size", "device", "dtype", "head", "save")
_OF_FILES = ("against", "causal", "keys", "layout")
_CERTIFIED = "bfloat16"  # unless the user names another format


def _ask(
    file: Annotated[Path, typer.Argument(
        help="A .npz, .safetensors or .parquet file with indices (rows × k, -1 for none) and, where known, scores "
        "(rows × n). Or a model, hf:PATH or package.module:function.", show_default=False,
    )],
    against: Annotated[Path | None, typer.Argument(
        help="What another engine chose for the same rows: compare the two.", metavar="FILE", show_default=False,
    )] = None,
    format: Annotated[str, _asked(
        "The precision in which the engine computed its scores: float32, bfloat16, float16, float8_e4m3fn, "
        "float8_e5m2, float64. It says what rounding explains; of a model, what is certified (then bfloat16 by "
        "default). Of files with q and k also that of these, with scales: mxfp4, mxfp8, fp8-row, fp8-block, "
        "fp8-block-power, int8-row.", metavar="NAME",
    )] = "float32",
    causal: Annotated[bool, _asked(
        "Keys after the query may not be chosen; the queries are the last tokens.", "--causal",
    )] = False,
    keys: Annotated[int | None, _asked(
        "How many keys there are, if the file has no scores.", show_default=False, rare=True,
    )] = None,
    layout: Annotated[str, _asked(
        "With two files: the dimensions before k, of batch, sequence, tokens, layers, heads; behind a colon "
        "those of the second file. Default: tokens; tokens,layers; batch,sequence,layers; "
        "batch,sequence,layers,heads.", metavar="NAME,NAME[:NAME,NAME]", show_default=False, rare=True,
    )] = "",
    save: Annotated[Path | None, options.output_option(
        "Of a model: write what it chooses to this file. Two such files can be compared.",
        metavar="FILE.npz", show_default=False,
    )] = None,
    rows: Annotated[Path | None, options.output_option(
        "Write every faulty row to this file; of two files, every difference that rounding does not explain.",
        metavar="FILE.csv", show_default=False,
    )] = None,
    *,
    request: Request,
) -> None:  # fmt: skip
    from semdiag_files import InputError

    of_model = _is_model(file, request)
    if of_model or against is not None:
        _refuse_scales(format)
    listing = None if rows is None else Listing(rows)
    if of_model:
        _own(file, format if "format" in request.typed else _CERTIFIED, request, save, listing)
    if against is not None:
        if causal or keys is not None:
            raise InputError("--causal and --keys apply to one file. Check each of the two alone.")
        _compare(file, against, format, layout, request, listing)
    if layout:
        raise InputError("--layout applies to two files: name what another engine chose.")
    _check(file, format, causal, keys, request, listing)


def _refuse_scales(format: str) -> None:
    """Refuse a format of queries and keys where these are not read."""
    from semdiag.mathematics.block_formats import SCALED
    from semdiag_files import InputError

    if format in SCALED:
        raise InputError(f"--format {format} is of q and k with scales: it applies to one file that holds them.")


def _is_model(file: Path, request: Request) -> bool:
    """Return whether a name is a model's; options of the other kind are refused."""
    from semdiag.capturing import pretrained
    from semdiag.capturing.loading import names_factory
    from semdiag_files import InputError

    of_model = str(file).startswith(pretrained.PREFIX) or names_factory(str(file))
    for name in (name for name in (_OF_FILES if of_model else _OF_MODELS) if name in request.typed):
        word = "A second file" if name == "against" else f"--{name.replace('_', '-')}"
        what = "files" if of_model else "a model (hf:PATH)"
        file_kind = "a model" if of_model else "not one"
        raise InputError(f"{word} applies to {what}, and {file} is {file_kind}. Leave it out.")
    return of_model


class Listing:
    """Faulty rows, to be written to a file."""

    def __init__(self, path: Path) -> None:
        from semdiag.selections.files import require_suffix

        require_suffix(path, "--rows", ".csv")
        self._path = path

    def write(self, tables: "Sequence[DataFrame]", quiet: bool) -> None:
        """Write tables of rows, one below the other."""
        import pandas as pd

        from semdiag.presenting.terminal import tell
        from semdiag.selections.files import write_output

        rows = pd.concat(tables, ignore_index=True)
        write_output(self._path, rows.to_csv(index=False).encode())
        if not quiet:
            tell(f"Written: {self._path}, {len(rows):,} rows")


def _own(model: Path, format: str, request: Request, save: Path | None, listing: Listing | None) -> NoReturn:
    from semdiag.capturing.loading import load
    from semdiag.mathematics.rounding import number_format
    from semdiag.measuring.measure import DTYPES
    from semdiag.measuring.survey import inputs_of
    from semdiag.presenting.terminal import tell
    from semdiag.questions.selections.answer import own_answer, own_summary
    from semdiag.selections.dense import kept_by_loaded
    from semdiag.selections.own import Saving, own_selections
    from semdiag_files import InputError
    from semdiag_models.train import find_device

    kind = number_format(format)
    conditions = request.conditions()
    quiet = request.values["quiet"]
    saving = None if save is None else Saving(save)
    device = find_device(conditions.device)
    loaded = load(model, head=conditions.head)
    if not loaded.external:
        raise InputError(f"{model} is an encoder of semdiag's, whose attention is measured by semdiag info.")
    batches, *_ = inputs_of(loaded, conditions)
    dtype = conditions.decided([loaded], device).dtype
    measured = own_selections(loaded, batches, kind, device, DTYPES[dtype], saving)
    if saving is not None:
        saving.write()
        if not quiet:
            tell(f"Written: {save}")
    if listing is not None:
        listing.write([each.faulty for each in measured.selections], quiet)
    dense = kept_by_loaded(loaded, batches, device, DTYPES[dtype])
    options = _provenance(format=kind.name, inputs=str(conditions.inputs), dtype=dtype, device=device.type)
    _deliver(own_summary(measured, str(model), kind.name, options, dense), request, own_answer)


def _check(
    file: Path, format: str, causal: bool, keys: int | None, request: Request, listing: Listing | None
) -> NoReturn:
    from semdiag.questions.selections.answer import check_answer, check_summary
    from semdiag.selections.check import check_file
    from semdiag.selections.files import read_selections

    selections = read_selections(file, format)
    checked = [check_file(each, causal, format, keys) for each in selections]
    if listing is not None:
        listing.write([each.faulty for each in checked], request.values["quiet"])
    facts = {"ignored": list(selections[0].ignored), "format_named": "format" in request.typed}
    summary = check_summary(checked, str(file), _provenance(format=checked[0].format, causal=causal), facts)
    _deliver(summary, request, check_answer)


def _compare(
    first: Path, second: Path, format: str, layout: str, request: Request, listing: Listing | None
) -> NoReturn:
    from semdiag.questions.selections.answer import comparison_answer, comparison_summary
    from semdiag.selections.compare import compare_files
    from semdiag.selections.files import read_selections

    of_first, colon, of_second = layout.partition(":")
    layouts = of_first, of_second if colon else of_first
    a, b = (read_selections(file, format, limits=False) for file in (first, second))
    compared = compare_files(a, b, format, layouts)
    if listing is not None:
        listing.write([each.unexplained for each in compared], request.values["quiet"])
    options = _provenance(format=compared[0].format, layout=layout)
    facts = {"format_named": "format" in request.typed, "layout_named": bool(layout)}
    _deliver(comparison_summary(compared, str(first), str(second), options, facts), request, comparison_answer)


def _provenance(**options: Any) -> dict[str, Any]:
    import sys
    from importlib.metadata import version

    import torch

    versions = {"semdiag": version("semdiag"), "torch": str(torch.__version__)}
    return {**versions, **options, "command": ["semdiag", *sys.argv[1:]]}


def _deliver(
    summary: dict[str, Any], request: Request, answer_of: "Callable[[dict[str, Any]], Answer]"
) -> NoReturn:
    from semdiag.presenting.answer import sentences_of, show
    from semdiag.presenting.tables import say_sentences
    from semdiag.presenting.terminal import print_json

    if request.values["as_json"]:
        print_json(summary)
    if not request.values["quiet"]:
        answer = answer_of(summary)
        say_sentences(sentences_of(answer.opening or ()))
        show(answer)
    raise typer.Exit(int(not all(result["passed"] for result in summary["results"])))


QUESTION = Question(
    "selections",
    __name__,
    """Check whether a selection is the top-k of its scores, or whether two engines choose alike.

    Selections are what sparse-attention indexers, routers of experts and top-k kernels return. Each row is exact,
    a legal tie, within rounding, or faulty: wrong, missing, duplicate, padding, future, out of range. Exit code 1:
    a row is faulty, 0: none is, 2: the input is wrong, so that a kernel's test can call it. In Python:
    semdiag.check_selection.

    With two files: overlap, the layer that differs first, and how many differences rounding explains. Exit code
    1: it does not explain all of them.

    With a model: what its routers and indexers choose on --inputs, by which margin, and how many choices are safe
    from rounding.

    [bold]semdiag selections indexer.npz --format bfloat16 --causal[/]

    [bold]semdiag selections training.npz serving.npz --format bfloat16[/]

    [bold]semdiag selections hf:MODEL --inputs texts.txt[/]
    """,
    ask=_ask,
    panel=YOUR_MODEL,
    leave_out=("labels", "samples", "seed", "min_keys", "config", "jobs", "ray", "out", "per_query", "figures"),
)
