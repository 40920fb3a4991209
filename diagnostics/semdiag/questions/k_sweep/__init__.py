"""Is sparse attention enough, and with which k?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from semdiag.measuring.plan import Plan, ReportOptions
from semdiag.presenting import options
from semdiag.presenting.options import option_field
from semdiag.presenting.question import SAMPLING, YOUR_MODEL, Question, Request

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject, Watcher
    from semdiag.measuring.table import Table

LARGEST_K = 48


@dataclass(frozen=True)
class KSweepPlan(Plan):
    """Which k are measured, and with which masks the model is run."""

    name: ClassVar[str] = "k-sweep"
    takes_drawn_queries: ClassVar[bool] = True

    max_k: int | None = option_field(
        None, "Measure every k up to this one. Default: up to 48, or one less than shorter inputs have; of "
        "external models up to 8, then every fourth, and those that are run.", rare=True,
    )  # fmt: skip
    rerun: bool | None = option_field(  # None: of external models, and where another field asks for it
        False, "Run the model with real masks, and show how its loss, its output distribution and its predictions "
        "change. A control keeps as many keys at random. Default: of external models, and if one of the following "
        "options is given.", "--rerun/--no-rerun", show_default=False,
    )  # fmt: skip
    tolerance: float | None = option_field(
        None, "The largest change that counts as none. Default: 0.01 nats of loss; 0.05 where only the outputs "
        "are known.",
    )  # fmt: skip
    budget: bool = False  # whether budgets by layer and head are looked for
    ks: tuple[int, ...] = option_field(
        (), "Which k to run, like 4,8,16. Default: growing steps.",
        "--k", metavar="K,K", read=options.whole_numbers,
    )  # fmt: skip
    kinds: tuple[str, ...] = option_field(
        (), "Which kinds of sparse attention to run, of topk, topk-group, topk-layer, topk-4-layers, block-16, "
        "block-32, block-64, window, topp, random, or of engines: tile-64x64, skip-8 … Default: topk and random; "
        "of external models topk-layer, block-16 and window, too.", metavar="KIND,KIND", read=options.listed_names,
    )  # fmt: skip
    lengths: tuple[int, ...] = option_field(
        (), "Also cut the tokens of all texts, one behind the other, into pieces of these lengths, like 128,512, "
        "and run each: does the k that is needed grow with the length?",
        metavar="L,L", read=options.whole_numbers,
    )  # fmt: skip
    seconds: float | None = None  # models are run on what fits in so much time; None: on all inputs
    best_effort: bool = False  # whether nobody asked for the runs, so that a refusal is a remark
    jobs: int = 1  # processes among which the masks of a rerun are divided

    def reruns(self, external: bool) -> bool:
        """Return whether a model is run with masks."""
        asks = self.budget or self.ks or self.kinds or self.lengths or self.tolerance
        return bool(external or asks) if self.rerun is None else self.rerun

    @property
    def asked(self) -> bool:
        """Whether the user asked for runs with masks: a model that refuses them is an error then."""
        return self.reruns(external=False) and not self.best_effort

    @property
    def largest_k(self) -> int:
        """The largest k that is measured, where inputs are long enough."""
        return max(self.max_k or LARGEST_K, *self.ks, 1)

    @property
    def masks(self) -> int:
        """About how many masks are run on all inputs of an external model."""
        from semdiag.questions.k_sweep.budgets import EXTERNAL_KINDS
        from semdiag.questions.k_sweep.rerun import few_ks

        return len(self.ks or few_ks(64)) * len(self.kinds or EXTERNAL_KINDS) if self.reruns(True) else 0

    def __post_init__(self) -> None:
        from semdiag.questions.k_sweep.budgets import check_kinds
        from semdiag_files import InputError

        if self.max_k is not None and self.max_k < 1:
            raise InputError(f"The largest k must be at least 1. Got {self.max_k}.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise InputError(f"The tolerated change must be above 0. Got {self.tolerance}.")
        if any(k < 1 for k in self.ks):
            raise InputError(f"k must be at least 1. Got k={min(self.ks)}.")
        check_kinds(self.kinds)
        if any(length < 2 for length in self.lengths):
            raise InputError(f"--lengths takes lengths of at least 2. Got {min(self.lengths)}.")
        if self.budget and self.rerun is False:
            raise InputError("Budgets are tested by running the model: they take --rerun.")

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.k_sweep.measure import TABLES

        return TABLES

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.k_sweep.measure import measure_sweep

        return measure_sweep(subject, self)

    def can_go_on(self, external: bool) -> bool:
        """Return whether runs with masks are kept one by one."""
        return self.reruns(external)

    def before_statistics(self, subject: "Subject") -> None:
        """Run an external model with masks first."""
        from semdiag.questions.k_sweep.measure import run_before_statistics

        run_before_statistics(subject, self)

    def watch(self, subject: "Subject") -> "Watcher | None":
        """Return what observes the clean pass."""
        from semdiag.questions.k_sweep.measure import watch_scores

        return watch_scores(subject, self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        tolerance = {"tolerance": self.tolerance} if self.tolerance else {}
        return {"probe_samples": probe_samples, **tolerance}

    @classmethod
    def for_report(cls, options: ReportOptions) -> "KSweepPlan":
        """Return the plan of a report."""
        lengths = options.lengths
        return cls(rerun=options.rerun, best_effort=True, seconds=options.rerun_seconds, lengths=lengths)


def _ask(
    budget: Annotated[
        Path | None,
        options.output_option(
            "Write a k for each layer and head to this JSON file, found on half of the samples and tested on the "
            "other half."
        ),
    ] = None,
    *,
    plan: KSweepPlan,
    request: Request,
) -> None:
    import json

    from semdiag_files import InputError, write_text

    models = request.values["models"]
    if budget is not None and (len(models or ()) != 1 or budget.suffix != ".json" or not budget.parent.is_dir()):
        raise InputError(
            f"--budget takes one MODEL, and the name of a .json file in a folder that exists. Got {budget}."
        )
    flags = {"ks": "--k", "kinds": "--kinds", "lengths": "--lengths", "tolerance": "--tolerance"}
    if plan.rerun is False and (unused := [flag for name, flag in flags.items() if name in request.typed]):
        raise InputError(f"{unused[0]} is about runs with masks: leave out --no-rerun.")
    plan = replace(plan, budget=budget is not None)
    findings, _ = request.measured(models, request.conditions(plans=(plan,)))
    request.deliver(findings)
    if budget is not None:
        write_text(budget, json.dumps(QUESTION.json(findings)["results"][0]["budgets"], indent=1))


QUESTION = Question(
    "k-sweep",
    __name__,
    """Ask whether sparse attention is enough in this model, and with which k.

    Computed from the model's scores for each k, if each query kept only its k largest: the attention weight kept,
    dispersion δ_h(k) against δ_s, separation Δ_h(k), key load, and the paper's conditions. With --rerun the model
    also runs with such masks. This says nothing about a model trained with that k.

    [bold]semdiag k-sweep checkpoints/even-pairs-full-seed-153476998 --rerun[/]
    """,
    KSweepPlan,
    _ask,
    takes=("models", "every", *SAMPLING),
    defaults={"rerun": None},
    needs=("sweep",),
    place="screen",
    leads=1,
    panel=YOUR_MODEL,
    pictured=True,
)
