"""Small configurations, a naive attention, and a random state of their own for every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from semdiag_models.config import ModelConfig, TrainingConfig


@pytest.fixture(autouse=True)
def _own_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Have the encoders of a test built in float64, positions included."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def tiny_model() -> Callable[..., ModelConfig]:
    """Call with the fields that matter: an encoder for even-pairs that trains in no time."""

    def make(**fields: Any) -> ModelConfig:
        small = {"vocabulary_size": 3, "classes": 2, "length": 8, "blocks": 1, "width": 8, "mlp_width": 8}
        return ModelConfig(**{**small, "head_width": 8, **fields})

    return make


@pytest.fixture
def tiny_training() -> Callable[..., TrainingConfig]:
    """Call with the fields that matter: even-pairs, 40 samples, 3 epochs."""

    def make(**fields: Any) -> TrainingConfig:
        small = {"task": "even-pairs", "length": 8, "epochs": 3, "train_samples": 40, "holdout_samples": 30}
        return TrainingConfig(**{**small, "batch_size": 12, "seed": 5, **fields})

    return make


@pytest.fixture
def naive_attention() -> Callable[..., Tensor]:
    """Call with q, k, v (B, H, L, D), a scale, and optionally what is allowed and kept, both (B, H, L, L)."""

    def mix(q, k, v, scale, allowed=None, kept=None, p=0.0):
        scores = scale * torch.einsum("bhid,bhjd->bhij", q, k)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        if kept is not None:
            weights = weights * kept / (1 - p)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    return mix


@pytest.fixture(
    params=[
        lambda f, x: make_fx(f)(x),
        lambda f, x: torch.jit.trace(f, x),
        lambda f, _: torch.compile(f, backend="eager", fullgraph=True),
    ],
    ids=["fx", "jit", "compile"],
)
def traced(request: Any) -> Callable[..., Any]:
    """A function as torch follows it, given the function and a first input."""
    return request.param
