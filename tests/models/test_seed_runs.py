import pytest
import torch

from semdiag_files import InputError
from semdiag_models.checkpoint import read_checkpoint
from semdiag_models.run_folder import open_run, open_seed_runs, train_run, train_seed_runs

CPU = torch.device("cpu")
SEEDS = (5, 6)


class StoppedError(Exception):
    """An interruption from outside."""


@pytest.fixture
def together(tmp_path, tiny_model, tiny_training):
    """Call to train two seeds at once; extra fields go to the training configuration."""

    def train(*, seeds=SEEDS, resume=False, overwrite=False, after_epoch=None, **fields):
        model = tiny_model(attention="topk", k=3, dropout=0.1)
        choices = {"resume": resume, "overwrite": overwrite}
        runs = open_seed_runs(tmp_path, model, tiny_training(**fields), seeds, CPU, **choices)
        train_seed_runs(runs, {"command": "x"}, after_epoch or (lambda trainer, progress: None))
        return runs

    return train


def folder_of(tmp_path, seed):
    return tmp_path / f"even-pairs-topk-3-seed-{seed}"


def close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.processor
def test_each_folder_ends_up_as_if_its_seed_had_been_trained_alone(together, tmp_path, tiny_model, tiny_training):
    together(snapshots=(2,))
    for seed in SEEDS:
        alone = tmp_path / "alone" / str(seed)
        training = tiny_training(seed=seed, snapshots=(2,))
        model = tiny_model(attention="topk", k=3, dropout=0.1)
        train_run(alone, open_run(alone, model, training, CPU, resume=False, overwrite=False), {"command": "x"})
        names = sorted(path.name for path in alone.iterdir())
        assert sorted(path.name for path in folder_of(tmp_path, seed).iterdir()) == names
        for name in ("epoch-0", "epoch-2", "last", "best"):
            one, other = (read_checkpoint(f / f"{name}.pt") for f in (folder_of(tmp_path, seed), alone))
            assert all(torch.equal(one.state[key], other.state[key]) for key in one.state)
            assert (one.model, one.training, one.epoch) == (other.model, other.training, other.epoch)
            assert one.rng.keys() == other.rng.keys()
            assert all(torch.equal(one.rng[key], other.rng[key]) for key in one.rng)  # the very same draws
            assert one.provenance == other.provenance
        assert len((folder_of(tmp_path, seed) / "history.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("stop", [(5, 2), (6, 2), (6, 1)])
def test_an_interrupted_and_resumed_pair_arrives_where_the_uninterrupted_one_does(together, tmp_path, stop):
    whole = {run.training.seed: run.encoder.state_dict() for run in together(epochs=4)}

    def interrupt(trainer, progress):
        if (trainer.training.seed, trainer.epoch) == stop:
            raise StoppedError

    with pytest.raises(StoppedError):
        together(epochs=4, overwrite=True, after_epoch=interrupt)
    torch.rand(5)
    for run in together(epochs=4, resume=True):
        close(run.encoder.state_dict(), whole[run.training.seed])
        assert run.history["epoch"] == [1, 2, 3, 4]


def test_a_seed_may_be_added_on_resuming_and_one_may_go_on_alone(together, tmp_path):
    together(epochs=2)
    runs = together(seeds=(5, 6, 7), epochs=3, resume=True)
    assert [run.epoch for run in runs] == [3, 3, 3]
    (alone,) = together(seeds=(6,), epochs=4, resume=True)
    assert alone.epoch == 4


def test_nothing_changes_if_one_of_the_folders_is_refused(together, tmp_path):
    together(seeds=(6,))
    before = {path: path.read_bytes() for path in folder_of(tmp_path, 6).iterdir()}
    with pytest.raises(InputError, match="seed-6 already holds a run"):
        together(overwrite=False)
    with pytest.raises(InputError, match="Nothing to resume"):
        together(seeds=(7, 8), resume=True)
    assert {path: path.read_bytes() for path in folder_of(tmp_path, 6).iterdir()} == before
    assert next(iter(together(overwrite=True))).epoch == 3  # and the locks are free again


@pytest.mark.parametrize("seeds", [(), (5, 5)])
def test_seeds_must_differ(together, seeds):
    with pytest.raises(InputError, match="Seeds to train at once must all be different"):
        together(seeds=seeds)
