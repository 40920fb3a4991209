"""Tiny trained runs, encoders with wild weights, measurements made up by hand, and the paper's fixture."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.capturing.loading import load
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.table import typed
from semdiag_models import Encoder, ModelConfig, TrainingConfig, open_run, train_run

LENGTH, BLOCKS, HEADS, K, EPOCHS, SAMPLES = 12, 2, 2, 3, 2, 40


@pytest.fixture
def own_random_numbers():
    """A random state of the test's own, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Recorder(SurveyProgress):
    """Keeps what a survey tells of its progress."""

    def __init__(self):
        self.stages, self.expected, self.advanced, self.texts = [], [], [], []
        self.events = []  # stages and steps in their order

    def announce(self, stage, steps):
        self.stages.append((stage, steps))
        self.events.append((stage, steps))

    def expect(self, steps):
        self.expected.append(steps)

    def advance(self, steps):
        self.advanced.append(steps)
        self.events.append(steps)

    def say(self, text):
        self.texts.append(text)


@pytest.fixture
def recorder():
    """Progress that is kept in lists."""
    return Recorder()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEMDIAG_CHECKPOINTS", raising=False)
    return tmp_path


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


_MODEL = {
    "sha256": "0" * 64,
    "source": "semdiag",
    "snapshot": "last",
    "task": "even-pairs",
    "attention": "full",
    "k": None,
    "seed": 1,
    "epoch": 3,
    "blocks": 1,
    "heads": 1,
    "width": 8,
    "length": 4,
    "parameters": 100,
    "samples": 2,
    "inputs": "made up",
    "accuracy": 0.5,
    "attention_found": 1,
    "attention_captured": 1,
    "residual": 1e-7,
}


@pytest.fixture
def made_up():
    """Call with (path, dispersions, facts) for each model: one layer, one head, four queries a sample."""

    def make(*models):
        rows, queries, loads = [], [], []
        for path, dispersions, facts in models:
            rows.append({"model": path, **_MODEL, **facts})
            values = np.asarray(dispersions, float)
            count = np.arange(len(values))
            place = {"model": path, "sample": count // 4, "layer": 0, "head": 0}
            table = {**place, "query": count % 4, "keys": 4, "kept": 4, "dispersion": values}
            queries.append(pd.DataFrame({**table, "separation": values / 10}))
            loads.append(pd.DataFrame({**place, "key": count % 4, "load": count}))
        types = {
            **dict.fromkeys(("k", "seed", "epoch"), "Int64"),
            "sha256": "str",
            "task": "str",
            "accuracy": "float64",
        }
        return Measurements(
            models=typed(pd.DataFrame(rows), types),
            queries=pd.concat(queries, ignore_index=True),
            loads=pd.concat(loads, ignore_index=True),
            history=pd.DataFrame({"model": [rows[0]["model"]], "epoch": [1], "train_loss": [0.1]}),
            non_finite=pd.DataFrame({name: [] for name in ("model", "sample", "layer", "head", "scores")}),
            provenance={"seed": 0, "device": "cpu"},
        )

    return make


KINDS = {
    "full": ("full", None, {}),
    "banded": ("banded", 5, {}),
    "block": ("block", 5, {}),
    "topk": ("topk", 3, {}),
    "random": ("random", 3, {"selection_seed": 1}),
    "banded, two global tokens and CLS": ("banded", 3, {"global_tokens": 2, "pooling": "cls"}),
    "block, a global token, post-norm": ("block", 3, {"global_tokens": 1, "norm": "post"}),
    "topk, CLS, post-norm": ("topk", 3, {"pooling": "cls", "norm": "post"}),
}


@pytest.fixture(params=KINDS)
def kind(request):
    """Each kind of attention that a bound covers in turn, and what else matters to the bounds."""
    return request.param


@pytest.fixture
def wild_encoder(tiny_config):
    """Call with a key of KINDS, or bottomk: a random float64 encoder with large weights, in evaluation mode."""

    def make(kind, size=1.5, seed=3, **others):
        attention, k, fields = KINDS.get(kind, (kind, 3, {}))
        encoder = Encoder(tiny_config(attention, k, **fields, **others)).double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in encoder.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(size * noise / parameter.shape[-1] ** 0.5)
        return encoder

    return make


@pytest.fixture
def padded_tokens():
    """Seven samples of length 12; PAD in four of them, one with a single token; and their labels."""
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(2, (7, 12), generator=generator)
    for sample, length in ((0, 9), (2, 4), (3, 1), (6, 11)):
        found[sample, length:] = 2
    return found, torch.randint(2, (7,), generator=generator)


@pytest.fixture
def untouched():
    """Call with an encoder, get a check that it has not changed: parameters, mode, hooks, random state."""

    def remember(encoder):
        state = {name: value.clone() for name, value in encoder.state_dict().items()}
        modes = [module.training for module in encoder.modules()]
        random = torch.get_rng_state()

        def check():
            assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())
            assert [module.training for module in encoder.modules()] == modes
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())
            assert all(p.grad is None and p.requires_grad for p in encoder.parameters())
            assert torch.equal(torch.get_rng_state(), random)

        return check

    return remember
