"""Settings of runs in words."""

from dataclasses import replace

import pytest

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import measure
from semdiag.measuring.training_runs import setting_in_words
from semdiag_models import Encoder, configure, find_task
from semdiag_models.tasks import draw_data

MODEL, TRAINING = configure(find_task("even-pairs"), {"length": 12, "blocks": 1, "width": 16})


@pytest.mark.parametrize(
    ("model", "training", "words"),
    [
        ({}, {}, "usual"),
        ({"attention": "topk", "k": 3, "mlp_width": 8}, {}, "mlp_width 8"),
        ({"inverse_temperature": 4.0}, {"learning_rate": 0.5}, "inverse_temperature 4.0, learning_rate 0.5"),
        ({}, {"epochs": 3, "seed": 5, "until": 0.9, "snapshots": (1,)}, "usual"),  # how long, and which draw
        ({}, {"train_samples": 50, "optimizer": "adam"}, "optimizer adam, train_samples 50"),
    ],
)
def test_a_setting_says_what_is_unusual_but_the_attention(model, training, words):
    encoder = Encoder(replace(MODEL, **model)).eval()
    loaded = LoadedModel("x", "", encoder, "semdiag", "last", training=replace(TRAINING, **training))
    assert setting_in_words(loaded) == words
    tokens = draw_data(replace(TRAINING, train_samples=2), 12, MODEL.pad_id)[0].tokens
    assert measure(loaded, tokens).models["setting"].tolist() == [words]
