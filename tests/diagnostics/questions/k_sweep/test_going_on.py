"""Runs with masks that are killed and go on: what is finished is not run again, and the end is the same."""

import importlib
import json
import multiprocessing
import os
import re
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.measure import Conditions
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.survey import survey
from semdiag.questions.k_sweep import KSweepPlan, reruns
from semdiag.questions.k_sweep.finished import (
    FinishedRun,
    FinishedRuns,
    code_digests,
    model_folder,
    structure_digest,
    texts_digest,
    weights_digest,
)
from semdiag.reporting.folder import reserved
from semdiag_files import InputError

LETTERS, LENGTH, SAMPLES = 7, 24, 6
PLAN = KSweepPlan(rerun=True, ks=(2, 6), kinds=("topk", "random"), lengths=(16,))
RUNS = 5 * SAMPLES + 5 * (SAMPLES * LENGTH // 16)  # each batch as it is and with four masks


class Causal(nn.Module):
    """Causal attention to the logits of the next token; ``on_call`` is told of every forward pass."""

    def __init__(self):
        super().__init__()
        self.calls, self.on_call = 0, lambda calls: None
        self.tokens, self.qkv = nn.Embedding(LETTERS, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, LETTERS)

    def forward(self, input_ids):
        self.calls += 1
        self.on_call(self.calls)
        x = self.tokens(input_ids)
        q, k, v = (3 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(reruns, "_AT_ONCE", LENGTH)  # a text at a time
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Causal().double().eval()


@pytest.fixture
def ids():
    return torch.randint(LETTERS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def swept(model, ids, folder, plan=PLAN, progress=None, **how):
    loaded = LoadedModel("own:model", "", model, "factory", "unknown", batches=[ids])
    conditions = Conditions(plans=(plan,), dtype="float64", unfinished=folder, **how)
    return survey([loaded], conditions, progress)


def as_csv(found):
    return [getattr(found, name).to_csv(index=False) for name in ("rerun", "rerun_lengths", "sweep")]


def finished(folder):
    lines = [path.read_text().splitlines() for path in folder.glob("*/runs-*.jsonl")]
    return sum(map(len, lines))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that begin as copies")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.slow
def test_killed_five_times_it_ends_as_if_it_never_was(model, ids, tmp_path):
    uninterrupted = as_csv(swept(model, ids, None))
    calls = model.calls

    def dies_after(last_call):
        def die(calls):
            if calls == last_call:
                os.kill(os.getpid(), signal.SIGKILL)

        model.calls, model.on_call = 0, die
        swept(model, ids, tmp_path / "parts")

    counts = []
    for number in (9, 14, 19, 24, 30):
        process = multiprocessing.get_context("fork").Process(target=dies_after, args=(number,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        counts.append(finished(tmp_path / "parts"))
    assert counts == sorted({*counts})  # each went on, and further
    model.calls = 0
    assert as_csv(swept(model, ids, tmp_path / "parts")) == uninterrupted
    assert model.calls < calls - counts[-1] / 2
    assert finished(tmp_path / "parts") == RUNS


def test_what_is_finished_is_not_run_again(model, ids, tmp_path):
    first = as_csv(swept(model, ids, tmp_path))
    page = next(tmp_path.glob("*/index.html")).read_text()
    assert f"{RUNS} of {RUNS} runs" in page
    model.calls = 0
    assert as_csv(swept(model, ids, tmp_path)) == first
    assert model.calls <= 3 + 2 * 3 + SAMPLES  # a look, how outputs are read, twice, and the statistics


@pytest.mark.parametrize(
    ("how", "difference"),
    [
        ({"plan": KSweepPlan(rerun=True, ks=(2, 5), kinds=("topk", "random"), lengths=(16,))}, "masks"),
        ({"plan": KSweepPlan(rerun=True, ks=(2, 6), kinds=("topk", "random"))}, "--lengths"),
        ({"seed": 3}, "--seed"),
    ],
)
def test_other_options_are_refused_with_what_differs(how, difference, model, ids, tmp_path):
    swept(model, ids, tmp_path)
    with pytest.raises(InputError, match="unfinished command with another") as refused:
        swept(model, ids, tmp_path, **how)
    assert difference in str(refused.value)
    assert "\n" not in str(refused.value)


def test_so_are_other_texts_weights_and_versions(model, ids, tmp_path):
    swept(model, ids, tmp_path)
    with pytest.raises(InputError, match="another texts"):
        swept(model, ids.flip(0), tmp_path)
    (record,) = tmp_path.glob("*/conditions.json")
    conditions = json.loads(record.read_text())
    record.write_text(json.dumps(conditions | {"torch": "1.0"}))
    with pytest.raises(InputError, match=r"another torch \(1\.0 there, "):
        swept(model, ids, tmp_path)
    record.write_text(json.dumps(conditions))
    with torch.no_grad():
        model.head.bias += 1
    with pytest.raises(InputError, match="another weights"):
        swept(model, ids, tmp_path)


def test_a_line_that_a_kill_cut_short_is_run_again_and_a_damaged_one_is_named(model, ids, tmp_path):
    first = as_csv(swept(model, ids, tmp_path))
    (lines,) = tmp_path.glob("*/runs-0.jsonl")
    lines.write_bytes(lines.read_bytes()[:-40])
    assert as_csv(swept(model, ids, tmp_path)) == first
    assert finished(tmp_path) == RUNS
    lines.write_text('{"rows": [[1]]}\n' + lines.read_text())
    with pytest.raises(InputError, match="damaged in line 1"):
        swept(model, ids, tmp_path)


def test_the_same_texts_have_one_digest_however_they_are_cut(ids):
    other = ids.clone()
    other[-1, -1] += 1
    assert texts_digest([ids], None) == texts_digest([ids[:2], ids[2:]], None) != texts_digest([other], None)


class Sayings(SurveyProgress):
    """Keeps what a survey says, in order with its stages."""

    def __init__(self):
        self.said = []

    def announce(self, stage, steps):
        self.said.append(stage)

    def say(self, text):
        self.said.append(text)


def test_weights_in_another_order_have_another_digest():
    layer = nn.Linear(3, 3)
    before = weights_digest(layer)
    assert weights_digest(layer) == before
    layer.weight.data = layer.weight.data[[1, 0, 2]].clone()
    assert weights_digest(layer) != before


OTHER = "from torch import nn\nfrom factor_beside import FACTOR\n\n\nclass Odd(nn.Module):\n    pass\n"


def test_code_is_compared_file_by_file_with_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "factor_beside.py").write_text("FACTOR = 3\n")
    (tmp_path / "odd_model.py").write_text(OTHER)
    monkeypatch.delitem(sys.modules, "odd_model", raising=False)
    module = importlib.import_module("odd_model").Odd()
    before = code_digests(module)
    assert before.keys() >= {"code of odd_model", "code of factor_beside"}
    assert not {name for name in before if name.partition("code of ")[2].startswith(("torch", "semdiag", "json"))}
    assert code_digests(module) == before
    (tmp_path / "factor_beside.py").write_text("FACTOR = 4\n")
    after = code_digests(module)
    assert {name for name in before if after[name] != before[name]} == {"code of factor_beside"}


def test_other_code_with_the_same_weights_is_refused(model, ids, tmp_path):
    swept(model, ids, tmp_path)
    (record,) = tmp_path.glob("*/conditions.json")
    conditions = json.loads(record.read_text())
    code = f"code of {__name__}"
    record.write_text(json.dumps(conditions | {code: "0"}))
    with pytest.raises(InputError, match=rf"another {re.escape(code)} \(0 there, "):
        swept(model, ids, tmp_path)


def test_so_is_another_structure_and_a_buffer_that_is_not_saved(model, ids, tmp_path):
    swept(model, ids, tmp_path)
    model.tokens.scale_grad_by_freq = True
    with pytest.raises(InputError, match="another structure"):
        swept(model, ids, tmp_path)
    model.tokens.scale_grad_by_freq = False
    model.register_buffer("shift", torch.ones(1), persistent=False)
    with pytest.raises(InputError, match="another weights"):
        swept(model, ids, tmp_path)


def test_structure_has_one_digest_whatever_addresses_it_prints():
    first, second = (nn.Sequential(nn.GELU(), Named(object())) for _ in range(2))
    assert repr(first) != repr(second)
    assert structure_digest(first) == structure_digest(second) != structure_digest(nn.Sequential(nn.ReLU()))


class Unprintable(nn.Linear):
    def __repr__(self):
        raise RuntimeError("not printable")


def test_a_model_that_cannot_be_printed_has_a_structure():
    digests = {
        structure_digest(nn.Sequential(Unprintable(2, 2), *more)) for more in ((), (nn.ReLU(),), (nn.ReLU(),))
    }
    assert len(digests) == 2


class Named(nn.Module):
    """Prints an object that has no text of its own."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def extra_repr(self):
        return repr(self.value)


def test_the_estimate_comes_before_the_runs_and_masks_before_statistics(model, ids, tmp_path, monkeypatch):
    monkeypatch.setattr(reruns, "_WORTH_SAYING", 0.0)
    monkeypatch.setattr(reruns, "_LONG_ENOUGH", 1)
    progress = Sayings()
    swept(model, ids, tmp_path, progress=progress)
    masks, estimate, statistics, *_ = progress.said
    assert masks == "own:model: runs with masks"
    assert f"{RUNS} runs with masks" in estimate
    assert statistics == "own:model"
    assert finished(tmp_path) == RUNS


def test_times_between_two_lengths_lie_on_a_line():
    times = [(100, 1.0), (300, 2.0)]
    assert reruns._per_token(times, 200) == pytest.approx(1.5)
    assert reruns._per_token(times[:1], 200) == 1.0
    assert reruns._per_token([], 200) == 0.0


def test_a_report_folder_holds_what_is_finished_and_nobody_elses(tmp_path):
    with reserved(tmp_path / "r", keep_queries=False) as folder:
        parts = folder.unfinished(["a", "b"])
        assert parts.is_dir()
    assert not (tmp_path / "r").exists()  # nothing was finished
    with reserved(tmp_path / "r", keep_queries=False) as folder:
        runs = FinishedRuns.opened(model_folder(folder.unfinished(["a", "b"]), "a"), {"seed": "1"})
        runs.add((0, 0, 1, "topk", 4), FinishedRun([]))
    with reserved(tmp_path / "r", keep_queries=False) as folder:
        assert folder.unfinished(["a", "b"]).is_dir()
        with pytest.raises(InputError, match="finished of a, b, not of c"):
            folder.unfinished(["c"])
        with folder.replacing() as new:
            (new / "summary.json").write_text('{"schema": "semdiag.report/1"}')
    assert not (tmp_path / "r" / "unfinished").exists()
    (tmp_path / "s" / "unfinished").mkdir(parents=True)
    (tmp_path / "s" / "unfinished" / "mine.txt").touch()
    with pytest.raises(InputError, match="not empty"), reserved(tmp_path / "s", keep_queries=False):
        pass


def test_a_users_file_among_finished_parts_is_never_deleted(tmp_path):
    with reserved(tmp_path / "r", keep_queries=False) as folder:
        parts = folder.unfinished(["a"])
        (parts / "notes.txt").write_text("mine")
    refused = pytest.raises(InputError, match=r"notes\.txt, which semdiag did not make")
    with refused, reserved(tmp_path / "r", keep_queries=False):
        pass
    assert (parts / "notes.txt").read_text() == "mine"
