"""From a path to a model: what is known about it, and what is refused."""

import hashlib
import os
import pickle
import shutil

import pytest
import torch

from semdiag.capturing.loading import load
from semdiag_files import InputError
from semdiag_models import Encoder, draw_data, read_checkpoint


def test_a_run_folder_means_its_last_snapshot(tiny_runs):
    model, file = load(tiny_runs.topk), load(tiny_runs.topk / "last.pt")
    assert (model.path, file.path) == (str(tiny_runs.topk), str(tiny_runs.topk / "last.pt"))
    digest = hashlib.sha256((tiny_runs.topk / "last.pt").read_bytes()).hexdigest()
    assert model.sha256 == file.sha256 == digest
    assert model.snapshot == file.snapshot == "last"


def test_everything_in_the_checkpoint_is_known_of_the_model(tiny_runs):
    model = load(tiny_runs.topk)
    assert (model.source, model.task, model.seed, model.epoch) == ("semdiag", "even-pairs", 7, tiny_runs.epochs)
    assert (model.module.config.attention, model.module.config.k) == ("topk", tiny_runs.k)
    assert model.training.holdout_samples == tiny_runs.holdout_samples
    assert model.history["epoch"] == [1, 2]
    assert model.provenance["command"] == "made by the tests"
    saved = read_checkpoint(tiny_runs.topk / "last.pt").state
    assert all(torch.equal(p, saved[name]) for name, p in model.module.state_dict().items())
    assert not model.module.training


def test_snapshots_are_told_apart(tiny_runs, tmp_path):
    assert load(tiny_runs.full / "epoch-0.pt").snapshot == "initialisation"
    assert load(tiny_runs.full / "best.pt").snapshot == "best"
    renamed = shutil.copyfile(tiny_runs.full / "last.pt", tmp_path / "mine.pt")
    assert load(renamed).snapshot == "epoch 2"


def test_default_inputs_are_the_held_out_split_that_the_trainer_used(tiny_runs):
    model = load(tiny_runs.full)
    config = model.module.config
    train, holdout = draw_data(model.training, config.length, config.pad_id)
    tokens, labels, source = model.default_inputs(tiny_runs.holdout_samples, seed=99)
    assert torch.equal(tokens, holdout.tokens)
    assert torch.equal(labels, holdout.labels)
    assert not torch.equal(tokens, train.tokens[: len(tokens)])
    assert source == "the run's own held-out samples"
    with torch.no_grad():
        accuracy = (model.module(tokens).argmax(1) == labels).double().mean().item()
    assert accuracy == pytest.approx(model.history["holdout_accuracy"][-1])


def test_fewer_default_inputs_are_the_first_ones(tiny_runs):
    model = load(tiny_runs.full)
    some, all_of_them = model.default_inputs(5, 0)[0], model.default_inputs(40, 0)[0]
    assert torch.equal(some, all_of_them[:5])


def test_more_default_inputs_than_there_are_held_out_are_refused(tiny_runs):
    with pytest.raises(
        InputError, match=r"full has 40 held-out samples; --samples must not be larger\. Got --samples 41\.$"
    ):
        load(tiny_runs.full).default_inputs(41, 0)


@pytest.mark.parametrize(
    ("name", "hint"), [("nowhere.pt", "$"), ("nowhere", " Models are .* package.module:function")]
)
def test_a_path_that_does_not_exist_is_named(tmp_path, name, hint):
    with pytest.raises(InputError, match=rf"{name} does not exist\.{hint}"):
        load(tmp_path / name)


def test_a_folder_without_a_last_snapshot_is_not_a_checkpoint(tmp_path):
    with pytest.raises(InputError, match=r"is a folder, not a file\.$"):
        load(tmp_path)


def test_a_bare_state_dict_of_another_model_is_called_that(tmp_path, tiny_config):
    torch.save(Encoder(tiny_config()).state_dict(), tmp_path / "bare.pt")
    with pytest.raises(InputError, match=r"holds weights .*state dict.\. Write a file mymodel.py"):
        load(tmp_path / "bare.pt")


@pytest.mark.parametrize("content", [torch.zeros(3), {"weights": [1, 2]}, [1, 2, 3]])
def test_plain_data_that_is_no_checkpoint_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "data.pt")
    with pytest.raises(InputError, match=r"data\.pt is not a semdiag checkpoint .*semdiag train even-pairs"):
        load(tmp_path / "data.pt")


def test_a_truncated_checkpoint_is_refused_at_any_length(tiny_runs, tmp_path):
    whole = (tiny_runs.full / "last.pt").read_bytes()
    for share in (0, 0.001, 0.3, 0.9, 0.999):
        (tmp_path / "cut.pt").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(InputError, match=r"cut\.pt is not a checkpoint"):
            load(tmp_path / "cut.pt")


class Malicious:
    """Unpickling it would make a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("save", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))])
def test_code_in_a_checkpoint_is_named_and_not_run(tmp_path, save):
    save({"format": "semdiag/1", "weights": Malicious(tmp_path / "made")}, tmp_path / "code.pt")
    with pytest.raises(InputError, match=r"code\.pt refused: it holds the code object (posix|nt)\.mkdir"):
        load(tmp_path / "code.pt")
    assert not (tmp_path / "made").exists()


def test_parameters_that_do_not_fit_the_configuration_are_refused(tiny_runs, tmp_path):
    content = torch.load(tiny_runs.full / "last.pt", weights_only=True)
    content["model_state"]["head.weight"] = torch.zeros(2, 5)
    torch.save(content, tmp_path / "misshapen.pt")
    with pytest.raises(InputError, match=r"'head.weight' has shape \(2, 5\); its configuration says \(2, 16\)\.$"):
        load(tmp_path / "misshapen.pt")


def test_loading_leaves_the_random_numbers_as_they_were(tiny_runs):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(tiny_runs.full)
    assert torch.equal(torch.rand(3), expected)
