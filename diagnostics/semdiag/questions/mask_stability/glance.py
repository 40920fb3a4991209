"""The answer at one glance."""

import pandas as pd

from semdiag.capturing.attention_kinds import DENSE
from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.measuring.table import ALL
from semdiag.presenting.glance import Answer, Glance, span_words
from semdiag.questions.mask_stability.answer import mask_table
from semdiag.questions.mask_stability.figures.panels import noise_words


def masks_glance(findings: Findings) -> Glance:
    """Return the share of masks, own and supposed, that stay the same under the middle noise level."""
    table = findings(mask_table)
    table = table[table["layer"] == ALL]
    if table.empty:
        return Glance(Answer.OPEN, "0 models", "have a mask that depends on the input")
    levels = sorted(table["level"].unique())
    rows = table[table["level"] == levels[len(levels) // 2]]
    kinds = findings.measurements.models.set_index("model")["attention"]
    without = rows["model"].map(kinds).isin(DENSE)
    with_mask, supposed = rows[~without], rows[without]
    noise = f"stay the same under noise of {noise_words(findings, levels[len(levels) // 2])}"
    chosen = f"that top-{findings.measurements.provenance['mask_noise']['k']} would choose"
    certified, changed = int(rows["certified_rows"].sum()), int(rows["certified_changed"].sum())
    tail = f"{changed:,} of {certified:,} certified ones changed"
    if with_mask.empty:
        return Glance(
            Answer.MEASURED,
            _share(supposed),
            f"of the masks {chosen} in {counted(len(supposed), 'model')} {noise}; {tail}",
        )
    if len(supposed):
        tail = f"{_share(supposed)} of those {chosen} in {counted(len(supposed), 'model')} without a mask; {tail}"
    words = f"of the masks of {counted(len(with_mask), 'model')} {noise}; {tail}"
    return Glance(Answer.MEASURED, _share(with_mask), words)


def _share(masks: pd.DataFrame) -> str:
    return f"{span_words(list(masks['exact']), percent)}%"
