"""Lengths of attention calls where no axis of the inputs says them: images, waveforms, encoder and decoder."""

import pytest
import torch
from measurements_by_hand import k_sweep_tables
from torch import nn

from semdiag.capturing.batches import longest, only_token_ids
from semdiag.measuring.calls.capture import longest_call
from semdiag.measuring.calls.running import unnamed
from semdiag.measuring.measure import measure
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.stability.measure import measure_secants
from semdiag_files import InputError
from semdiag_models import Encoder


def attend(q, k):
    """Two heads."""
    q, k = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (q, k))
    return nn.functional.scaled_dot_product_attention(q, 2 * k, k).transpose(1, 2).flatten(2)


class Patches(nn.Module):
    """Self-attention over patches of 16 numbers of what is flattened: 784 are 49 tokens."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Linear(16, 8)

    def forward(self, x):
        tokens = self.embed(x.flatten(1).unflatten(1, (-1, 16)))
        return attend(tokens, tokens)


class NamedPatches(Patches):
    """The same, which name their embedding, as models of transformers do."""

    def get_input_embeddings(self):
        return self.embed


class Translation(nn.Module):
    """An encoder, and a decoder with attention to it and to itself."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(10, 8)

    def forward(self, input_ids, decoder_input_ids):
        source, target = self.embed(input_ids), self.embed(decoder_input_ids)
        source, target = attend(source, source), attend(target, target)
        return attend(target, source)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids(*shape):
    return torch.randint(10, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def translated():
    return {"input_ids": ids(6, 12), "decoder_input_ids": ids(6, 40)}


def drawn_per_row(table):
    return set(table.groupby(["sample", "layer", "head"]).size())


def test_lengths_are_those_of_the_calls(translated, tiny_config):
    assert longest_call(unnamed(Patches()), [draw(10, 784)]) == (49, 49)
    assert longest_call(unnamed(Patches()), [draw(2, 3, 32), {"x": draw(2, 3, 64, 8)}, draw(2, 160)]) == (96, 96)
    assert longest_call(unnamed(Translation()), [translated]) == (40, 40)
    encoder = Encoder(tiny_config("full"))
    length = 12 + encoder.config.extra_tokens
    assert longest_call(unnamed(encoder), [ids(2, 12) % 2, ids(2, 5) % 2]) == (length, length)


def test_only_integers_on_two_axes_are_token_ids(translated):
    assert only_token_ids(translated)
    assert longest(translated) == 40
    assert only_token_ids({"labels": torch.zeros(6), "input_ids": ids(6, 12)})  # targets of a regression
    assert not only_token_ids(draw(10, 784))
    assert not only_token_ids({**translated, "pixel_values": ids(6, 3, 8, 8)})
    assert not only_token_ids(torch.zeros(6))


def test_one_forward_of_one_sample_sees_the_lengths():
    """Token ids take none; the rows that are drawn stand for all, as those that were looked at twice would not."""
    model, seen = Patches(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    longest_call(unnamed(model), [draw(3, 160), draw(5, 784), draw(2, 320)])
    assert seen == [(1, 784)]
    found = measure(model, draw(5, 784), queries=10)
    assert found.models["samples"].item() == 5
    assert drawn_per_row(found.queries) == {10}
    seen.clear()
    measure(model, draw(5, 784))
    assert seen == [(5, 784)]


def test_as_many_queries_as_asked_are_drawn_of_the_longest_call(translated):
    images = measure(Patches(), draw(10, 784), queries=20)
    assert drawn_per_row(images.queries) == {20}
    assert images.models["share"].item() == pytest.approx(20 / 49)
    words = measure(Translation(), translated, queries=20)
    assert words.models["share"].item() == 0.5
    sizes = words.queries.groupby(["layer", "sample", "head"]).size().groupby("layer").agg(set)
    assert sizes.to_dict() == {0: {6}, 1: {20}, 2: {20}}
    for found in (images, words):
        assert found.remarks.empty
    swept = k_sweep_tables(Patches(), draw(10, 784), plan=KSweepPlan(3), queries=20)["sweep"]
    assert set(swept["queries"][swept["quantity"] == "dispersion"]) == {200, 400}


def test_of_longer_batches_of_an_iterator_the_share_stays_and_the_number_is_told():
    batches = [draw(2, 160), draw(2, 640)]
    known = measure(Patches(), batches, queries=5)
    assert known.models["share"].item() == 5 / 40
    assert known.remarks.empty
    found = measure(Patches(), iter(batches), queries=5)
    assert found.models["share"].item() == 0.5
    assert drawn_per_row(found.queries) == {5, 20}
    (text,) = found.remarks["text"]
    assert text == (
        "queries were drawn: 20 of 40 per sample and head of the longest sequence, not 5: the fraction, 5 of 10, "
        "was fixed before it was seen"
    )
    said = []
    # It holds them all, and sees the last.
    k_sweep_tables(Patches(), iter(batches), None, KSweepPlan(3), queries=5, said=said)
    assert not said


@pytest.mark.slow
def test_every_k_below_the_number_of_keys_is_swept(translated):
    images = draw(3, 3, 16, 16)  # 48 keys
    assert k_sweep_tables(Patches(), images)["sweep"]["k"].max() == 47
    assert k_sweep_tables(Patches(), images, plan=KSweepPlan(16))["sweep"]["k"].max() == 16
    again = k_sweep_tables(Patches(), images, plan=KSweepPlan(2, rerun=True, ks=(2, 16)))["sweep"]
    assert again.query("quantity == 'weight_kept' and k == 16 and layer == -1")["mean"].item() > 0
    assert k_sweep_tables(Translation(), translated)["sweep"]["k"].max() == 39
    with pytest.raises(InputError, match="number of keys, at most 48 here"):
        k_sweep_tables(Patches(), images, plan=KSweepPlan(48))["sweep"]


def test_noise_is_measured_of_as_many_samples_at_once_as_their_scores_allow(monkeypatch):
    """784 numbers of 49 tokens were taken for 784 tokens: 1 sample at a time."""
    model, seen = NamedPatches(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    monkeypatch.setattr("semdiag.questions.stability.measure._SCORES", 2 * 16 * 49**2 * 3)
    found = measure_secants(unnamed(model), [draw(7, 784)], levels=(0.1,))
    assert found["sample"].nunique() == 7
    assert seen[1:] == [6, 6, 2]  # clean and noisy, after the one that is looked at
