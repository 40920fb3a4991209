"""The section ``k-sweep`` of a report."""

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import with_facts
from semdiag.questions.k_sweep.answer.quarters import quarter_table
from semdiag.questions.k_sweep.answer.rerun import change_table
from semdiag.questions.k_sweep.answer.sparse_verdict import sparse_glance
from semdiag.questions.k_sweep.answer.summary import condition_table
from semdiag.questions.k_sweep.figures.k_sweep import k_sweep
from semdiag.questions.k_sweep.figures.kinds_by_length import kinds_by_length
from semdiag.questions.k_sweep.figures.kinds_of_masks import kinds_of_masks
from semdiag.questions.k_sweep.figures.loss_change import loss_change
from semdiag.questions.k_sweep.words import k_sweep_in_short, k_sweep_sentences


def k_sweep_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return what every k would keep, the paper's conditions, and the changes by real masks."""
    sweep = findings.measurements.sweep
    sweep = sweep if alone else sweep[sweep["layer"] == ALL]
    tables = {"k_sweep": sweep, "k_sweep_conditions": findings(condition_table)}
    again = findings(change_table)
    if len(again):
        tables["k_sweep_rerun"] = again
    quarters = findings(quarter_table)
    if len(quarters):
        tables["k_sweep_quarters"] = quarters
    return {name: with_facts(findings, table.rename(columns={"k": "swept_k"})) for name, table in tables.items()}


_HEADINGS = (
    Heading(
        "k-sweep",
        "Is sparse attention enough in this model, and with which k?",
        (
            Shown(
                kinds_of_masks,
                "Against the share of the keys that is kept, what running the model with each kind of sparse "
                "attention changed, with 95% intervals: {shown}.",
                "Look for the lowest line at the share that you can afford. Top-k by query and head is the best "
                "that a choice by score can do; kinds that share their choice, or choose blocks, are what kernels "
                "run.",
            ),
            Shown(
                kinds_by_length,
                "On texts of several lengths, what each kind of sparse attention changed, against the number of "
                "keys kept (left) and against their share (right), with 95% intervals: {shown}.",
                "Where the lines of a left panel lie on each other, all lengths need the same number of keys; "
                "where those of a right panel do, the same share.",
            ),
            Shown(
                loss_change,
                "Against k, what running the models with real masks changed, with 95% intervals and as many "
                "random keys as a control, beside the attention weight that the masks keep: {shown}.",
                "Look for the smallest k from which on the whole band is below the dashed line: that many keys "
                "per query are enough. The weight kept is no proxy for that.",
            ),
            Shown(
                k_sweep,
                "Against k, within each model: attention weight of the k largest scores, dispersion ratio, "
                "separation on a logarithmic axis, and left sides of the paper's conditions around 1: {shown}.",
                "Look for a k at which the weight kept is above the dashed line while all curves of the last "
                "panel are below 1. Where there is none, no top-k mask both keeps what this model attends to "
                "and has the better guarantee by the paper's own conditions.",
            ),
        ),
        (
            "This is a comparison within a model, on its own scores. A model trained with that k has other "
            "scores: see the sections above that compare trained models.",
            "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper "
            "does: that is a heuristic.",
            "Only queries with more than k keys count at k: curves jump where layers that see a window of keys "
            "have no such query any more.",
            "Small k meets the paper's condition easily because δₕ(1) = 0: a mask that keeps one key has no "
            "dispersion and no attention left to learn.",
        ),
    ),
)


SECTION = Section(
    name="k-sweep",
    needs=("sweep",),
    glance=sparse_glance,
    headings=_HEADINGS,
    external=_HEADINGS,
    in_short=k_sweep_in_short,
    details=k_sweep_sentences,
    tables=k_sweep_tables,
)
