"""Frozen queries and keys: not a bit of them moves, and all else learns as if they were constants."""

import pytest
import torch
import torch.nn.functional as F

from semdiag_files import InputError
from semdiag_models import ModelConfig, TrainingConfig, find_task
from semdiag_models.checkpoint import read_checkpoint
from semdiag_models.model import Encoder
from semdiag_models.run_folder import open_run, train_run
from semdiag_models.sweep import configure, identity, name_run, read_sweep
from semdiag_models.tasks import draw_data
from semdiag_models.train import Trainer, random_state, set_random_state

CPU = torch.device("cpu")
FROZEN = {"frozen": ("qk",)}
OPTIMIZERS = {
    "sgd": {},
    "sgd that decays": {"optimizer": "sgd", "weight_decay": 0.1},
    "adam that decays": {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1},
}


def parted(encoder):
    """Queries and keys of all blocks, and everything else, each a list of tensors."""
    held, free = [], []
    for name, parameter in encoder.named_parameters():
        if "attention.qkv" in name:
            rows = 2 * encoder.config.heads * encoder.config.head_width
            assert len(parameter) == 3 * rows // 2
            held.append(parameter.detach()[:rows].clone())
            free.append(parameter.detach()[rows:].clone())
        else:
            free.append(parameter.detach().clone())
    return held, free


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("k", [None, 3])
def test_queries_and_keys_stay_to_the_bit_and_all_else_moves(tiny_model, tiny_training, optimizer, k):
    model = tiny_model(attention="full" if k is None else "topk", k=k, heads=2, blocks=2)
    trainer = Trainer(model, tiny_training(**FROZEN, **OPTIMIZERS[optimizer]), CPU)
    held, free = parted(trainer.encoder)
    trainer.run(lambda _: None)
    after_held, after_free = parted(trainer.encoder)
    assert all(torch.equal(one, other) for one, other in zip(held, after_held, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(free, after_free, strict=True))


@pytest.mark.parametrize("score_gradient", ["exact", "straight-through"])
def test_an_epoch_is_clipped_sgd_of_the_other_parameters(tiny_model, tiny_training, score_gradient):
    """Against a loop in which queries and keys are constants, whose gradient no norm counts."""
    model = tiny_model(attention="topk", k=3, dropout=0, score_gradient=score_gradient)
    training = tiny_training(**FROZEN, learning_rate=0.5, gradient_clip=0.15)
    trainer = Trainer(model, training, CPU)
    trainer.encoder.double()
    random = random_state(CPU)
    naive = Encoder(model).double().train()
    naive.load_state_dict(trainer.encoder.state_dict())
    set_random_state(random)
    trainer.run(lambda _: None)

    train, _ = draw_data(training, model.length, 2)
    set_random_state(random)
    rows, clipped = 2 * model.heads * model.head_width, 0
    for epoch in range(training.epochs):
        for batch in torch.split(torch.randperm(training.train_samples), training.batch_size):
            naive.zero_grad()
            F.cross_entropy(naive(train.tokens[batch]), train.labels[batch]).backward()
            free = {
                name: p.grad[rows:] if "attention.qkv" in name else p.grad for name, p in naive.named_parameters()
            }
            norm = torch.cat([g.flatten() for g in free.values()]).norm()
            clipped += bool(norm > training.gradient_clip)
            factor = min(1.0, training.gradient_clip / (float(norm) + 1e-6))
            rate = training.learning_rate * training.learning_rate_decay**epoch
            with torch.no_grad():
                for name, p in naive.named_parameters():
                    moved = p[rows:] if "attention.qkv" in name else p
                    moved -= rate * factor * free[name]
    assert clipped
    for (name, p), q in zip(naive.named_parameters(), trainer.encoder.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_a_run_can_be_resumed_and_its_checkpoint_says_what_was_frozen(tiny_model, tiny_training, tmp_path):
    model = tiny_model(attention="topk", k=3, score_gradient="straight-through")
    ends = []
    for name, parts in (("whole", (3,)), ("halves", (1, 3))):
        for epochs in parts:
            training = tiny_training(**FROZEN, epochs=epochs)
            trainer = open_run(tmp_path / name, model, training, CPU, resume=epochs > parts[0], overwrite=False)
            train_run(tmp_path / name, trainer, {})
        ends.append(read_checkpoint(tmp_path / name / "last.pt"))
    assert all(torch.equal(ends[0].state[name], ends[1].state[name]) for name in ends[0].state)
    assert ends[0].training.frozen == ("qk",)
    assert ends[0].model.score_gradient == "straight-through"
    with pytest.raises(InputError, match=r"was trained with frozen=\['qk'\], not \[\]"):
        open_run(tmp_path / "whole", model, tiny_training(), CPU, resume=True, overwrite=False)


@pytest.mark.parametrize(
    ("frozen", "said"),
    [(("kq",), "qk"), (("qk", "qk"), "frozen names every part once"), (("all",), "Unknown frozen")],
)
def test_what_cannot_be_frozen_is_refused(frozen, said):
    with pytest.raises(InputError, match=said):
        TrainingConfig("parity", 8, 1, frozen=frozen)


@pytest.mark.parametrize("value", ["qk", [1], [["qk"]]])
def test_a_file_must_have_a_list_of_names(value):
    with pytest.raises(InputError, match=r"frozen must be tuple\[str, \.\.\.\]"):
        TrainingConfig.from_dict({"task": "parity", "length": 8, "epochs": 1, "frozen": value})


def test_no_hash_or_name_of_a_run_without_it_has_changed():
    model, training = configure(find_task("parity"), {"activation": "gelu", "heads": 4, "seed": 7})
    assert name_run(model, training) == "parity-full-seed-7-heads-4-gelu-d96f79b2"  # as in earlier versions
    frozen = configure(find_task("parity"), {"seed": 7, "frozen": ["qk"]})
    assert name_run(*frozen).startswith("parity-full-seed-7-frozen-qk-")
    assert identity(*frozen) != identity(frozen[0], TrainingConfig.from_dict(frozen[1].to_dict() | {"frozen": []}))
    old = {name: value for name, value in training.to_dict().items() if name != "frozen"}
    assert TrainingConfig.from_dict(old) == training
    old = {name: value for name, value in model.to_dict().items() if name != "score_gradient"}
    assert ModelConfig.from_dict(old) == model


def test_a_sweep_takes_one_list_or_several(tmp_path):
    file = tmp_path / "sweep.toml"
    topk = '{ attention = "topk", k = 3, score_gradient = ["exact", "straight-through"] }'
    for written, expected in (
        ('frozen = ["qk"]\n[grid]\n', [("qk",)] * 3),
        ('[grid]\nfrozen = ["qk"]\n', [("qk",)] * 3),
        ('[grid]\nfrozen = [[], ["qk"]]\n', [()] * 3 + [("qk",)] * 3),
    ):
        file.write_text(f'{written}task = "parity"\nattention = ["full", {topk}]\n', encoding="utf-8")
        runs = read_sweep(file)
        assert [run.training.frozen for run in runs] == expected
        assert len({run.name for run in runs}) == len(expected)
    file.write_text('[grid]\ntask = "parity"\nfrozen = ["kq"]\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"Unknown frozen .*Known: qk"):
        read_sweep(file)
