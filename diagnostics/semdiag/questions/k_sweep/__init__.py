"""Is sparse attention enough, and with which k?"""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.presenting import options
from semdiag.presenting.question import Question, Shared, command


@command(sampling=True)
def k_sweep(
    models: options.Models = None,
    max_k: Annotated[
        int | None,
        typer.Option(
            help="Measure every k up to this one. Default: up to 48, or one less than the length of shorter "
            "inputs; of external models every k up to 8, then every fourth, and those that are run.",
            rich_help_panel=options.MEASURE,
        ),
    ] = None,
    rerun: Annotated[
        bool,
        typer.Option(
            "--rerun",
            help="Run the model with real masks, and show how its loss, its output distribution and its "
            "predictions change. A control keeps as many keys at random.",
            rich_help_panel=options.MEASURE,
        ),
    ] = False,
    runs_of: Annotated[
        str,
        typer.Option(
            "--k",
            metavar="K,K",
            help="With --rerun: which k to run, like 4,8,16. Default: growing steps.",
            rich_help_panel=options.MEASURE,
        ),
    ] = "",
    kinds: Annotated[
        str,
        typer.Option(
            metavar="KIND,KIND",
            help="With --rerun: which kinds of sparse attention to run, of topk, topk-group, topk-layer, "
            "topk-4-layers, block-16, block-32, block-64, window, topp and random. Default: topk and random; of "
            "other models topk-layer, block-16 and window, too.",
            rich_help_panel=options.MEASURE,
        ),
    ] = "",
    lengths: Annotated[
        str,
        typer.Option(
            metavar="L,L",
            help="With --rerun: also cut the tokens of all texts, one behind the other, into pieces of these "
            "lengths, like 128,512, and run each: does the k that is needed grow with the length?",
            rich_help_panel=options.MEASURE,
        ),
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="With --rerun: the largest change that counts as none. Default: 0.01 nats of loss; 0.05 where "
            "only the outputs are known.",
            rich_help_panel=options.MEASURE,
        ),
    ] = None,
    budget: Annotated[
        Path | None,
        typer.Option(
            help="Write a k for each layer and head to this JSON file, found on half of the samples and tested on "
            "the other half.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Show the table of every k, too: weight kept, δ(k), Δ(k), load and ξ.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Ask whether sparse attention is enough in this model, and with which k.

    Computed from the model's scores for each k, if each query kept only its k largest: the attention weight kept,
    dispersion δ_h(k) against δ_s, separation Δ_h(k), key load, and the paper's conditions. With --rerun the model
    also runs with such masks. This says nothing about a model trained with that k.

    [bold]semdiag k-sweep checkpoints/even-pairs-full-seed-153476998 --rerun[/]
    """
    import json

    from semdiag.measuring.findings.findings import json_ready
    from semdiag.presenting.options import whole_numbers
    from semdiag.questions.k_sweep.answer import budget_content
    from semdiag.questions.k_sweep.measure import KSweepPlan
    from semdiag.questions.k_sweep.words import print_k_sweep
    from semdiag_models import InputError
    from semdiag_models.reading import write_text

    if budget is not None and (len(models or ()) != 1 or budget.suffix != ".json" or not budget.parent.is_dir()):
        raise InputError(
            f"--budget takes one MODEL, and the name of a .json file in a folder that exists. Got {budget}."
        )
    again = rerun or budget is not None
    if runs_of and not again:
        raise InputError(
            "--k says which k to run with real masks: add --rerun. Without --rerun every k is measured."
        )
    if kinds and not again:
        raise InputError("--kinds says which kinds of sparse attention to run: add --rerun.")
    if lengths and not again:
        raise InputError("--lengths says which lengths of text to run with real masks: add --rerun.")
    if tolerance is not None and not again:
        raise InputError("--tolerance judges what real masks change: add --rerun.")
    named = tuple(dict.fromkeys(part.strip() for part in kinds.split(",") if part.strip()))
    plan = KSweepPlan(
        max_k,
        again,
        tolerance,
        budget is not None,
        whole_numbers(runs_of, "--k"),
        named,
        whole_numbers(lengths, "--lengths"),
    )
    conditions = shared.conditions(plans=(plan,))
    findings = shared.measured(models, conditions)
    shared.deliver("k-sweep", findings, lambda found: print_k_sweep(found, every), answered=True)
    if budget is not None:
        path = findings.measurements.models["model"].iloc[0]
        write_text(budget, json.dumps(json_ready(budget_content(findings, path)), indent=1))


QUESTION = Question(
    "k-sweep",
    __name__,
    measured_by="measure:K_SWEEP",
    summarised_by="words:k_sweep_summary",
    shown_by="figures:SECTION",
    asked_by=":k_sweep",
)
