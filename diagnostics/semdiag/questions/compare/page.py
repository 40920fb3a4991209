"""The section ``compare`` of a report: its figure, sentences and tables."""

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.glance import Answer, Glance
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import answers_with_facts
from semdiag.questions.compare.answer import answer_table, change_table, compare_summary
from semdiag.questions.compare.figures.compare_map import compare_map
from semdiag.questions.compare.words import comparison_sentences


def compare_glance(findings: Findings) -> Glance:
    """Return the mean total variation of the weights for the model compared last."""
    result = findings(compare_summary)["results"][-1]
    whole = result["all"]
    words = f"total variation of attention's weights from A to B, mean over {whole['queries']:,} queries"
    return Glance(Answer.MEASURED, f"{whole['total_variation']:.3g}", words)


def _sentences(findings: Findings) -> list[str]:
    """Return the changes of every compared model."""
    return [
        f"A: {result['base']}; B: {result['model']}. {' '.join(comparison_sentences(result))}"
        for result in findings(compare_summary)["results"]
    ]


_HEADINGS = (
    Heading(
        "compare",
        "What changed from the base to the model?",
        (
            Shown(
                compare_map,
                "Coloured cells, layers by heads: how far the attention of two models is apart on the same "
                "inputs, and what of the change of its output is the weights' and the values': {shown}.",
                "A bright cell in the first panel is a head that attends elsewhere than it did. Compare the two "
                "panels of the output: where that of the weights is brighter, the damage came through queries and "
                "keys; where that of the values is, the head looks where it did and finds something else.",
            ),
        ),
        (
            "Each model runs by itself: from the second layer on, a head's change includes that of its input. It "
            "does not say which weights were changed.",
            "The weights are worked out from the queries and keys of each model. What a kernel rounds inside the "
            "softmax is not part of them.",
            "Both parts of the output's change add up to it exactly as vectors, and their norms do not: they may "
            "cancel or reinforce each other.",
            "Intervals resample whole samples; they are about other inputs of the same kind.",
        ),
    ),
)

SECTION = Section(
    name="compare",
    needs=("compared",),
    glance=compare_glance,
    headings=_HEADINGS,
    external=_HEADINGS,
    in_short=_sentences,
    tables=answers_with_facts(compare=change_table, compare_outputs=answer_table),
)
