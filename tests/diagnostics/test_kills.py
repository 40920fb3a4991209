"""Kills at moments nobody chose, by night fifty: a report is whole or the old one, a run ends as it would have."""

import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch

from semdiag.commands.main import main
from semdiag.measuring.findings.findings import Findings
from semdiag.reporting.report import write_report
from semdiag_models import TrainingConfig, open_run, read_checkpoint, train_run, weights_sha256

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that begin as copies"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
REPORTS, RUNS, SWEEPS = (20, 20, 10) if os.environ.get("SEMDIAG_EVERY_CASE") else (10, 8, 4)


def killed(work, seconds):
    """Let a process work, and kill it and its children after so many seconds; whether it had not ended before."""

    def alone():
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to its own group
            process.kill()
    process.join()
    return alive


def test_a_report_is_the_old_one_or_the_new_one(made_up, tmp_path):
    draw, findings = random.Random(1), Findings(made_up(("a/last.pt", range(8), {})))

    def again_and_again():
        while True:
            write_report(findings, tmp_path / "r", "killed", formats=())

    write_report(findings, tmp_path / "r", "first", formats=())
    kills = 0
    while kills < REPORTS:
        kills += killed(again_and_again, draw.uniform(0.02, 0.5))
        left = {path.name for path in tmp_path.iterdir()}
        assert "r" in left or any(name.endswith(".old") for name in left)
        if kills % 5 == 0:  # several kills in a row are put right, too
            write_report(findings, tmp_path / "r", "mended", formats=())
            assert [path.name for path in tmp_path.iterdir()] == ["r"]
        if (tmp_path / "r").exists():
            assert (tmp_path / "r" / "index.html").read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_a_run_goes_on_to_the_same_weights(tmp_path, tiny_config):
    draw = random.Random(2)

    def train(folder, epochs):
        training = TrainingConfig("even-pairs", 12, epochs, 7, 50, 20)
        resume = (folder / "last.pt").exists()
        with torch.random.fork_rng():
            trainer = open_run(
                folder, tiny_config(), training, torch.device("cpu"), resume=resume, overwrite=False
            )
            train_run(folder, trainer, {})

    finished, longest = 0, 0.4
    for _ in range(RUNS):
        assert killed(lambda: train(tmp_path / "killed", 10**6), draw.uniform(0.02, longest))
        if (tmp_path / "killed" / "last.pt").exists():
            finished = read_checkpoint(tmp_path / "killed" / "last.pt").epoch
        longest *= 1 if finished else 1.5  # a slow machine has not come to the first epoch
    assert finished
    epochs = finished + 1
    train(tmp_path / "killed", epochs)
    train(tmp_path / "whole", epochs)
    ends = [read_checkpoint(tmp_path / name / "last.pt") for name in ("killed", "whole")]
    assert ends[0].epoch == ends[1].epoch == epochs
    assert weights_sha256(ends[0].state) == weights_sha256(ends[1].state)
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_a_sweep_goes_on_after_every_kill(tmp_path, monkeypatch):
    draw = random.Random(3)
    monkeypatch.chdir(tmp_path)

    def ask_for(seeds):
        (tmp_path / "s.toml").write_text(
            "epochs = 20\ntrain_samples = 100\nholdout_samples = 20\nblocks = 1\nlength = 8\n"
            f'task = "parity"\n[grid]\nseed = {list(range(seeds))}\n'
        )

    ask_for(2000)  # more than there is time for
    runs = tmp_path / "runs" / "s"
    monkeypatch.setattr(sys, "argv", ["semdiag", "sweep", "s.toml", "--jobs", "1", "--quiet"])
    longest = 6.0
    for _ in range(SWEEPS):
        assert killed(main, draw.uniform(0.5, longest))
    begun = len([*runs.glob("*/last.pt")])
    while not begun:  # a slow machine has not come to the first run
        longest *= 2
        assert killed(main, longest)
        begun = len([*runs.glob("*/last.pt")])
    time.sleep(1)
    ask_for(begun + 1)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert (runs / "results.csv").read_text(encoding="utf-8").count(",done,") == begun + 1
    asked = [path for path in runs.iterdir() if path.is_dir()]
    assert not [path for run in asked for path in run.rglob(".*") if path.name != ".lock"]
