"""Sentences on the change from one model to another."""

import math

from semdiag.measuring.findings.number_words import interval_words, percent
from semdiag.measuring.findings.strict_json import Summary, number_from_json
from semdiag.presenting.columns import number

_ROUNDING, _NAMED = 1e-5, 5


def comparison_sentences(result: Summary) -> list[str]:
    """Return sentences on what changed from the base to the model."""
    whole, most = result["all"], result["heads"][0]
    samples = result["outputs"]["samples"] if result["outputs"] else None
    interval = interval_words(*_ends(whole), "{:.3g}".format, samples)
    sentences = [
        *_beginning(result["heads"]),
        f"Total variation of the weights: {number(whole['total_variation'])} in the mean of {whole['queries']:,} "
        f"queries ({interval}), {number(whole['largest'])} at most; most in layer {most['layer']}, head "
        f"{most['head']}: {number(most['total_variation'])}."
        if whole["largest"]
        else f"The weights of all {whole['queries']:,} queries are the same.",
    ]
    if whole["output_change"] is not None:
        sentences.append(_parts(whole))
    return sentences + _outputs(result["outputs"])


def _beginning(heads: list[Summary]) -> list[str]:
    """Name the heads in which the change begins, if earlier layers or other heads of theirs are the same."""
    changed = [row for row in heads if max(row["largest"], row["output_change"] or 0) > _ROUNDING]
    first = min((row["layer"] for row in changed), default=0)
    began = sorted((row for row in changed if row["layer"] == first), key=lambda row: int(row["head"]))
    same = [row for row in heads if row["layer"] <= first and row not in began]
    if not began or not same:
        return []
    of = f"{'head' if len(began) == 1 else 'heads'} {', '.join(str(row['head']) for row in began[:_NAMED])}"
    of += " and more" if len(began) > _NAMED else ""
    most = max((row["output_change"] or 0 for row in began), default=0)
    before = "between the layer before and this one, or in it" if len(began) > 1 else "there"
    return [
        f"The change begins in layer {first}, {of} (total variation {number(max(r['largest'] for r in began))} at "
        f"most, output {number(most)} of its norm): look for it {before}. What precedes is the same; heads of "
        "later layers may change only by their input."
    ]


def _ends(row: Summary) -> tuple[float, float]:
    return number_from_json(row["low"]), number_from_json(row["high"])


def _parts(whole: Summary) -> str:
    """Return how much of the change of attention's outputs is due to the weights, and how much to the values."""
    change = f"Attention's outputs change by {number(whole['output_change'])} of their norm"
    if whole["weights_share"] is None:
        return f"{change}."
    return (
        f"{change}: the other weights alone change them by {number(whole['by_weights'])}, the other values by "
        f"{number(whole['by_values'])} ({percent(whole['weights_share'])}% of both squares is the weights')."
    )


def _outputs(outputs: Summary | None) -> list[str]:
    """Return sentences on the change of the model's outputs."""
    if outputs is None:
        return []
    if not outputs["predictions"]:
        return [f"The model's outputs change by {number(outputs['output_change'])} of their norm, in the mean."]
    interval = interval_words(*_ends(outputs), "{:.3g}".format, outputs["samples"])
    sentences = [
        f"KL(A || B) of the model's outputs: {number(outputs['divergence'])} nats ({interval}); "
        f"{outputs['changed']:,} of {outputs['predictions']:,} predictions change."
    ]
    before, after = number_from_json(outputs["loss_base"]), number_from_json(outputs["loss"])
    if not math.isnan(before + after):
        sentences.append(f"Loss of {outputs['targets']:,} targets: {before:.4g} nats before, {after:.4g} after.")
    return sentences
