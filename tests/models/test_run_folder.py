import csv
from importlib.metadata import version

import pytest
import torch

from semdiag_files import InputError
from semdiag_models import run_folder as module
from semdiag_models import train
from semdiag_models.checkpoint import read_checkpoint, write_checkpoint
from semdiag_models.run_folder import open_run, processor, run_name, train_run
from semdiag_models.train import DivergedError

CPU = torch.device("cpu")


class StoppedError(Exception):
    """An interruption from outside."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "one"


@pytest.fixture
def run(folder, tiny_model, tiny_training):
    """Call to train in the folder; extra fields go to the training configuration."""

    def train(*, resume=False, overwrite=False, model=None, after_epoch=None, after_batch=None, **fields):
        trainer = open_run(
            folder,
            tiny_model(**{"attention": "topk", "k": 3, "dropout": 0.1, **(model or {})}),
            tiny_training(**fields),
            CPU,
            resume=resume,
            overwrite=overwrite,
        )
        train_run(
            folder, trainer, {"command": "x"}, after_epoch or (lambda _: None), after_batch or (lambda: None)
        )
        return trainer

    return train


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def without_seconds(history):
    return {name: column for name, column in history.items() if name != "seconds"}


def test_a_run_leaves_its_snapshots_and_its_history(run, folder):
    trainer = run(snapshots=(0, 1, 3))
    assert files(folder) == ["best.pt", "epoch-0.pt", "epoch-1.pt", "epoch-3.pt", "history.csv", "last.pt"]
    read = {
        name: read_checkpoint(folder / f"{name}.pt") for name in ("epoch-0", "epoch-1", "epoch-3", "last", "best")
    }
    assert {name: c.epoch for name, c in read.items() if name != "best"} == {
        "epoch-0": 0,
        "epoch-1": 1,
        "epoch-3": 3,
        "last": 3,
    }
    assert same(read["last"].state, trainer.encoder.state_dict())
    assert same(read["last"].state, read["epoch-3"].state)
    assert not same(read["last"].state, read["epoch-0"].state)
    assert [bool(read[name].rng) for name in ("last", "epoch-1", "best")] == [True, False, False]
    accuracies = trainer.history["holdout_accuracy"]
    assert read["best"].epoch == 1 + accuracies.index(max(accuracies))


def test_the_first_snapshot_is_the_initialisation(run, folder, tiny_model, tiny_training):
    run()
    fresh = open_run(
        folder.parent / "other",
        tiny_model(attention="topk", k=3, dropout=0.1),
        tiny_training(),
        CPU,
        resume=False,
        overwrite=False,
    )
    assert same(read_checkpoint(folder / "epoch-0.pt").state, fresh.encoder.state_dict())


def test_history_and_its_csv_agree(run, folder):
    trainer = run()
    with (folder / "history.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {name: [float(row[name]) for row in rows] for name in rows[0]} == trainer.history
    assert read_checkpoint(folder / "last.pt").history == trainer.history


def test_provenance_says_what_made_the_run(run, folder):
    run()
    assert read_checkpoint(folder / "last.pt").provenance == {
        "semdiag": version("semdiag"),
        "torch": torch.__version__,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "command": "x",
    }


@pytest.mark.processor
@pytest.mark.parametrize("where", ["after_epoch", "after_batch"])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_an_interrupted_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(run, folder, where, at):
    whole = run(epochs=4)
    first_weights = read_checkpoint(folder / "best.pt").state
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == at:
            raise StoppedError

    if where == "after_epoch" and at > 4:
        at = 4
    with pytest.raises(StoppedError):
        run(epochs=4, overwrite=True, **{where: stop})
    torch.rand(5)  # whatever happens between the two
    resumed = run(epochs=4, resume=True)
    assert same(whole.encoder.state_dict(), resumed.encoder.state_dict())
    assert without_seconds(whole.history) == without_seconds(resumed.history)
    assert same(read_checkpoint(folder / "best.pt").state, first_weights)
    assert len((folder / "history.csv").read_text().splitlines()) == 5


def test_an_interruption_while_saving_loses_that_epoch_alone(monkeypatch, run, folder):
    whole = run(epochs=3)

    def fail(path, checkpoint):
        if checkpoint.epoch == 2 and path.name == "last.pt":
            raise StoppedError
        write_checkpoint(path, checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_checkpoint", fail)
        with pytest.raises(StoppedError):
            run(epochs=3, overwrite=True)
    assert read_checkpoint(folder / "last.pt").epoch == 1
    assert same(whole.encoder.state_dict(), run(epochs=3, resume=True).encoder.state_dict())


def test_more_epochs_and_other_snapshots_may_be_asked_for_on_resuming(run, folder):
    whole = run(epochs=5)
    run(epochs=2, overwrite=True)
    resumed = run(epochs=5, snapshots=(4,), resume=True)
    assert same(whole.encoder.state_dict(), resumed.encoder.state_dict())
    assert read_checkpoint(folder / "epoch-4.pt").epoch == 4


def test_a_finished_run_is_resumed_without_a_step(run, folder):
    run()
    before = (folder / "last.pt").read_bytes()
    run(resume=True, after_batch=lambda: pytest.fail("a step was made"))
    assert (folder / "last.pt").read_bytes() == before


def test_divergence_leaves_the_last_good_epoch(run, folder):
    trainers = []

    def spoil(progress):
        if progress.row["epoch"] == 2:
            trainers[0].encoder.head.bias.data.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        trainer_class = module.Trainer
        patch.setattr(module, "Trainer", lambda *a: trainers.append(trainer_class(*a)) or trainers[0])
        with pytest.raises(DivergedError):
            run(epochs=4, after_epoch=spoil)
    last = read_checkpoint(folder / "last.pt")
    assert last.epoch == 2
    assert all(tensor.isfinite().all() for tensor in last.state.values())


def test_a_used_folder_is_refused_and_left_alone(run, folder):
    run()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=r"already holds a run\. Add --resume to continue it, --overwrite"):
        run()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_overwriting_removes_the_old_run_and_nothing_else(run, folder):
    run(snapshots=(2,))
    (folder / "notes.txt").write_text("mine")
    run(epochs=1, overwrite=True)
    assert files(folder) == ["best.pt", "epoch-0.pt", "history.csv", "last.pt", "notes.txt"]
    assert read_checkpoint(folder / "last.pt").epoch == 1


def test_overwriting_a_fresh_folder_is_simply_a_run(run, folder):
    run(epochs=1, overwrite=True)
    assert read_checkpoint(folder / "last.pt").epoch == 1


def test_nothing_to_resume_is_refused_without_a_trace(run, folder):
    with pytest.raises(InputError, match=r"^Nothing to resume: .*last\.pt does not exist\. Leave out --resume"):
        run(resume=True)
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "was trained with seed=5, not 6."),
        ({"learning_rate": 0.2}, "was trained with learning_rate=0.1, not 0.2."),
        ({"batch_size": 10}, "was trained with batch_size=12, not 10."),
        ({"model": {"k": 4}}, "was trained with k=3, not 4."),
        ({"model": {"attention": "banded"}}, "was trained with attention=topk, not banded."),
        ({"model": {"dropout": 0.2}}, "was trained with dropout=0.1, not 0.2."),
    ],
)
def test_resuming_with_other_options_names_the_first_that_differs(run, folder, change, message):
    run(epochs=1)
    before = (folder / "last.pt").read_bytes()
    with pytest.raises(InputError) as refused:
        run(epochs=2, resume=True, **change)
    assert message in str(refused.value)
    assert (folder / "last.pt").read_bytes() == before


def test_resuming_to_fewer_epochs_is_refused(run):
    run(epochs=3)
    with pytest.raises(InputError, match="already at epoch 3, past --epochs 2"):
        run(epochs=2, resume=True)


def test_a_snapshot_without_random_state_cannot_be_resumed(run, folder):
    run(epochs=1)
    (folder / "best.pt").replace(folder / "last.pt")
    with pytest.raises(InputError, match=r"last\.pt cannot be resumed: "):
        run(epochs=2, resume=True)


@pytest.mark.parametrize("state", [torch.zeros(3, dtype=torch.uint8), torch.zeros(5056), [1.0]])
def test_a_damaged_random_state_is_refused(run, folder, state):
    run(epochs=1)
    saved = read_checkpoint(folder / "last.pt")
    content = torch.load(folder / "last.pt", weights_only=True)
    content["rng"]["cpu"] = state
    torch.save(content, folder / "last.pt")
    with pytest.raises(InputError, match="cannot be resumed"):
        run(epochs=2, resume=True)
    assert saved.epoch == 1


def test_a_truncated_checkpoint_is_refused_on_resuming(run, folder):
    run(epochs=1)
    (folder / "last.pt").write_bytes((folder / "last.pt").read_bytes()[:5000])
    with pytest.raises(InputError, match="truncated"):
        run(epochs=2, resume=True)


def test_a_file_where_the_folder_should_be_is_refused(run, folder):
    folder.parent.mkdir()
    folder.write_text("mine")
    with pytest.raises(InputError, match=r"one cannot be made: File exists\.$"):
        run()
    assert folder.read_text() == "mine"


def test_a_folder_that_cannot_be_written_to_is_refused(monkeypatch, run, folder):
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(
        InputError, match=r"cannot be written to: permission denied\. Choose another folder with --out"
    ):
        run()
    assert not files(folder)


def test_a_model_that_does_not_fit_leaves_no_folder(run, folder):
    with pytest.raises(InputError):
        run(model={"classes": 7})
    assert not folder.parent.exists()


def test_the_name_of_a_run_says_task_attention_and_seed(tiny_model, tiny_training):
    assert run_name(tiny_model(attention="banded", k=5), tiny_training()) == "even-pairs-banded-5-seed-5"
    assert run_name(tiny_model(), tiny_training(seed=7)) == "even-pairs-full-seed-7"


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_what_the_optimiser_remembers_survives_an_interruption_bit_for_bit(run, folder, optimizer):
    fields = {"epochs": 4, "optimizer": optimizer, "learning_rate": 0.01}
    whole = run(**fields)
    run(**{**fields, "epochs": 2}, overwrite=True)
    saved = read_checkpoint(folder / "last.pt").optimizer_state
    assert saved.keys() == whole.encoder.state_dict().keys()
    assert all(values["exp_avg_sq"].any() and values["step"] == 8 for values in saved.values())
    assert not read_checkpoint(folder / "best.pt").optimizer_state
    assert same(whole.encoder.state_dict(), run(**fields, resume=True).encoder.state_dict())


@pytest.mark.parametrize("damage", ["shape", "kind", "missing", "unknown", "no tensor"])
def test_a_damaged_optimiser_state_is_refused(run, folder, damage):
    run(epochs=1, optimizer="adam")
    content = torch.load(folder / "last.pt", weights_only=True)
    state = content["optimizer_state"]
    match damage:
        case "shape":
            state["head.bias"]["exp_avg"] = torch.zeros(7)
        case "kind":
            state["head.bias"]["exp_avg"] = torch.zeros(2, dtype=torch.int64)
        case "missing":
            del state["head.bias"]
        case "unknown":
            state["head.bios"] = state.pop("head.bias")
        case "no tensor":
            state["head.bias"]["exp_avg"] = [0.0, 0.0]
    torch.save(content, folder / "last.pt")
    with pytest.raises(InputError, match=r"last\.pt (cannot be resumed: the optimiser|is damaged: its optimiser)"):
        run(epochs=2, optimizer="adam", resume=True)


def test_plain_sgd_adds_nothing_to_the_checkpoint(run, folder):
    run(epochs=1)
    assert "optimizer_state" not in torch.load(folder / "last.pt", weights_only=True)


def test_what_to_stop_at_may_be_changed_on_resuming(run, folder):
    accuracy = run(epochs=4, exact=True).history["train_accuracy"]
    run(epochs=4, until=min(accuracy[:2]), overwrite=True)
    stopped = read_checkpoint(folder / "last.pt").epoch
    assert stopped == 1 + next(i for i, a in enumerate(accuracy) if a >= min(accuracy[:2]))
    assert len((folder / "history.csv").read_text().splitlines()) == 1 + stopped
    before = (folder / "last.pt").read_bytes()
    run(epochs=4, until=min(accuracy[:2]), resume=True, after_batch=lambda: pytest.fail("a step was made"))
    assert (folder / "last.pt").read_bytes() == before
    assert run(epochs=4, exact=True, resume=True).history["train_accuracy"] == accuracy


def test_what_a_killed_process_left_half_written_is_cleared_away(run, folder):
    run(epochs=2)
    history = (folder / "history.csv").read_bytes()
    (folder / ".last.pt.tmp").write_bytes(b"half")
    (folder / ".best.pt.ab12cd_9").write_bytes(b"half, by version 0.2")
    (folder / ".history.csv.tmp").write_text("epo")
    (folder / ".lock").touch()
    (folder / ".mine").write_text("mine")
    (folder / "history.csv").write_text("one row short")
    run(epochs=2, resume=True)
    assert files(folder) == [".mine", "best.pt", "epoch-0.pt", "history.csv", "last.pt"]
    assert (folder / "history.csv").read_bytes() == history


def test_a_folder_is_free_again_after_a_run_and_after_a_refusal(run, folder):
    run(epochs=1)
    with pytest.raises(InputError, match="already holds a run"):
        run(epochs=1)
    with pytest.raises(InputError, match="was trained with"):
        run(epochs=2, seed=6, resume=True)
    assert run(epochs=2, resume=True).epoch == 2


def test_two_trainers_in_one_folder_are_refused(run, folder, tiny_model, tiny_training):
    model = tiny_model(attention="topk", k=3, dropout=0.1)
    first = open_run(folder, model, tiny_training(), CPU, resume=False, overwrite=False)
    with pytest.raises(InputError, match=r"one is in use: another process trains there\."):
        run()
    with pytest.raises(InputError, match="in use"):
        run(overwrite=True)
    train_run(folder, first, {"command": "x"})
    assert read_checkpoint(folder / "last.pt").epoch == 3


def test_a_run_killed_while_it_overwrites_another_is_resumed_as_the_new_one(monkeypatch, run, folder):
    whole = run(seed=6)
    run(snapshots=(2,), overwrite=True)
    unlink = module.Path.unlink

    def die(path, missing_ok=False):
        if path.name == "best.pt":
            raise StoppedError
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(module.Path, "unlink", die)
        with pytest.raises(StoppedError):
            run(seed=6, overwrite=True)
    assert same(whole.encoder.state_dict(), run(seed=6, resume=True).encoder.state_dict())
    assert files(folder) == ["best.pt", "epoch-0.pt", "history.csv", "last.pt"]
    assert read_checkpoint(folder / "best.pt").training.seed == 6


def test_on_a_cpu_a_compiled_run_is_refused_but_goes_on(run, folder, tiny_model, tiny_training, monkeypatch):
    with pytest.raises(InputError, match=r"slower on a CPU\. Leave out --compile\.$"):
        run(compiled=True)
    assert not folder.exists()
    monkeypatch.setattr(train.torch, "compile", lambda encoder: encoder)
    folder.mkdir(parents=True)
    begun = train.Trainer(tiny_model(attention="topk", k=3, dropout=0.1), tiny_training(compiled=True), CPU)
    train_run(folder, begun, {"command": "x"})
    assert run(resume=True, compiled=True, epochs=4).epoch == 4
    assert run(resume=True, epochs=5).epoch == 5
