"""``semdiag list``."""

from typing import Annotated

import typer

from semdiag.presenting import completion
from semdiag.presenting.terminal.terminal import terminal


def list_names(
    what: Annotated[
        str,
        typer.Argument(
            help="tasks, attentions or metrics. Default: all three.",
            autocompletion=completion.names(completion.LISTS),
        ),
    ] = "all",
) -> None:
    """List the tasks with their baselines, the kinds of attention, and the metrics.

    [bold]semdiag list tasks[/]
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from semdiag_models import ATTENTIONS, TASKS, Text
    from semdiag_models.errors import unknown_name

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
    metrics = Table("metric", "definition", "command", title="Metrics", box=SIMPLE_HEAD)
    for row in _METRICS:
        metrics.add_row(*row)
    tables = {"tasks": tasks, "attentions": attentions, "metrics": metrics}
    if what not in (*tables, "all"):
        raise unknown_name("list", what, tables)
    console = terminal()
    for name, table in tables.items():
        if what in (name, "all"):
            console.print(table)


def _out_of_reach() -> str:
    """Return which tasks local attention cannot represent, at the recipes' lengths and blocks."""
    from semdiag_models import TASKS, configure
    from semdiag_models.attention.kinds import LOCAL
    from semdiag_models.attention.reach import cannot_represent

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
_METRICS = (
    ("semantic dispersion δ", "range of the scores a query attends to, nats", "semdiag dispersion"),
    ("semantic separation Δ", "smallest kept score minus largest dropped one, nats", "semdiag separation"),
    ("key load", "number of queries that attend to a key", "semdiag separation"),
    ("softmax stability ξ", "change of attention weights per change of scores, ℓ1", "semdiag stability"),
    ("response", "mean change of attention weights under input noise", "semdiag stability"),
    ("unchanged masks", "share under input noise: certified, predicted, observed", "semdiag mask-stability"),
    ("mask agreement", "share of a query's kept keys unchanged by input noise", "semdiag mask-stability"),
    ("Lipschitz estimates", "secants, gradients, block Jacobians, from below", "semdiag lipschitz"),
    ("loss surface", "loss and accuracy, or δ and Δ, on planes of parameters", "semdiag landscape"),
    ("Lipschitz bounds λ", "of attention, block, tensor and loss; Corollary 1", "semdiag bounds"),
    ("attention weight kept", "weight of a query's k largest scores, for every k", "semdiag k-sweep"),
)
