"""Sentences on two models."""

import math

from semdiag.measuring.findings.number_words import interval_words, percent
from semdiag.measuring.findings.strict_json import Summary, number_from_json
from semdiag.presenting.terminal.console import number


def comparison_sentences(found: Summary) -> list[str]:
    """Return what changed from the base to the model, a fact a sentence.

    Args:
        found: the entry of results that :func:`semdiag.questions.compare.answer.compare_summary` makes.
    """
    whole, most = found["all"], found["heads"][0]
    samples = found["outputs"]["samples"] if found["outputs"] else None
    spread = interval_words(*_ends(whole), "{:.3g}".format, samples)
    said = [
        f"Total variation of the weights: {number(whole['total_variation'])} in the mean of {whole['queries']:,} "
        f"queries ({spread}), {number(whole['largest'])} at most; most in layer {most['layer']}, head "
        f"{most['head']}: {number(most['total_variation'])}."
    ]
    if whole["output_change"] is not None:
        said.append(_parts(whole))
    return said + _outputs(found["outputs"])


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


def _outputs(found: Summary | None) -> list[str]:
    """Return sentences on the change of the model's outputs."""
    if found is None:
        return []
    if not found["predictions"]:
        return [f"The model's outputs change by {number(found['output_change'])} of their norm, in the mean."]
    spread = interval_words(*_ends(found), "{:.3g}".format, found["samples"])
    said = [
        f"KL(A || B) of the model's outputs: {number(found['divergence'])} nats ({spread}); "
        f"{found['changed']:,} of {found['predictions']:,} predictions change."
    ]
    before, after = number_from_json(found["loss_base"]), number_from_json(found["loss"])
    if not math.isnan(before + after):
        said.append(f"Loss of {found['targets']:,} targets: {before:.4g} nats before, {after:.4g} after.")
    return said
