"""``semdiag sweep`` in real processes: interrupted, killed, on Ray."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from semdiag_models import read_checkpoint
from semdiag_models.sweep import read_sweep

SIZES = """length = 12
blocks = 1
width = 8
mlp_width = 8
head_width = 8
holdout_samples = 40
task = "even-pairs"
"""
CODE = "import sys; sys.argv[0] = 'semdiag'; from semdiag.commands.main import main; main()"


@pytest.fixture
def sweep(here, run_semdiag):
    """Call with TOML and options: the program's outcome in this process; the runs land in ``here/out``."""

    def run(text, *options):
        (here / "sweep.toml").write_text(SIZES + text, encoding="utf-8")
        return run_semdiag("sweep", "sweep.toml", "--out", "out", "--jobs", "1", *options)

    return run


def start(here, text, *options):
    """The program in a process of its own, which hears Ctrl-C even if a shell runs the tests in the background."""
    (here / "sweep.toml").write_text(SIZES + text, encoding="utf-8")
    place = [] if "--out" in options else ["--out", "out"]
    command = [sys.executable, "-c", CODE, "sweep", "sweep.toml", *place, *options]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=here, stdout=pipe, stderr=pipe, text=True, preexec_fn=heard)


def table(here):
    with (here / "out" / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def epochs(folder):
    try:
        return (folder / "history.csv").read_text(encoding="utf-8").count("\n") - 1
    except OSError:
        return 0


def wait_until(true, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def folders(here):
    return sorted(path for path in (here / "out").glob("even-pairs-*") if path.is_dir())


def modified(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def same_weights(one, other):
    one, other = (read_checkpoint(folder / "last.pt").state for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_sweep_trains_every_run_and_the_same_command_again_none(sweep, here):
    text = 'train_samples = 100\n[grid]\nattention = ["full", {attention = "topk", k = 3}]\nepochs = 2\n'
    first = sweep(text)
    assert first.code == 0, first.err
    full, topk = folders(here)
    assert full.name.startswith("even-pairs-full-seed-153476998-")
    assert [row["status"] for row in table(here)] == ["done", "done"]
    assert [row["epochs"] for row in table(here)] == ["2", "2"]
    assert "2 runs: 2 done. Table: out/results.csv" in first.out
    before = modified(full), modified(topk)
    again = sweep(text, "--json", "--quiet")
    assert again.err == ""
    assert (modified(full), modified(topk)) == before
    document = json.loads(again.out)
    assert document["schema"] == "semdiag.sweep/1"
    assert [row["attention"] for row in document["results"]] == ["full", "topk"]
    on_disk = json.loads((here / "out" / "results.json").read_text(encoding="utf-8"))
    assert on_disk["results"] == document["results"]
    longer = sweep(text.replace("epochs = 2", "epochs = 3"))
    assert longer.code == 0
    assert [row["epochs"] for row in table(here)] == ["3", "3"]
    assert folders(here) == [full, topk]


@pytest.mark.slow
def test_after_kill_9_finished_runs_are_not_repeated_and_the_other_goes_on(here):
    short = {"attention": "full", "epochs": 3}
    long = {"attention": "topk", "k": 3, "epochs": 40}
    entries = ", ".join(
        "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in e.items()) + "}" for e in (short, long)
    )
    text = f"train_samples = 400\n[grid]\nattention = [{entries}]\n"
    process = start(here, text, "--jobs", "1", "--quiet")
    wait_until(lambda: len(folders(here)) == 2 and epochs(folders(here)[1]) >= 2, process)
    process.kill()
    process.communicate()
    done, begun = folders(here)
    finished, reached = modified(done), epochs(begun)
    assert 2 <= reached < 40
    second = start(here, text, "--jobs", "1")
    _, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    assert "2 runs in out, 1 of them done." in err
    assert modified(done) == finished, "a finished run was touched"
    assert [(row["status"], row["epochs"]) for row in table(here)] == [("done", "3"), ("done", "40")]
    in_one_go = start(here, text, "--jobs", "1", "--quiet", "--out", "other")
    in_one_go.communicate(timeout=240)
    assert in_one_go.returncode == 0
    assert same_weights(begun, here / "other" / begun.name)


@pytest.mark.slow
def test_control_c_keeps_what_is_there_and_says_how_to_go_on(here):
    process = start(here, "train_samples = 200\nepochs = 100000\n[grid]\nseed = [1, 2]\n", "--jobs", "2")
    wait_until(lambda: len(folders(here)) == 2 and all(epochs(folder) >= 1 for folder in folders(here)), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped; 0 of 2 runs are done in out. To go on, run the same command again." in err
    assert "Traceback" not in err
    assert [row["status"] for row in table(here)] == ["begun", "begun"]
    at = epochs(folders(here)[0])
    time.sleep(0.5)
    assert epochs(folders(here)[0]) == at, "a process trains on"


@pytest.mark.slow
def test_a_second_sweep_in_the_folder_is_told(here, sweep):
    text = "train_samples = 200\nepochs = 100000\n"
    process = start(here, text, "--jobs", "1", "--quiet")
    try:
        wait_until(lambda: folders(here) and epochs(folders(here)[0]) >= 1, process)
        second = sweep(text)
        assert second.code == 2
        assert "out is in use: another process trains there" in second.err
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_a_run_that_fails_is_in_the_table_and_the_exit_code_is_1(sweep, here):
    text = "train_samples = 100\nepochs = 1\ngradient_clip = 1e30\n[grid]\nlearning_rate = [0.1, 1e30]\n"
    outcome = sweep(text)
    assert outcome.code == 1
    assert [row["status"] for row in table(here)] == ["done", "diverged"]
    assert "training loss became" in table(here)[1]["problem"]
    assert "2 runs: 1 done, 1 diverged." in outcome.out


def test_a_dry_run_counts_and_writes_nothing(sweep, here):
    text = 'train_samples = 400\nepochs = 9\nuntil = 0.9\n[grid]\nseed = [1, 2]\nattention = ["full"]\n'
    outcome = sweep(text, "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    assert "2 runs, 2 left, at most 18 epochs.\n" in outcome.err
    document = json.loads(outcome.out)
    assert [row["epochs"] for row in document["results"]] == [9] * 2
    assert not (here / "out").exists()


@pytest.mark.slow
def test_a_dry_run_takes_recorded_runs_as_done(sweep, here):
    text = "train_samples = 100\nepochs = {}\n[grid]\nseed = {}\n"
    assert sweep(text.format(2, [1]), "--records", "kept").code == 0
    shutil.rmtree(here / "out")
    outcome = sweep(text.format(2, [1, 2]), "--records", "kept", "--dry-run")
    assert "1 left, 2 epochs.\n" in outcome.out
    longer = sweep(text.format(3, [1]), "--records", "kept", "--dry-run")
    assert "1 left, 3 epochs.\n" in longer.out


def test_every_problem_is_told_at_once_and_nothing_is_written(sweep, here):
    outcome = sweep('[grid]\nx = [{epoch = 3}, {attention = "topk", k = 50}]\n')
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("semdiag: sweep.toml has 2 problems; nothing was run. Unknown key 'epoch'.")
    assert "k must be at most" in line
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1. Got 0."),
        (["--retries", "-1"], "--retries must not be negative. Got -1."),
        (["--target", "95"], "--target is a training accuracy in (0, 1], like 0.95. Got 95.0."),
        (["--gpus-per-run", "0.25"], "--gpus-per-run must not be negative, and needs --ray."),
        (["--device", "tpu"], "Unknown device 'tpu'."),
    ],
)
def test_options_that_cannot_be_are_refused(here, refusal, options, message):
    (here / "sweep.toml").write_text(SIZES, encoding="utf-8")
    assert refusal("sweep", "sweep.toml", *options).startswith(message)


def test_a_file_that_is_not_there_is_refused(here, refusal):
    assert refusal("sweep", "nowhere.toml").startswith("nowhere.toml does not exist.")


def test_without_ray_the_pip_command_is_told(here, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    (here / "sweep.toml").write_text(SIZES, encoding="utf-8")
    line = refusal("sweep", "sweep.toml", "--ray", "auto")
    assert line == "--ray needs Ray: pip install ray"
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_on_ray_a_killed_worker_loses_nothing_but_its_epoch(here):
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    text = "train_samples = 400\nepochs = 30\n[grid]\nseed = [1, 2]\n"
    process = start(here, text, "--ray", "auto", "--retries", "1")
    wait_until(lambda: folders(here) and epochs(folders(here)[0]) >= 3, process)
    (worker,) = _holding(folders(here)[0] / ".lock")
    os.kill(worker, signal.SIGKILL)
    reached = epochs(folders(here)[0])
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert 3 <= reached < 30
    assert [(row["status"], row["epochs"]) for row in table(here)] == [("done", "30")] * 2
    local = start(here, text, "--jobs", "2", "--quiet", "--out", "other")
    local.communicate(timeout=240)
    assert local.returncode == 0
    for folder in folders(here):
        assert same_weights(folder, here / "other" / folder.name)


@pytest.mark.slow
def test_a_dead_raylet_ends_a_sweep_with_a_line_that_goes_on_elsewhere(here):
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    process = start(here, "train_samples = 400\nepochs = 4000\nseed = 1\n", "--ray", "auto")
    wait_until(lambda: folders(here) and epochs(folders(here)[0]) >= 2, process, 300)
    (raylet,) = [pid for pid in _descendants(process.pid) if _program(pid) == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("semdiag: The Ray cluster died (")
    (row,) = table(here)
    assert row["status"] == "begun"
    assert 2 <= int(row["epochs"]) < 4000


def _descendants(process):
    """Processes that a process started, and theirs."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    generations = [children.get(process, [])]
    while generations[-1]:
        generations.append([child for parent in generations[-1] for child in children.get(parent, [])])
    return [each for generation in generations for each in generation]


def _program(process):
    try:
        return os.path.basename(os.readlink(f"/proc/{process}/exe"))
    except OSError:
        return ""


def _holding(file):
    """Processes that have a file open."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        if str(file) in links:
            found.add(int(name))
    return found


@pytest.mark.parametrize("columns", [80, 120])
def test_the_example_in_the_help_can_be_pasted(run_semdiag, here, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run_semdiag("sweep", "--help").out.splitlines()
    example = [line for line in lines if line.startswith(" " * 5)]
    (here / "pasted.toml").write_text("\n".join(example), encoding="utf-8")
    runs = read_sweep(here / "pasted.toml")
    labels = {(run.training.task, run.model.attention_label, run.training.seed) for run in runs}
    assert len(runs) == len(labels) == 2 * 3 * 3
    assert {label for _, label, _ in labels} == {"full", "topk-5", "topk-9"}
    assert {run.training.until for run in runs} == {0.999}
