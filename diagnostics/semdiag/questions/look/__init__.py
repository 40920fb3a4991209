"""What does each head do with one text?"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import YOUR_MODEL, Question, Request


def _ask(
    model: Annotated[Path, typer.Argument(
        help="hf:PATH, a checkpoint (.pt), the folder of a run, or package.module:function.",
        autocompletion=options.models,
    )],
    text: Annotated[str | None, options.command_option(
        "Look at this text, else at the first sample of --inputs or of those that the run held out.",
        metavar="WORDS", show_default=False,
    )] = None,
    k: Annotated[int, options.command_option(
        "In heads that attend to every key, show the k largest scores of each query as kept. The page can change "
        "it.",
    )] = 5,
    out: Annotated[Path | None, options.output_option(
        "The page, an .html file. Default: reports/look-MODEL.html.", metavar="FILE", show_default=False,
    )] = None,
    *,
    request: Request,
) -> None:  # fmt: skip
    from semdiag.capturing.loading import find_checkpoints, load_all
    from semdiag.measuring.words import counted
    from semdiag.presenting.progress import Stages
    from semdiag.presenting.tables import say_sentences
    from semdiag.presenting.terminal import say, tell
    from semdiag.questions.look.measure import fitting_k, see_loaded
    from semdiag.questions.look.page import all_heads, cautions, lead, place_of, write_look
    from semdiag_files import InputError

    if text is not None and request.values["inputs"] is not None:
        raise InputError("--text and --inputs are two inputs: name one of them.")
    place = place_of(str(model), out)
    conditions = request.conditions(samples=1, first=1, batch_size=1)
    quiet = request.values["quiet"]
    first, *more = find_checkpoints([model])
    if more:
        raise InputError(f"{model} holds {1 + len(more)} checkpoints: name one, like {first}.")
    with Stages("measuring", 1, quiet):
        (loaded,) = load_all([model], conditions.config, conditions.head)
        view = see_loaded(loaded, conditions, text)
    chosen = fitting_k(view, k if "k" in request.typed else None)
    write_look(view, chosen, shlex.join(["semdiag", *sys.argv[1:]]), place)
    if quiet:
        return
    for sentence in cautions(view):
        tell(f"semdiag: {sentence}")
    heads = all_heads(view)
    layers = counted(len(view.layers), "layer")
    say_sentences([lead(view)])
    say(f"{model}: {counted(view.length, 'token')}, {counted(len(heads), 'head')} in {layers}")
    say(f"Page: {place}")


QUESTION = Question(
    "look",
    __name__,
    """See one text through every head: which keys each query keeps, its scores, and what would be dropped.

    Writes one page that works without a network: a map of the heads by δ, entropy and weight on the first key.
    A click on a head shows its scores before the softmax, and the gap Δ between the kept and the dropped ones.

    [bold]semdiag look hf:PATH --text "The capital of France is"[/]
    """,
    ask=_ask,
    leave_out=(
        "labels", "samples", "batch_size", "min_keys", "jobs", "ray", "out", "as_json", "per_query", "figures",
    ),
    panel=YOUR_MODEL,
)  # fmt: skip
