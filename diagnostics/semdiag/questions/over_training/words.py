"""How numbers moved during training, in sentences."""

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import number_words
from semdiag.measuring.table import ALL
from semdiag.questions.convergence.answer.epochs import arrivals


def along_sentences(findings: Findings) -> list[str]:
    """Return a sentence for each run on how its numbers moved from its first to its last snapshot."""
    runs = findings(arrivals).set_index("model")
    sentences = []
    pooled = findings.measurements.along[findings.measurements.along["layer"] == ALL]
    for model, rows in pooled.groupby("model", sort=False):
        if model not in runs.index:
            continue
        run, epochs = runs.loc[model], sorted(rows["epoch"].unique())
        value = rows.set_index(["epoch", "quantity", "statistic"])["value"]
        parts = [
            f"{name} " + " → ".join(number_words(value[epochs[end], quantity, statistic]) for end in (0, -1))
            for name, quantity, statistic in _ALONG
        ]
        when = f"epoch {epochs[0]} → {epochs[-1]}, {counted(len(epochs), 'snapshot')}"
        sentences.append(f"{run['group']}, {run['attention']}, seed {run['seed']} ({when}): {', '.join(parts)}.")
    return sentences


_ALONG = (
    ("median δ", "dispersion", "p50"),
    ("mean response", "response", "mean"),
    ("largest Γ", "gamma", "max"),
    ("share of the squared gradient in queries and keys", "query_key_gradient", "share"),
)
