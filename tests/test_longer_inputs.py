"""The study of lengths: the longer copy of an encoder, and what is measured on it."""

from pathlib import Path

import pytest
import torch
from lengths import longer, measure_lengths

from semdiag.capturing.loading import load
from semdiag_models import find_task

pytestmark = pytest.mark.slow  # of a finished study
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def model(attention):
    (path,) = CHECKPOINTS.glob(f"even-pairs-{attention}-seed-153476998")
    return load(path)


@pytest.mark.parametrize("attention", ["full", "topk-5", "block-5-global-1", "banded-5-global-1"])
def test_a_longer_copy_answers_as_before_and_takes_longer_inputs(attention):
    encoder = model(attention).encoder
    length = encoder.config.length
    bigger = longer(encoder, length + 20)
    assert (longer(encoder, length) is encoder, bigger.config.length) == (True, length + 20)
    tokens = torch.randint(0, 2, (4, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert bigger(tokens.repeat(1, 2)[:, : length + 20]).shape == (4, 2)
        if not encoder.config.global_tokens:  # they move behind the longest input
            assert torch.equal(bigger(tokens), encoder(tokens))


def test_accuracy_and_percentiles_are_those_of_the_model_on_fresh_samples():
    run = model("topk-5")
    table = measure_lengths(run, (60, 20), samples=30, dtype=torch.float64)
    value = table[table["layer"] == -1].set_index(["length", "quantity", "statistic"])["value"]
    tokens, labels = find_task("even-pairs").sample(30, 60, torch.Generator().manual_seed(2**32))
    with torch.no_grad():
        right = longer(run.encoder, 60).double()(tokens).argmax(1) == labels
    assert value[60, "accuracy", "value"] == pytest.approx(float(right.double().mean()))
    for n in (20, 60):
        assert value[n, "accuracy", "low"] <= value[n, "accuracy", "value"] <= value[n, "accuracy", "high"]
        assert 0 <= value[n, "dispersion", "p5"] <= value[n, "dispersion", "p50"] <= value[n, "dispersion", "p95"]
