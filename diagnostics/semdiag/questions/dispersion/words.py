"""Sentences on whether the scores of the sparse model span less."""

import math

from semdiag.capturing.attention_kinds import DENSE, external
from semdiag.measuring.findings.counterfactuals import counterfactual_ks
from semdiag.measuring.findings.distributions import pooled_percentiles
from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import ratio_words
from semdiag.measuring.findings.pairing import attention_word
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.glance import count_of, span_words
from semdiag.questions.dispersion.answer.comparisons import fixed_mask_ratios, pair_comparisons, recall_table
from semdiag.questions.dispersion.glance import before_training, ratio_before

_NO_PAIR = (
    "Nothing is compared: there is no pair of a full and a top-k model of the same task, seed, size, setting and "
    "snapshot."
)
_NOT_JUDGED = "Pairs of models are not judged: a verdict needs every query, but only some were drawn or kept."


def dispersion_in_short(findings: Findings) -> list[str]:
    """Return sentences on δ_h < δ_s by pair, and on fixed masks; for external models, on each by itself."""
    if external(findings.measurements.models).all():
        if counterfactual_ks(findings.measurements.queries):  # the section on a top-k mask has these sentences
            return []
        return [span_sentence(findings, model) for model in findings.measurements.models["model"]]
    sentences = [comparison.sentence for comparison in findings(pair_comparisons)]
    ratios = [f"{pair.label} {ratio:.2g} times" for pair, ratio in findings(fixed_mask_ratios)]
    fixed_masks = (
        f"For comparison, masks that ignore the scores have a median δ of: {'; '.join(ratios)} full attention's. "
        "A smaller range is in part only a range over fewer keys."
    )
    if not sentences:
        labels = model_labels(findings.measurements.models)
        sentences = [span_sentence(findings, model, label) for model, label in labels.items()]
        sentences += [_NOT_JUDGED if in_part(findings) else _NO_PAIR] if len(labels) > 1 else []
    return [*_headline(findings), *sentences, *([fixed_masks] if ratios else []), *_recall_sentences(findings)]


def _headline(findings: Findings) -> list[str]:
    """Return a sentence on all pairs, and how much the mask alone did before training."""
    pairs = [pair for pair in findings(pair_comparisons) if pair.snapshot == "last" and not pair.gate.unknown]
    ratios = [pair.ratio.estimate for pair in pairs]
    if not ratios or not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios):
        return []
    passed = sum(pair.gate.passed for pair in pairs)
    words = f"The median dispersion δ of top-k attention is {span_words(ratios, ratio_words)} of full attention's"
    words += f" ({count_of(passed, len(pairs), 'pair')} smaller at p50, p75, p90 and p95)"
    before = before_training(findings)
    if len(before) != len(ratios):
        return [f"{words}. How much of that the mask alone does is not known: no initialisation was measured."]
    mask_shares = [
        math.log(start) / math.log(end) if end < 1 else math.nan for start, end in zip(before, ratios, strict=True)
    ]
    share = ": the mask alone does most of it" if all(part >= 0.5 for part in mask_shares) else ""
    share = ": most of it was learned" if all(part < 0.5 for part in mask_shares) else share
    return [f"{words}; before training it is {ratio_before(findings)}{share}."]


def _recall_sentences(findings: Findings) -> list[str]:
    """Return sentences on how many of the largest scores hashes and clusters find."""
    table, models = findings(recall_table), findings.measurements.models.set_index("model")
    sentences = []
    for model, rows in table.groupby("model", sort=False) if len(table) else ():
        pooled, heads = rows[rows["layer"] == "all"].iloc[0], rows.loc[rows["layer"] != "all", "recall"]
        row = models.loc[model]
        sentences.append(
            f"{row['task']}, {attention_word(row)}, seed {row['seed']}: the keys that a query keeps hold "
            f"{pooled['recall']:.0%} of its {row['k']} largest scores ({heads.min():.0%} to {heads.max():.0%} "
            f"by head; {row['k']} keys at random would hold {pooled['at_random']:.0%}), and "
            f"{pooled['without_keys']:.1%} of {pooled['queries']:,} queries keep no key."
        )
    return sentences


def span_sentence(findings: Findings, model: str, label: str = "") -> str:
    """Return a sentence on the dispersion of a model that is compared with no other."""
    label = label or model
    delta, keys = (findings(pooled_percentiles, name)[model] for name in ("dispersion", "keys"))
    if math.isnan(delta["p50"]):
        return f"{label}: its dispersion is not a number."
    attention = findings.measurements.models.set_index("model").loc[model, "attention"]
    of = f"{keys['p50']:g} keys at the median" if attention in DENSE else "the keys that it keeps"
    return (
        f"{label}: the scores of a query span {delta['p50']:.3g} nats at the median and "
        f"{delta['p95']:.3g} at the 95th percentile, over {of}."
    )
