"""The answer at one glance."""

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.measuring.table import ALL
from semdiag.presenting.glance import Answer, Glance, span_words
from semdiag.questions.mask_precision.answer import precision_table


def precision_glance(findings: Findings) -> Glance:
    """Return how many masks change in the format that was named first."""
    table = findings(precision_table)
    rows = table[(table["layer"] == ALL) & table["changed"].notna()]
    if rows.empty:
        return Glance(Answer.OPEN, "0 models", "have a mask that the error model covers")
    first = rows["format"].iloc[0]
    rows = rows[rows["format"] == first]
    certified, changed = int(rows["certified_rows"].sum()), int(rows["certified_changed"].sum())
    return Glance(
        Answer.MEASURED,
        f"{span_words(list(rows['changed']), percent)}%",
        f"of the masks of {counted(len(rows), 'model')} change in {first}, however ties are broken; {changed:,} "
        f"of {certified:,} certified ones changed",
    )
