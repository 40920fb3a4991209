"""What would a learned indexer cost my model, before one is trained?"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.options import command_option
from semdiag.presenting.question import YOUR_MODEL, Question, Request

if TYPE_CHECKING:
    from semdiag.questions.indexer.measure import FitPlace

_asked = partial(command_option, panel="What is asked")
_OF_FITS = ("width", "passes", "save")  # what an indexer that is fitted already has


def _ask(
    model: Annotated[Path, typer.Argument(
        help="A causal language model: hf:PATH or package.module:function.", show_default=False,
        autocompletion=options.models,
    )],
    k: Annotated[int, _asked("How many keys each query keeps.", "--k", min=1)] = 256,
    width: Annotated[int, _asked("Dimensions of the indexers' queries and keys.", "--width", min=1)] = 64,
    passes: Annotated[int, _asked("Steps of the fit for each text and layer.", "--passes", min=1)] = 16,
    save: Annotated[Path | None, options.output_option(
        "Keep the fit here: after a kill the same command goes on.", metavar="FILE.safetensors",
        show_default=False,
    )] = None,
    load: Annotated[Path | None, _asked(
        "Take this file's indexers, and the texts that they were not fitted to.", metavar="FILE.safetensors",
        show_default=False,
    )] = None,
    *,
    request: Request,
) -> None:  # fmt: skip
    from semdiag.presenting.answer import sentences_of, show
    from semdiag.presenting.progress import Stages
    from semdiag.presenting.tables import say_sentences
    from semdiag.presenting.terminal import print_json
    from semdiag.questions.indexer.answer import indexer_answer, indexer_summary
    from semdiag.questions.indexer.measure import fitted_price
    from semdiag.selections.learned import FitOptions

    place = _place_of(save, load, request)
    values = request.values
    first = values["samples"] if "samples" in request.typed else None
    conditions = request.conditions(batch_size=1, first=first)
    options = FitOptions(width=width, passes=passes, seed=values["seed"])
    with Stages("measuring", 3 if place.fits else 2, values["quiet"], "1 model") as bar:
        summary = indexer_summary(fitted_price(str(model), conditions, k, options, place, bar))
    if values["as_json"]:
        print_json(summary)
    if not values["quiet"]:
        answer = indexer_answer(summary)
        say_sentences(sentences_of(answer.opening or ()))
        show(answer)


def _place_of(save: Path | None, load: Path | None, request: Request) -> "FitPlace":
    """Return where fitted indexers are kept; options that contradict each other are refused."""
    from semdiag.questions.indexer.measure import FitPlace
    from semdiag.selections.files import require_suffix
    from semdiag_files import InputError

    if load is not None:
        for name in _OF_FITS:
            if name in request.typed:
                raise InputError(f"--{name} is of a fit, and --load fits nothing: leave one of them out.")
        return FitPlace(load, fits=False)
    if save is not None:
        require_suffix(save, "--save", ".safetensors")
    return FitPlace(save)


QUESTION = Question(
    "indexer",
    __name__,
    """Ask what a learned indexer would keep of a model's attention, and what it would cost, before one is trained.

    Models with sparse attention, like DeepSeek's, choose each query's keys by a small indexer. This fits one to
    every layer of your model as it is, on three quarters of the texts, and lets it choose on the others: weight
    kept, recall, loss and perplexity, beside exact top-k, the newest keys and random ones.

    Texts are cut to 4 k tokens, unless --max-length says otherwise. Fewer or shorter ones (--samples) take less
    time; whether the fit has come to its end is said.

    [bold]semdiag indexer hf:PATH --inputs texts.txt --k 256[/]

    [bold]semdiag indexer hf:PATH --inputs texts.txt --k 256 --save fit.safetensors[/]

    [bold]semdiag indexer hf:PATH --inputs texts.txt --k 64 --load fit.safetensors[/]
    """,
    ask=_ask,
    panel=YOUR_MODEL,
    leave_out=("labels", "batch_size", "min_keys", "config", "jobs", "ray", "out", "per_query", "figures"),
)
