"""Measurements made up by hand."""

import numpy as np
import pandas as pd
import pytest
import torch

from semdiag.measurement.measurements import Measurements
from semdiag_models import Encoder

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
        types = {**dict.fromkeys(("k", "seed", "epoch"), "Int64"), "sha256": "str", "task": "str"}
        return Measurements(
            models=pd.DataFrame(rows).astype(types),
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
