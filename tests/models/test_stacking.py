import pytest
import torch

from semdiag_models.step import random_state, restore_random_state
from semdiag_models.training import DivergedError, Trainer, train_together

CPU = torch.device("cpu")
SEEDS = (5, 6, 7)
KINDS = [("full", None), ("banded", 3), ("block", 3), ("topk", 3)]


def opened(model, trainings, double=True):
    """A fresh trainer and the random state it goes on in, for every configuration."""
    trainers, states = [], []
    for training in trainings:
        trainers.append(Trainer(model, training, CPU))
        states.append(random_state(CPU))
        if double:
            trainers[-1].encoder.double()
    return trainers, states


def alone(model, trainings, double=True):
    trainers, states = opened(model, trainings, double)
    for trainer, state in zip(trainers, states, strict=True):
        restore_random_state(state)
        trainer.run(lambda _: None)
    return trainers


def close(one, other, tolerance):
    for (name, p), q in zip(one.encoder.named_parameters(), other.encoder.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def ignore(trainer, progress):
    """Take no notice of an epoch."""


@pytest.mark.processor
@pytest.mark.parametrize("length", [8, 9])  # 9: with PAD
@pytest.mark.parametrize(("kind", "k"), KINDS)
def test_together_is_alone_with_dropout_clipping_and_a_short_last_batch(
    tiny_model, tiny_training, kind, k, length
):
    model = tiny_model(attention=kind, k=k, dropout=0.2, length=length, heads=2, blocks=2)
    trainings = [tiny_training(seed=seed, gradient_clip=0.2, learning_rate=0.5) for seed in SEEDS]
    trainers, states = opened(model, trainings)
    train_together(trainers, states, ignore)
    for one, other in zip(trainers, alone(model, trainings), strict=True):
        close(one, other, 1e-10)
        for name in ("train_accuracy", "holdout_accuracy", "learning_rate", "epoch"):
            assert one.history[name] == pytest.approx(other.history[name])
        assert one.history["train_loss"] == pytest.approx(other.history["train_loss"], rel=1e-5)


@pytest.mark.processor
def test_in_single_precision_it_is_alone_up_to_rounding(tiny_model, tiny_training):
    """Of full attention: where rounding exchanged two of the largest keys, it could grow to anything."""
    model = tiny_model(dropout=0.1)
    trainings = [tiny_training(seed=seed) for seed in SEEDS]
    trainers, states = opened(model, trainings, double=False)
    train_together(trainers, states, ignore)
    for one, other in zip(trainers, alone(model, trainings, double=False), strict=True):
        close(one, other, 1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_every_seed_gets_its_optimisers_memory_back(tiny_model, tiny_training, optimizer):
    model = tiny_model(dropout=0.1)
    trainings = [tiny_training(seed=seed, optimizer=optimizer, learning_rate=0.01) for seed in SEEDS]
    trainers, states = opened(model, trainings)
    train_together(trainers, states, ignore)
    for one, other in zip(trainers, alone(model, trainings), strict=True):
        close(one, other, 1e-9)
        for p, q in zip(one.encoder.parameters(), other.encoder.parameters(), strict=True):
            mine, theirs = one.optimizer.state[p], other.optimizer.state[q]
            assert mine["step"] == theirs["step"] == 12
            torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=0, atol=1e-9)


def test_a_seed_that_lags_behind_is_brought_up_and_one_that_has_converged_leaves(tiny_model, tiny_training):
    model = tiny_model(dropout=0.1)
    trainings = [tiny_training(seed=seed, epochs=4) for seed in SEEDS]
    expected = alone(model, trainings)
    trainers, states = opened(model, trainings)
    ahead, ahead_states = opened(model, [tiny_training(seed=5, epochs=2)])
    train_together(ahead, ahead_states, ignore)
    trainers[0].encoder.load_state_dict(ahead[0].encoder.state_dict())
    trainers[0].epoch, trainers[0].history, states[0] = 2, ahead[0].history, ahead_states[0]
    order = []
    train_together(trainers, states, lambda trainer, _: order.append((trainer.training.seed, trainer.epoch)))
    assert order[:4] == [(6, 1), (7, 1), (6, 2), (7, 2)]
    assert order[4:7] == [(5, 3), (6, 3), (7, 3)]
    for one, other in zip(trainers, expected, strict=True):
        close(one, other, 1e-10)


def test_a_seed_that_diverges_is_named_and_the_others_train_to_their_ends(tiny_model, tiny_training):
    trainers, states = opened(tiny_model(), [tiny_training(seed=seed) for seed in SEEDS])
    trainers[1].encoder.head.bias.data.fill_(float("nan"))
    initial = trainers[1].encoder.embedding.weight.clone()
    with pytest.raises(DivergedError, match=r"^Seed 6: The training loss became nan in epoch 1") as raised:
        train_together(trainers, states, ignore)
    assert raised.value.members == (1,)
    assert [trainer.epoch for trainer in trainers] == [3, 0, 3]
    assert torch.equal(trainers[1].encoder.embedding.weight, initial)
    assert all(p.isfinite().all() for i in (0, 2) for p in trainers[i].encoder.parameters())


def test_a_seed_whose_last_step_went_too_far_has_no_such_epoch(tiny_model, tiny_training):
    training = [tiny_training(seed=seed, learning_rate=1e38, batch_size=100) for seed in SEEDS]
    trainers, states = opened(tiny_model(), training)
    with pytest.raises(DivergedError, match=r"^Seed 5: The training loss became (nan|inf) in epoch 1") as raised:
        train_together(trainers, states, ignore)
    assert raised.value.members == (0, 1, 2)
    assert [trainer.history["epoch"] for trainer in trainers] == [[], [], []]


@pytest.mark.processor
def test_different_masks_of_one_task_train_together(tiny_model, tiny_training):
    models = [tiny_model(attention=kind, k=k, dropout=0.2) for kind, k in KINDS]
    trainers, states = [], []
    for model in models:
        (trainer,), (state,) = opened(model, [tiny_training()])
        trainers.append(trainer)
        states.append(state)
    train_together(trainers, states, ignore)
    for model, one in zip(models, trainers, strict=True):
        close(one, alone(model, [tiny_training()])[0], 1e-10)
