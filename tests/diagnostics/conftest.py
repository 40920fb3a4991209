"""Two tiny trained runs that differ only in their attention, and the paper's fixture."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from semdiag.capturing.loading import load
from semdiag_models import ModelConfig, TrainingConfig, open_run, train_run

LENGTH, BLOCKS, HEADS, K, EPOCHS, SAMPLES = 12, 2, 2, 3, 2, 40


@dataclass(frozen=True)
class TinyRuns:
    """Folders of finished runs (epoch-0.pt, best.pt, last.pt)."""

    folder: Path
    full: Path
    topk: Path
    length: int = LENGTH
    blocks: int = BLOCKS
    heads: int = HEADS
    k: int = K
    epochs: int = EPOCHS
    holdout_samples: int = SAMPLES


@pytest.fixture(scope="session")
def tiny_config():
    """Call with an attention, a k and what else differs: the architecture of the tiny runs."""

    def config(attention="full", k=None, **others):
        sizes = {"vocabulary_size": 3, "classes": 2, "length": LENGTH, "blocks": BLOCKS, "heads": HEADS}
        widths = {"width": 16, "mlp_width": 16, "head_width": 8}
        return ModelConfig(**{**sizes, **widths, "attention": attention, "k": k, **others})

    return config


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory, tiny_config):
    """Even pairs, length 12, two epochs, for full and top-3 attention. Do not write to these folders."""
    folder = tmp_path_factory.mktemp("runs")
    for attention, k in (("full", None), ("topk", K)):
        training = TrainingConfig("even-pairs", LENGTH, EPOCHS, 7, 100, SAMPLES)
        run = folder / attention
        with torch.random.fork_rng():
            trainer = open_run(
                run, tiny_config(attention, k), training, torch.device("cpu"), resume=False, overwrite=False
            )
            train_run(run, trainer, {"command": "made by the tests"})
    return TinyRuns(folder, folder / "full", folder / "topk")


@pytest.fixture
def tiny_models(tiny_runs):
    """The two runs' models, loaded: full, top-k."""
    return load(tiny_runs.full), load(tiny_runs.topk)


@dataclass(frozen=True)
class PaperCode:
    """A checkpoint of the paper's released code and the true values of its 16 sequences."""

    checkpoint: Path
    config_file: Path
    config: dict
    true: dict


@pytest.fixture(scope="session")
def paper_code():
    """The fixture that the released code's own modules made, in float64."""
    folder = Path(__file__).parents[1] / "fixtures" / "paper_code"
    config_file = folder / "fresh_windowed5.json"
    with np.load(folder / "fresh_windowed5.npz") as file:
        true = {name: torch.from_numpy(file[name]) for name in file.files}
    config = json.loads(config_file.read_text(encoding="utf-8"))
    return PaperCode(folder / "fresh_windowed5.pt", config_file, config, true)
