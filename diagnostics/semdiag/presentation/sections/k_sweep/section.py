"""The section ``k-sweep`` of a report."""

from semdiag.presentation.section import Question, Section, Shown
from semdiag.presentation.sections.k_sweep.k_sweep import k_sweep
from semdiag.presentation.sections.k_sweep.sentences import sweep_sentences
from semdiag.presentation.sections.k_sweep.tables import sweep_tables

_QUESTIONS = (
    Question(
        "k-sweep",
        "What would another k leave of this attention?",
        (
            Shown(
                k_sweep,
                "Against k, within each model: attention mass of the k largest scores, dispersion ratio, "
                "separation on a logarithmic axis, and left sides of the paper's conditions around 1: {models}.",
                "Look for a k at which the mass is above the dashed line while all curves of the last panel are "
                "below 1. Where there is none, no top-k mask both keeps what this model attends to and has the "
                "better guarantee by the paper's own conditions.",
            ),
        ),
        (
            "This is a comparison within a model, on its own scores. A model trained with that k has other "
            "scores: the sections above that compare trained models are about that.",
            "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper "
            "does: that is a heuristic.",
            "Small k meets the paper's condition easily because δₕ(1) = 0: a mask that keeps one key has no "
            "dispersion and no attention left to learn.",
        ),
    ),
)


K_SWEEP = Section(
    name="k-sweep",
    needs=("sweep",),
    questions=_QUESTIONS,
    external=_QUESTIONS,
    details=sweep_sentences,
    tables=sweep_tables,
)
