"""Accuracy and dispersion on other lengths, in sentences."""

import math

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.measuring.table import ALL
from semdiag.questions.convergence.answer.epochs import arrivals


def length_sentences(findings: Findings) -> list[str]:
    """Return a sentence for each model on its accuracy and dispersion on other lengths."""
    runs = findings(arrivals).set_index("model")
    sentences = []
    for model, rows in findings.measurements.lengths[findings.measurements.lengths["layer"] == ALL].groupby(
        "model", sort=False
    ):
        if model not in runs.index:  # a copy of another run
            continue
        run = runs.loc[model]
        parts = [_length_words(int(str(length)), numbers) for length, numbers in rows.groupby("length")]
        sentences.append(f"{run['group']}, {run['attention']}, seed {run['seed']}: {'; '.join(parts)}.")
    return sentences


def _length_words(length: int, rows: pd.DataFrame) -> str:
    value = rows.set_index(["quantity", "statistic"])["value"]
    accuracy = number_words(value["accuracy", "value"], "{:.1%}".format)
    if not math.isnan(value["accuracy", "low"]):
        accuracy += f" ({value['accuracy', 'low']:.1%} to {value['accuracy', 'high']:.1%})"
    return f"length {length} accuracy {accuracy}, median δ {number_words(value['dispersion', 'p50'])}"
