"""Write manifest.json: what each reference checkpoint is, how it was made, and its hash.

Run from the repository's root after training: ``python checkpoints/manifest.py``.
"""

import json
from pathlib import Path

from semdiag_models import read_checkpoint, sha256, weights_sha256

HERE = Path(__file__).parent
_MADE_WITH = ("semdiag", "torch", "device", "threads", "processor")


def describe(run: Path) -> dict[str, object]:
    """Describe one run by its last snapshot."""
    last = read_checkpoint(run / "last.pt")
    accuracies = last.history["train_accuracy"]
    reached = [int(e) for e, a in zip(last.history["epoch"], accuracies, strict=True) if a >= 0.95]
    return {
        "run": run.name,
        "command": last.provenance["command"],
        "task": last.training.task,
        "attention": last.model.attention,
        "k": last.model.k,
        "global_tokens": last.model.global_tokens,
        "seed": last.training.seed,
        "epochs": last.epoch,
        "epochs_to_95_percent_train_accuracy": reached[0] if reached else None,
        "train_accuracy": accuracies[-1],
        "holdout_accuracy": last.history["holdout_accuracy"][-1],
        "trained_with": {key: last.provenance[key] for key in _MADE_WITH if key in last.provenance},
        "history": f"{run.name}/history.csv",
        "sha256": {file.name: sha256(file) for file in (run / "epoch-0.pt", run / "last.pt")},
        "weights_sha256": {
            file.name: weights_sha256(read_checkpoint(file).state)
            for file in (run / "epoch-0.pt", run / "last.pt")
        },
    }


def finished(run: Path) -> bool:
    """Whether a run has done all its epochs."""
    last = read_checkpoint(run / "last.pt")
    return last.epoch == last.training.epochs


if __name__ == "__main__":
    runs = sorted(file.parent for file in HERE.glob("*/last.pt"))
    entries = [describe(run) for run in runs if finished(run)]
    (HERE / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"{len(entries)} finished runs of {len(runs)}")
