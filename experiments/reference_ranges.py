"""What δ, entropy, weight on the first key and Δ are in models that were really trained, head by head.

    python experiments/reference_ranges.py

Writes the table reference_ranges.csv of the toolkit, from which pages draw their grey band, and prints that of
docs/reading-a-report.md. The encoders are measured here (100 held-out samples each); of MiniLM and
SmolLM2 the heads are those of the committed reports.
"""

import json
from pathlib import Path

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.questions.heads import head_table

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "diagnostics" / "semdiag" / "presenting" / "drawing" / "reference_ranges.csv"
K = 5
QUANTITIES = {
    "dispersion": "δ (nats)",
    "entropy": "entropy (nats)",
    "first_weight": "weight on the first key",
    f"separation_k{K}": f"Δ at k = {K} (nats)",
}
_COMMITTED = {"MiniLM": "minilm", "SmolLM2": "smollm2"}


def of_encoders(snapshot: str) -> pd.DataFrame:
    """Heads of the full-attention references, one row each.

    Args:
        snapshot: name of the file in their folders.
    """
    files = sorted((ROOT / "checkpoints").glob(f"*-full-*/{snapshot}.pt"))
    found = survey(files, Conditions(samples=100, k=(K,)))
    heads = head_table(Findings(found)).merge(found.models[["model", "length"]], on="model")
    medians = found.queries.groupby(["model", "layer", "head"])[f"separation_k{K}"].median()
    return heads.merge(medians.reset_index(), on=["model", "layer", "head"])


def of_report(name: str) -> pd.DataFrame:
    """Heads of the one model of a committed report.

    Args:
        name: of its folder.
    """
    data = ROOT / "reports" / name / "data"
    heads, within = pd.read_csv(data / "heads.csv"), pd.read_csv(data / "within.csv", low_memory=False)
    own = within[(within["quantity"] == "separation") & (within["k"].astype(str) == str(K))]
    own = own[own["layer"].ne("all") & own["head"].ne("all")][["layer", "head", "p50"]].astype(float)
    tokens = json.loads((data.parent / "summary.json").read_text(encoding="utf-8"))["results"][0]["length"]
    heads = heads.assign(length=tokens)
    return heads.merge(own.rename(columns={"p50": f"separation_k{K}"}), on=["layer", "head"], how="left")


def ranges() -> pd.DataFrame:
    """The 5th, 50th and 95th percentile over the heads of each model."""
    models = {
        "three encoders, untrained": of_encoders("epoch-0"),
        "three encoders, trained": of_encoders("last"),
        **{title: of_report(name) for title, name in _COMMITTED.items()},
    }
    rows = [
        {
            "model": title, "quantity": quantity, "heads": len(heads), "tokens": heads["length"].max(),
            **{f"p{p}": float(f"{heads[quantity].quantile(p / 100):.2g}") for p in (5, 50, 95)},
        }
        for title, heads in models.items()
        for quantity in QUANTITIES
        if heads[quantity].notna().all()  # of MiniLM Δ was measured at another k
    ]  # fmt: skip
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    """The table of the page: median (5th to 95th percentile) over heads."""
    lines = [
        f"| model | heads | tokens | {' | '.join(QUANTITIES.values())} |",
        "|---" * (3 + len(QUANTITIES)) + "|",
    ]
    for model, own in table.groupby("model", sort=False):
        known = {row.quantity: f"{row.p50:g} ({row.p5:g} to {row.p95:g})" for row in own.itertuples()}
        cells = [known.get(quantity, "–") for quantity in QUANTITIES]
        lines.append(f"| {model} | {own['heads'].iloc[0]} | {own['tokens'].iloc[0]:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = ranges()
    found.to_csv(TABLE, index=False)
    print(markdown(found))
