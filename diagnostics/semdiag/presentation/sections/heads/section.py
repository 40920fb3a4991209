"""The section ``heads`` of a report."""

from semdiag.findings.glance import measured_glance
from semdiag.findings.heads import head_table
from semdiag.presentation.section import Question, Section, Shown
from semdiag.presentation.sections.heads.heads_map import heads_map
from semdiag.presentation.tables import one_table

_QUESTIONS = (
    Question(
        "heads",
        "What does each head do?",
        (
            Shown(
                heads_map,
                "Coloured cells, layers by heads: median dispersion in nats, largest attention weight, share of "
                "queries that keep the first key, weight on the k largest scores: {models}.",
                "Look for a head unlike its neighbours. A large δ with a large weight is a head that picks single "
                "keys; a first key that nearly every query keeps is a sink, on which the others lean.",
            ),
        ),
        (
            "Medians over all queries of a head. What single queries do stands in data/ with --keep-queries.",
            "The share of the first key counts queries that keep it, not the weight it receives.",
        ),
    ),
)


HEADS = Section(
    name="heads",
    needs=(),
    questions=_QUESTIONS,
    external=_QUESTIONS,
    glance=measured_glance("queries"),
    tables=one_table("heads", head_table),
)
