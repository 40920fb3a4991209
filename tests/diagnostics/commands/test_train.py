import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from semdiag.commands.main import main
from semdiag_models.checkpoint import read_checkpoint

TINY = "--blocks 1 --width 8 --mlp-width 8 --head-width 8 --length 8 --train-samples 40 --holdout-samples 30"
SEEDLESS = [*TINY.split(), "--batch-size", "12", "--epochs", "3", "--device", "cpu", "--quiet"]
TINY = [*SEEDLESS, "--seed", "5"]


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """A random state, a thread count and a folder of the test's own."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def latest(*arguments):
    """The arguments without the value of TINY where another follows: given twice, an option is refused."""
    said = [str(argument) for argument in arguments]
    last = {word: at for at, word in enumerate(said) if word.startswith("--")}
    dropped = {at for at, word in enumerate(said) if word in TINY and last.get(word, at) > at}
    return [word for at, word in enumerate(said) if at not in dropped and at - 1 not in dropped]


@pytest.fixture
def semdiag(monkeypatch, capfd):
    """Call with arguments: the exit code and the lines on stderr, and then those on stdout."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["semdiag", *latest(*arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        return left.value.code, [*err.splitlines(), *out.splitlines()]

    return call


@pytest.fixture
def refused(semdiag, tmp_path):
    """Call with arguments that must be refused without a trace: the one line on stderr."""

    def call(*arguments):
        before = sorted(tmp_path.rglob("*"))
        code, lines = semdiag(*arguments)
        assert code == 2
        assert len(lines) == 1
        assert lines[0].startswith("semdiag: ")
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return call


def weights(path):
    return read_checkpoint(path).state


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_lands_in_a_folder_named_after_it_and_ends_with_the_next_step(semdiag, tmp_path):
    code, lines = semdiag("train", "even_pairs", "--attention", "topk", "--k", 3, *TINY, "--snapshots", "1, 2")
    assert code == 0
    folder = tmp_path / "checkpoints" / "even-pairs-topk-3-seed-5"
    assert {path.stem for path in folder.glob("*.pt")} == {"epoch-0", "epoch-1", "epoch-2", "best", "last"}
    assert lines[0].startswith("even-pairs, topk-3: training accuracy ")
    assert lines[0].endswith(" after 3 epochs (chance 50%).")
    assert lines[1] == "Next: semdiag dispersion checkpoints/even-pairs-topk-3-seed-5/last.pt"
    last = read_checkpoint(folder / "last.pt")
    assert last.provenance["command"].startswith("semdiag train even_pairs --attention topk --k 3 --blocks 1")
    assert (last.model.attention, last.model.k, last.training.task, last.training.snapshots) == (
        "topk",
        3,
        "even-pairs",
        (1, 2),
    )


def test_options_left_out_are_the_recipe_of_the_task(semdiag, tmp_path, monkeypatch):
    import semdiag_models

    seen = []

    def stop(folder, model, training, device, **_):
        seen.append((model, training))
        raise semdiag_models.InputError("enough")

    monkeypatch.setattr(semdiag_models, "open_run", stop)
    semdiag("train", "listops", "--attention", "topk", "--k", 9, "--pad-as-token", "--device", "cpu")
    (model, training), *_ = seen
    assert (model.length, model.blocks, model.width, model.mlp_width, model.heads) == (603, 10, 64, 64, 1)
    assert (model.dropout, model.activation, model.pad_as_token) == (0.01, "relu", True)
    assert (training.length, training.epochs, training.learning_rate) == (599, 200, 1.0)
    assert (training.learning_rate_decay, training.batch_size, training.gradient_clip) == (0.99, 25, 0.5)
    assert (training.train_samples, training.holdout_samples, training.seed) == (5000, 2000, 153476998)


def test_padding_to_blocks_takes_place_only_where_pad_is_a_token(semdiag, tmp_path):
    block = ["--attention", "block", "--k", 3]
    semdiag("train", "even-pairs", *block, *TINY, "--out", "plain")
    semdiag("train", "even-pairs", *block, *TINY, "--out", "padded", "--pad-as-token")
    assert [read_checkpoint(tmp_path / name / "last.pt").model.length for name in ("plain", "padded")] == [8, 9]


def test_without_quiet_there_is_a_progress_bar_with_its_times_on_80_columns(semdiag, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = [a for a in TINY if a != "--quiet"]
    _, lines = semdiag("train", "even-pairs", *arguments, "--out", "run")
    assert any("epoch 3/3" in line and "left 0:00:00" in line and "held-out" in line for line in lines)


def test_the_same_command_twice_gives_the_same_weights(semdiag, tmp_path):
    for name in ("one", "two"):
        semdiag("train", "even-pairs", *TINY, "--threads", 1, "--out", name)
    assert same(weights(tmp_path / "one" / "last.pt"), weights(tmp_path / "two" / "last.pt"))


def test_a_used_folder_asks_for_resume_or_overwrite(semdiag, refused, tmp_path):
    semdiag("train", "even-pairs", *TINY, "--out", "run")
    before = (tmp_path / "run" / "last.pt").read_bytes()
    line = refused("train", "even-pairs", *TINY, "--out", "run")
    assert line.startswith(
        "semdiag: run already holds a run. Add --resume to continue it, --overwrite to start anew"
    )
    assert "trained with seed=5, not 6" in refused(
        "train", "even-pairs", *TINY, "--seed", 6, "--out", "run", "--resume"
    )
    assert "cannot be used together" in refused(
        "train", "even-pairs", *TINY, "--out", "run", "--resume", "--overwrite"
    )
    assert (tmp_path / "run" / "last.pt").read_bytes() == before
    assert semdiag("train", "even-pairs", *TINY, "--seed", 6, "--out", "run", "--overwrite")[0] == 0
    assert read_checkpoint(tmp_path / "run" / "last.pt").training.seed == 6


def test_nothing_to_resume_is_refused(refused):
    assert "Nothing to resume" in refused("train", "even-pairs", *TINY, "--resume")


def test_divergence_is_one_line_and_keeps_the_last_good_epoch(semdiag, tmp_path):
    code, lines = semdiag("train", "even-pairs", *TINY, "--learning-rate", 1e34, "--out", "run")
    assert code == 2
    assert len(lines) == 1
    assert "Try a smaller --learning-rate." in lines[0]
    assert lines[0].endswith(f"{os.path.join('run', 'last.pt')} holds epoch 0.")
    last = read_checkpoint(tmp_path / "run" / "last.pt")
    assert last.epoch == 0
    assert all(tensor.isfinite().all() for tensor in last.state.values())


def test_an_interruption_saves_says_so_and_can_be_resumed(semdiag, tmp_path, monkeypatch):
    semdiag("train", "even-pairs", *TINY, "--out", "whole")
    from semdiag_models.train import Trainer

    evaluate = Trainer.evaluate
    calls = []

    def interrupted(self, split):
        calls.append(split)
        if len(calls) == 2:  # in the second epoch
            raise KeyboardInterrupt
        return evaluate(self, split)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", interrupted)
        code, lines = semdiag("train", "even-pairs", *TINY, "--out", "run")
    assert code == 130
    assert lines == ["Stopped; run/last.pt holds epoch 1. To go on, add --resume."]
    assert read_checkpoint(tmp_path / "run" / "last.pt").epoch == 1
    assert semdiag("train", "even-pairs", *TINY, "--out", "run", "--resume")[0] == 0
    assert same(weights(tmp_path / "run" / "last.pt"), weights(tmp_path / "whole" / "last.pt"))


def test_an_interruption_before_the_first_epoch_is_code_130_too(semdiag, monkeypatch):
    import semdiag_models

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(semdiag_models, "open_run", interrupt)
    code, lines = semdiag("train", "even-pairs", *TINY)
    assert code == 130
    assert len(lines) <= 1


@pytest.mark.slow
def test_control_c_in_a_real_process_leaves_a_whole_checkpoint(tmp_path):
    options = latest(*TINY, "--epochs", "100000")
    command = [sys.executable, "-m", "semdiag.commands.main", "train", "even-pairs", *options]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # children of a job in the background ignore it
    try:
        process = subprocess.Popen(
            [*command, "--threads", "1", "--out", "run"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 50
    while not (tmp_path / "run" / "history.csv").exists():  # written after the first epoch
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.startswith("Stopped; run/last.pt holds epoch ")
    assert len(err.splitlines()) == 1
    assert read_checkpoint(tmp_path / "run" / "last.pt").epoch >= 1
    assert not list((tmp_path / "run").glob(".*"))


def started(tmp_path, *arguments):
    """A process of its own that trains in the folder ``run``, once it has saved something."""
    program = [sys.executable, "-m", "semdiag.commands.main", "train", "even-pairs"]
    options = latest(*TINY, "--dropout", "0.1", "--threads", "1", "--out", "run", *arguments)
    return subprocess.Popen([*program, *options], stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def wait_for(process, path):
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_second_process_on_the_folder_is_told_and_changes_nothing(refused, tmp_path):
    process = started(tmp_path, "--epochs", "100000")
    try:
        wait_for(process, tmp_path / "run" / "last.pt")
        process.send_signal(signal.SIGSTOP)  # so that whatever changes is the second's doing
        for choice in ("--resume", "--overwrite"):
            line = refused("train", "even-pairs", *TINY, "--out", "run", choice)
            assert line.startswith("semdiag: run is in use: another process trains there. Wait for it, or choose")
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "run" / ".lock").exists()  # the killed process left it, and it blocks nobody


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_a_run_is_the_uninterrupted_one(semdiag, tmp_path):
    epochs = ["--dropout", "0.1", "--threads", "1", "--epochs", "150"]
    assert semdiag("train", "even-pairs", *TINY, *epochs, "--out", "whole")[0] == 0
    pause, reached = random.Random(0), []
    for attempt in range(4):
        process = started(tmp_path, "--epochs", "150", *(["--resume"] if attempt else []))
        last = tmp_path / "run" / "last.pt"
        wait_for(process, last)
        before = last.stat().st_mtime_ns
        while process.poll() is None and last.stat().st_mtime_ns == before:
            time.sleep(0.001)  # until it is at work again
        time.sleep(pause.uniform(0, 0.15))
        process.kill()
        process.communicate()
        reached.append(read_checkpoint(last).epoch)  # whole, whenever the process died
    assert reached == sorted(reached)
    assert 0 < reached[-1] < 150  # all four were killed on the way
    assert semdiag("train", "even-pairs", *TINY, *epochs, "--out", "run", "--resume")[0] == 0
    assert same(weights(tmp_path / "run" / "last.pt"), weights(tmp_path / "whole" / "last.pt"))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    resumed, whole = (read_checkpoint(tmp_path / name / "last.pt").history for name in ("run", "whole"))
    assert {**resumed, "seconds": []} == {**whole, "seconds": []}


def test_until_stops_the_run_and_the_last_line_says_so(semdiag, tmp_path):
    task = ["train", "even-pairs", *TINY]
    code, lines = semdiag(*task, "--until", 0.2, "--epochs", 50, "--out", "run")
    assert code == 0
    assert lines[0].endswith(" after 1 epoch, stopped at --until 0.2 (chance 50%).")
    assert len((tmp_path / "run" / "history.csv").read_text().splitlines()) == 2
    assert read_checkpoint(tmp_path / "run" / "last.pt").training.until == 0.2
    _, lines = semdiag(*task, "--until", 1, "--resume", "--out", "run")
    assert lines[0].endswith(" after 3 epochs, --until 1 not reached (chance 50%).")


@pytest.mark.slow
def test_several_seeds_land_in_a_folder_each(semdiag, refused, tmp_path):
    task = ["train", "even-pairs", "--attention", "topk", "--k", 3, *SEEDLESS]
    code, lines = semdiag(*task, "--seeds", "5, 6", "--epochs", 2)
    assert code == 0
    folders = [tmp_path / "checkpoints" / f"even-pairs-topk-3-seed-{seed}" for seed in (5, 6)]
    assert [line.split(":")[0] for line in lines[:2]] == [
        "even-pairs, topk-3, seed 5",
        "even-pairs, topk-3, seed 6",
    ]
    assert lines[2].startswith(
        "Next: semdiag dispersion checkpoints/even-pairs-topk-3-seed-5/last.pt checkpoints/"
    )
    semdiag(*task, "--seed", 5, "--epochs", 2, "--out", "alone")
    for name, weight in weights(tmp_path / "alone" / "last.pt").items():
        torch.testing.assert_close(weights(folders[0] / "last.pt")[name], weight, rtol=0, atol=1e-5)
    assert "already holds a run" in refused(*task, "--seeds", "6,7", "--epochs", 2)
    assert semdiag(*task, "--seeds", "5,6", "--resume")[0] == 0
    assert [read_checkpoint(folder / "last.pt").epoch for folder in folders] == [3, 3]


def test_the_options_of_the_optimiser_reach_the_checkpoint(semdiag, tmp_path):
    options = ["--optimizer", "adamw", "--weight-decay", 0.1]
    assert semdiag("train", "even-pairs", *TINY, *options, "--out", "run")[0] == 0
    training = read_checkpoint(tmp_path / "run" / "last.pt").training
    assert (training.optimizer, training.weight_decay) == ("adamw", 0.1)
    assert training.learning_rate == 0.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["even-pairs", "--optimizer", "adamv"], "Unknown optimizer 'adamv'. Did you mean 'adam"),
        (["even-pairs", "--weight-decay", -1], "weight_decay must lie in [0, inf). Got weight_decay=-1.0."),
        (["even-pairs", "--until", 1.5], "until must lie in (0, 1]. Got until=1.5."),
        (["even-pairs", "--seeds", "1;2"], "--seeds takes whole numbers separated by commas, like 1,5,20. Got"),
        (["even-pairs", "--seeds", "1,2", "--seed", "5"], "--seeds names every seed: leave out --seed."),
        (["even-pairs", "--seeds", "1,1"], "Seeds to train at once must all be different. Got 1,1."),
        (["evenpairs"], "Unknown task 'evenpairs'. Did you mean 'even-pairs'? Known: "),
        (["even-pairs", "--attention", "top-k", "--k", 3], "Unknown attention 'top-k'. Did you mean 'topk'?"),
        (["even-pairs", "--activation", "rel"], "Unknown activation 'rel'. Did you mean 'relu'?"),
        (
            ["even-pairs", "--attention", "topk", "--k", 9],
            "k must be at most the sequence length. Got k=9, length=8.",
        ),
        (["even-pairs", "--attention", "topk", "--k", 0], "k must lie in [1, 100000]. Got k=0."),
        (["even-pairs", "--attention", "topk", "--k", 0, "--pad-as-token"], "k must lie in [1, 100000]. Got k=0."),
        (["even-pairs", "--attention", "block"], "block attention needs k, the number of keys kept per query."),
        (["even-pairs", "--k", 5], "full attention takes no k; banded, block, topk, bottomk, random, "),
        (["even-pairs", "--k", "five"], "Invalid value for '--k'"),
        (["even-pairs", "--width", 7], "width must be even"),
        (["even-pairs", "--dropout", 1], "dropout must lie in [0, 1). Got dropout=1.0."),
        (["even-pairs", "--length", 0], "length must lie in [1, 100000]. Got length=0."),
        (["even-pairs", "--length", "20:5"], "A range of lengths rises, like 5:20. Got 20:5."),
        (
            ["even-pairs", "--length", "5:x"],
            "--length takes a number of tokens or a range of them, like 40 or 5:20.",
        ),
        (["even-pairs", "--epochs", 0], "epochs must lie in [1, 1000000000]. Got epochs=0."),
        (["even-pairs", "--train-samples", 10**12], "train_samples must lie in [1, 1000000000]."),
        (["even-pairs", "--learning-rate", "nan"], "learning_rate must lie in (0, inf). Got learning_rate=nan."),
        (["even-pairs", "--seed", -1], "seed must lie in [0, 9223372036854775808). Got seed=-1."),
        (["even-pairs", "--threads", 0], "--threads must lie between 1 and 4,096. Got 0."),
        (
            ["even-pairs", "--threads", 2**63],
            "--threads must lie between 1 and 4,096. Got 9,223,372,036,854,775,808.",
        ),
        (["even-pairs", "--device", "gpu"], "Unknown device 'gpu'."),
        (
            ["even-pairs", "--snapshots", "1;2"],
            "--snapshots takes epochs separated by commas, like 1,5,20. Got '1;2'.",
        ),
        (["even-pairs", "--snapshots", "99"], "Snapshots must lie in 0 … 3 (epochs). Got 99."),
        (["even-pairs", "--atention", "topk"], "No such option"),
        (["even-pairs", "extra"], "Got unexpected extra argument"),
    ],
)
def test_bad_input_is_one_line_that_says_what_would_work(refused, arguments, message):
    task, *options = arguments
    assert message in refused("train", task, *SEEDLESS, *options)


def test_a_missing_task_is_one_line(refused):
    assert "Missing argument" in refused("train")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_asked_for_and_absent_is_one_line(refused):
    line = refused("train", "even-pairs", *TINY, "--device", "cuda")
    assert line == "semdiag: No cuda device here. Use --device auto or --device cpu."


def test_a_file_in_place_of_the_folder_is_one_line(refused, tmp_path):
    (tmp_path / "taken").write_text("mine")
    for out in ("taken", "taken/below"):
        assert f"semdiag: {out} cannot be made: " in refused("train", "even-pairs", *TINY, "--out", out)


def test_a_damaged_checkpoint_to_resume_is_one_line(refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"garbage")
    assert "is not a checkpoint" in refused("train", "even-pairs", *TINY, "--out", "run", "--resume")


def test_help_names_the_options(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["semdiag", "train", "--help-all"])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    shown = capfd.readouterr().out
    for option in ("--attention", "--k", "--pad-as-token", "--snapshots", "--resume", "--overwrite", "--device"):
        assert option in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ("--attention banded --k 3 --global-tokens 2 --pooling cls", "even-pairs-banded-3-global-2-seed-5"),
        ("--attention random --k 3 --norm post", "even-pairs-random-3-seed-5"),
        ("--attention bottomk --k 3 --heads 2 --head-width 4", "even-pairs-bottomk-3-seed-5"),
    ],
)
def test_every_architecture_is_trained_and_resumed(semdiag, tmp_path, options, folder):
    words = ["train", "even-pairs", *options.split(), *TINY, "--width", 8]
    if "--head-width" in options:  # TINY has one, too: the last one counts
        words += ["--head-width", 4]
    assert semdiag(*words)[0] == 0
    whole = read_checkpoint(tmp_path / "checkpoints" / folder / "last.pt")
    assert whole.model.selection_seed == (5 if whole.model.attention == "random" else 0)
    assert semdiag(*words, "--epochs", 1, "--out", "parts")[0] == 0
    assert semdiag(*words, "--out", "parts", "--resume")[0] == 0
    assert same(whole.state, weights(tmp_path / "parts" / "last.pt"))


def test_global_tokens_without_local_attention_are_refused(refused):
    line = refused("train", "even-pairs", "--attention", "topk", "--k", 3, "--global-tokens", 1, *TINY)
    assert line.startswith("semdiag: topk attention takes no global_tokens; banded and block do.")
