"""From a model to an answer in a few lines: run it with ``python docs/example.py`` in a clone.

Part 1 takes a checkpoint that semdiag trained, part 2 any PyTorch model.
"""

# %% A checkpoint of ours: measure its attention, ask questions of the measurements
from pathlib import Path

import torch

import semdiag
from semdiag.measuring.conditions import Conditions
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.survey import survey
from semdiag.questions.dispersion.answer.comparisons import pair_comparisons

checkpoints = Path(__file__).parents[1] / "checkpoints"
pair = [checkpoints / f"even-pairs-{kind}-seed-153476998" for kind in ("full", "topk-5")]
found = survey(pair, Conditions(samples=100))
print(found.queries.groupby(["model", "layer"])["dispersion"].median())  # one row per query, tidy

findings = Findings(found)
for comparison in findings(pair_comparisons):
    print(comparison.sentence)

# %% Any other model: capture what its attention does, unmodified
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2).eval()
inputs = torch.randn(8, 20, 64)
with semdiag.capture(model, k=16) as calls:
    model(inputs)
print(calls.dispersion(k=[4, 16]).groupby(["layer", "k"])["dispersion"].median())
missed = calls.audit["what"] == "not captured"
print(f"largest residual {calls.residual['residual'].max():.0e}; seen but not captured: {missed.sum()}")

# %% What another k would leave of its attention
table = semdiag.k_sweep(model, inputs).sweep
mass = table[(table["quantity"] == "mass") & (table["layer"] == -1)]
print(mass[["k", "p5", "p50"]].to_string(index=False))
