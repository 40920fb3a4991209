"""The section ``heads`` of a report."""

from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import answers_with_facts
from semdiag.questions.heads.answer import head_table, heads_glance
from semdiag.questions.heads.figures.heads_map import heads_map

_HEADINGS = (
    Heading(
        "heads",
        "What does each head do?",
        (
            Shown(
                heads_map,
                "Coloured cells, layers by heads: median dispersion in nats, entropy of the attention weights, "
                "weight on the first key, weight on the k largest scores: {shown}.",
                "Look for a head unlike its neighbours. A large δ with a small entropy means a head that picks "
                "single keys; an entropy near the logarithm of the number of keys means one that averages. Much "
                "weight on the first key may be a sink, where queries put weight that they have no use for, or a "
                "token that the task needs.",
            ),
        ),
        (
            "Medians and means over all queries of a head. With --keep-queries, data/ holds the single queries.",
            "The first key is the first that is not padding. A sink elsewhere, such as a separator, does not "
            "show. A learnt logit in the softmax's denominator is not a key, but is part of the entropy.",
        ),
    ),
)


SECTION = Section(
    name="heads",
    needs=(),
    headings=_HEADINGS,
    external=_HEADINGS,
    glance=heads_glance,
    tables=answers_with_facts(heads=head_table),
)
