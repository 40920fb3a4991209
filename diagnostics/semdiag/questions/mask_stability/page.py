"""The section ``mask-stability`` of a report."""

import pandas as pd

from semdiag.measuring.findings.distributions import all_by_name
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.presenting.tables import with_facts
from semdiag.questions.mask_stability.answer import effect_table, mask_table
from semdiag.questions.mask_stability.figures.mask_heat_map import mask_heat_map
from semdiag.questions.mask_stability.figures.mask_reliability import mask_reliability
from semdiag.questions.mask_stability.figures.masks_unchanged import masks_unchanged
from semdiag.questions.mask_stability.glance import masks_glance
from semdiag.questions.mask_stability.words import mask_sentences, masks_in_short


def mask_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Return masks by noise level, layer and head; the effect of the noise on outputs, if known."""
    tables = {"mask_stability": with_facts(findings, all_by_name(findings(mask_table)))}
    if len(findings.measurements.noise_effects):
        tables["noise_effects"] = with_facts(findings, findings(effect_table))
    return tables


_HEADINGS = (
    Heading(
        "mask-stability",
        "Do masks survive noise?",
        (
            Shown(
                masks_unchanged,
                "Share of queries whose mask stays exactly the same under input noise, per layer, with 95% "
                "intervals and the certified share dotted: {shown}.",
                "A curve near 1 belongs to a layer whose masks this noise hardly changes. The dotted line is what "
                "can be proven from Δ and the change of the scores alone; masks between it and the curves survive "
                "without a proof.",
            ),
            Shown(
                mask_reliability,
                "Observed and predicted share of unchanged masks against Δ over the standard deviation of the "
                "boundary pair's change, one curve per noise level: {shown}.",
                "Where the points lie on the dashed curve, Δ alone predicts which masks survive. Points below it "
                "lose their masks to other pairs than the one at the boundary; above it, a few large changes, as "
                "after a swap in an earlier layer, make the standard deviation larger than most changes.",
            ),
            Shown(
                mask_heat_map,
                "Share of unchanged masks as coloured cells, layers by noise levels, or by models: {shown}.",
                "Read the layers in their order: noise is passed on from layer to layer, so later masks can "
                "change although nothing was added there. --at-block adds the noise to the input of one block and "
                "leaves earlier blocks clean.",
            ),
        ),
        (
            "A full-attention model drops no key. The mask judged there is the one that top-k would choose from "
            "its scores; that model's output does not depend on it. Masks that do not depend on the input "
            "(banded, block-local) cannot change: not applicable.",
            "Certified means: max dz − min dz over all allowed keys is below Δ, which proves S′ = S. A certified "
            "mask that changed would be an error of semdiag; such rows are counted and named above. In float32 "
            "the certificate leaves room for rounding.",
            "The noise is Gaussian and isotropic; that of training data or of an adversary is neither. Intervals "
            "are about other inputs of the same kind, not about other seeds of the training.",
        ),
    ),
)


SECTION = Section(
    name="mask-stability",
    needs=("masks", "noise_effects"),
    headings=_HEADINGS,
    external=_HEADINGS,
    in_short=masks_in_short,
    details=mask_sentences,
    glance=masks_glance,
    tables=mask_tables,
)
