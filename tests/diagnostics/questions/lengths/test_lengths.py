"""Other lengths: the longer copy, and what is measured on it."""

import copy
from dataclasses import replace

import pytest
import torch

from semdiag.capturing.loading import load
from semdiag.questions.lengths.measure import check_lengths, longer, measure_lengths
from semdiag_models import Encoder, InputError, find_task

KINDS = [
    ("full", None, {}), ("topk", 3, {}), ("bottomk", 3, {}), ("banded", 3, {}), ("block", 3, {}),
    ("topk", 3, {"pooling": "cls"}),
]  # fmt: skip


@pytest.mark.processor
@pytest.mark.parametrize(("attention", "k", "others"), KINDS)
def test_a_longer_copy_answers_as_before_to_what_the_model_takes(tiny_config, attention, k, others):
    encoder = Encoder(tiny_config(attention, k, **others)).double().eval()
    tokens = torch.randint(0, 2, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(longer(encoder, 30)(tokens), encoder(tokens))


def test_the_model_is_not_touched_and_the_copy_takes_longer_inputs(tiny_config):
    encoder = Encoder(tiny_config("topk", 3)).eval()
    before, config = copy.deepcopy(encoder.state_dict()), encoder.config
    bigger = longer(encoder, 30)
    with torch.no_grad():
        assert bigger(torch.zeros(1, 30, dtype=torch.int64)).shape == (1, 2)
        bigger.head.weight.add_(1)
    assert encoder.config == config
    assert all(torch.equal(before[name], values) for name, values in encoder.state_dict().items())
    assert longer(encoder, 8) is encoder


def test_positions_go_on_and_global_tokens_move_behind_the_longest_input(tiny_config):
    encoder = Encoder(tiny_config("banded", 3, global_tokens=2)).double().eval()
    bigger = longer(encoder, 30)
    assert torch.equal(bigger.positions[:14], encoder.positions)
    tokens = torch.zeros(1, 30, dtype=torch.int64)
    ids = bigger.sequence(tokens)[0, -2:]
    expected = bigger.embedding(ids) * 16**0.5 + bigger.positions[30:32]
    assert torch.allclose(bigger.embed(tokens)[0, -2:], expected)


def test_random_attention_is_refused_beyond_its_length_and_taken_within(tiny_config, tiny_runs):
    from dataclasses import replace

    model = replace(load(tiny_runs.full), module=Encoder(tiny_config("random", 3)))
    check_lengths([model], [6, 12])
    with pytest.raises(InputError, match="Random attention drew its keys"):
        check_lengths([model], [12, 20])


@pytest.mark.parametrize("length", [0, -3])
def test_lengths_that_no_input_has_are_refused(tiny_runs, length):
    with pytest.raises(InputError, match="at least 1"):
        check_lengths([load(tiny_runs.full)], [length])


def test_accuracy_and_percentiles_are_those_of_the_model_on_fresh_samples(tiny_runs):
    model = load(tiny_runs.topk)
    table = measure_lengths(model, [20, 8, 12], samples=30, dtype=torch.float64)
    again = measure_lengths(model, [8, 12, 20], samples=30, dtype=torch.float64)
    assert table.equals(again)
    assert table["length"].unique().tolist() == [8, 12, 20]
    value = table[table["layer"] == -1].set_index(["length", "quantity", "statistic"])["value"]
    tokens, labels = find_task("even-pairs").sample(30, 20, torch.Generator().manual_seed(2**32))
    with torch.no_grad():
        right = longer(model.encoder, 20).double()(tokens).argmax(1) == labels
    assert value[20, "accuracy", "value"] == pytest.approx(float(right.double().mean()))
    for n in (8, 12, 20):
        assert value[n, "accuracy", "low"] <= value[n, "accuracy", "value"] <= value[n, "accuracy", "high"]
        assert 0 <= value[n, "dispersion", "p5"] <= value[n, "dispersion", "p50"] <= value[n, "dispersion", "p95"]


def test_samples_are_padded_as_in_training_where_padding_counts(tiny_runs):
    model = load(tiny_runs.topk)
    config = replace(model.encoder.config, k=5, pad_as_token=True, length=15)
    encoder = Encoder(config).double().eval()
    table = measure_lengths(replace(model, module=encoder), [7, 12, 16], samples=30, dtype=torch.float64)
    accuracy = table[table["statistic"] == "value"].set_index("length")["value"]
    for length, positions in ((7, 10), (12, 15), (16, 20)):
        tokens, labels = find_task("even-pairs").sample(30, length, torch.Generator().manual_seed(2**32))
        padded = torch.nn.functional.pad(tokens, (0, positions - length), value=config.pad_id)
        with torch.no_grad():
            right = longer(encoder, positions)(padded).argmax(1) == labels
        assert accuracy[length] == pytest.approx(float(right.double().mean()))


def test_a_longer_copy_leaves_the_random_numbers_as_they_were(tiny_config):
    encoder = Encoder(tiny_config())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    longer(encoder, 30)
    assert torch.equal(torch.rand(3), expected)
