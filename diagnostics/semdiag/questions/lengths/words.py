"""What becomes of models on other lengths, in sentences."""

import math

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.measuring.table import ALL
from semdiag.questions.convergence.answer.epochs import arrivals


def length_sentences(findings: Findings) -> list[str]:
    """Say of every model what becomes of its accuracy and dispersion on other lengths.

    Args:
        findings: with lengths.
    """
    found = findings(arrivals).set_index("model")
    said = []
    for model, rows in findings.measurements.lengths[findings.measurements.lengths["layer"] == ALL].groupby(
        "model", sort=False
    ):
        if model not in found.index:  # a copy of another run
            continue
        run = found.loc[model]
        parts = [_length_words(int(str(length)), own) for length, own in rows.groupby("length")]
        said.append(f"{run['group']}, {run['attention']}, seed {run['seed']}: {'; '.join(parts)}.")
    return said


def _length_words(length: int, rows: pd.DataFrame) -> str:
    value = rows.set_index(["quantity", "statistic"])["value"]
    accuracy = number_words(value["accuracy", "value"], "{:.1%}".format)
    if not math.isnan(value["accuracy", "low"]):
        accuracy += f" ({value['accuracy', 'low']:.1%} to {value['accuracy', 'high']:.1%})"
    return f"length {length} accuracy {accuracy}, median δ {number_words(value['dispersion', 'p50'])}"
