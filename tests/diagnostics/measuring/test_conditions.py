"""What dtype means, and that float64 numbers do not hang on the processor's sine."""

import math

import pytest
import torch
from torch import nn

from semdiag.capturing.loading import load
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "device", "decided"),
    [("auto", "cpu", "float64"), ("auto", "mps", "float32"), ("float32", "cpu", "float32")],
)
def test_encoders_are_measured_in_float64_where_there_is_one(tiny_runs, asked, device, decided):
    models = [load(tiny_runs.full)]
    assert Conditions(dtype=asked).decided(models, torch.device(device)).dtype == decided


def test_with_any_other_model_among_them_all_are_measured_in_float32(tiny_runs):
    models = [load(tiny_runs.full), unnamed(nn.TransformerEncoderLayer(8, 2, batch_first=True))]
    assert Conditions().decided(models, CPU).dtype == "float32"
    assert Conditions(dtype="float64").decided(models, CPU).dtype == "float64"


def test_what_was_decided_stands_in_the_provenance(tiny_runs):
    assert survey([tiny_runs.full], Conditions(samples=4)).provenance["dtype"] == "float64"


def test_a_loaded_encoder_has_positions_rounded_once(tiny_runs):
    positions = load(tiny_runs.full).encoder.positions
    width = positions.shape[1]
    for place, channel in ((0, 0), (1, 1), (3, width - 2), (len(positions) - 1, 2)):
        angle = place * math.exp(-(channel - channel % 2) * math.log(10000) / width)
        exact = math.cos(angle) if channel % 2 else math.sin(angle)
        assert positions[place, channel].item() == torch.tensor(exact, dtype=torch.float64).float().item()
