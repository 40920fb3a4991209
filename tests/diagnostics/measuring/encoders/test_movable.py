"""The private copy: where its tensors lie, that it is the model, and that the model stays as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F

from semdiag.measuring.encoders.weights import MovableEncoder, named_tensors, usable_samples
from semdiag_files import InputError
from semdiag_models import Encoder


@pytest.fixture
def encoder(tiny_config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(tiny_config("topk", 3))


def tokens(count=7, length=12, seed=0):
    return torch.randint(0, 2, (count, length), generator=torch.Generator().manual_seed(seed))


def test_every_tensor_lies_where_its_place_says(encoder):
    moved = MovableEncoder(encoder, dtype=torch.float64)
    own = {t.name: t for t in named_tensors(encoder)}
    assert [p.name for p in moved.places] == list(own)
    for place in moved.places:
        assert torch.equal(moved.origin[place.part].float(), own[place.name].values.flatten())
        assert (place.group, place.bound) == (own[place.name].group, own[place.name].bound)
    covered = sorted(i for p in moved.places for i in range(p.part.start, p.part.stop))
    assert covered == list(range(len(moved.origin)))


@pytest.mark.processor
def test_a_moved_copy_is_the_model_with_those_parameters(encoder):
    moved = MovableEncoder(encoder)
    point = moved.origin + 0.1 * torch.randn(moved.origin.shape, generator=torch.Generator().manual_seed(1))
    moved.move_to(point)
    naive = copy.deepcopy(encoder).eval()
    torch.nn.utils.vector_to_parameters(point, naive.parameters())
    with torch.no_grad():
        logits = naive(tokens())
    assert torch.equal(moved.logits(tokens()), logits)
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 0])
    loss, accuracy = moved.loss_and_accuracy(tokens(), labels)
    assert loss == pytest.approx(float(F.cross_entropy(logits, labels)))
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))


def test_many_samples_are_run_in_passes_that_fit(encoder, monkeypatch):
    monkeypatch.setattr("semdiag.measuring.encoders.weights._TOKENS", 25)
    moved, sizes = MovableEncoder(encoder), []
    moved.encoder.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    whole = moved.logits(tokens())
    assert sizes == [2, 2, 2, 1]
    with torch.no_grad():
        torch.testing.assert_close(whole, copy.deepcopy(encoder).eval()(tokens()))


def test_the_model_itself_stays(encoder):
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.train()
    F.cross_entropy(encoder(tokens()), torch.zeros(7, dtype=torch.int64)).backward()
    gradient = encoder.head.weight.grad.clone()
    moved = MovableEncoder(encoder, dtype=torch.float64, gradients=True)
    moved.move_to(0 * moved.origin)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert encoder.training
    assert torch.equal(encoder.head.weight.grad, gradient)
    assert moved.encoder.head.weight.grad is None


def test_samples_of_nothing_but_padding_have_no_loss(encoder):
    pad = encoder.config.pad_id
    ids, labels = tokens(), torch.arange(7) % 2
    ids[2] = pad
    kept, classes = usable_samples(encoder, ids, labels, "cpu")
    assert len(kept) == 6
    assert classes.tolist() == [0, 1, 1, 0, 1, 0]
    with pytest.raises(InputError, match="no sample has a token"):
        usable_samples(encoder, ids[2:3], labels[2:3], "cpu")
    with pytest.raises(InputError, match="has no labels"):
        usable_samples(encoder, ids, None, "cpu")
