"""Monitors of several processes: one reduction a look, and what happens when a rank does not come to it."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import monitored_ranks
import pandas as pd
import pytest
import torch
from monitored_ranks import LOOK, Block, Exact, batch, blocks, own, whole_numbers
from torch import nn

from semdiag import InputError, Monitor
from semdiag.measuring.calls import monitor_heads as monitor_ranks
from semdiag.measuring.calls.monitor_heads import Look, Ranks, _fingerprint, monitored_columns

ROOT = Path(__file__).parents[4]
LARGEST = "max_logit", "query_norm", "key_norm"
SMALLEST = ("least_entropy",)
SCENARIOS = {
    2: (
        "shared", "alone", "ddp", "fsdp", "tensor_parallel", "distributed_queries", "joined", "other_steps",
        "failing", "nothing_seen", "often", "other_settings", "lone", "killed",
    ),
    3: ("shared", "ddp", "nothing_seen", "often", "hanging"),
}  # fmt: skip
PROCESSES = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch knows no processes"),
]


def run(ranks, folder, *scenarios):
    """What each rank found, by scenario."""
    path = os.pathsep.join(str(ROOT / part) for part in ("diagnostics", "models"))
    done = subprocess.run(
        [sys.executable, monitored_ranks.__file__, str(ranks), folder, *scenarios],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    found = {
        name: [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob(f"{name}-[0-9].json"))]
        for name in scenarios
    }
    ended = -9 if "killed" in scenarios else 0
    assert done.stdout.strip() == str([0] * (ranks - 1) + [ended]), done.stderr[-3000:]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By the number of ranks: their folder, and what each of them found."""

    @functools.cache
    def of(ranks):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        return folder, run(ranks, folder, *SCENARIOS[ranks])

    return of


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.nightly)], ids=["two ranks", "three ranks"])
def ranks(request):
    return request.param


@pytest.fixture
def folder(results, ranks):
    return results(ranks)[0]


@pytest.fixture
def found(results, ranks):
    return results(ranks)[1]


@pytest.fixture
def two(results):
    """Of two ranks, where their number is of no interest."""
    return results(2)[1]


def looked(model, *samples, **options):
    """The heads that a monitor in this process sees."""
    with Monitor(model, **{**LOOK, **options}) as monitor, torch.no_grad():
        for x in samples:
            model(x)
    return monitor.heads


def alike(rows, expected, names, **tolerance):
    for row, other in zip(rows, expected.to_dict("records"), strict=True):
        for name in names:
            assert row[name] == pytest.approx(other[name], nan_ok=True, **tolerance), name


def without_numbers(table):
    return table[["step", "layer", "module", "occurrence", "head", "rows"]].to_dict("records")


class TestProcesses:
    pytestmark = PROCESSES

    def test_maxima_are_those_of_one_process_and_means_to_rounding(self, found, ranks):
        """Scores are whole numbers times 1/2, so that no order of sums rounds them otherwise."""
        whole = looked(Exact().train(), whole_numbers(0), whole_numbers(1))
        assert whole["rows"].tolist() == [35] * 4
        for saw in found["shared"]:
            got = pd.DataFrame(saw["heads"])
            assert without_numbers(got) == without_numbers(whole)
            alike(saw["heads"], whole, LARGEST, abs=0, rel=0)
            # Means of at most 35 float32 numbers, each rounded at 6e-8 a few times.
            alike(
                saw["heads"],
                whole,
                ("above", "entropy", "least_entropy", "first_weight", "heaviest_key"),
                rel=1e-5,
            )
            alike(saw["heads"], whole, ("weight_kept_k2",), rel=0.2)  # a mean of medians

    def test_every_number_is_the_reduction_of_those_of_the_ranks(self, found, ranks):
        """Each rank's rows are seen here by calls of the same shapes, so that extremes agree to the last bit."""
        for step in range(2):
            parts = [
                looked(Exact().train(), own(whole_numbers(step), r, ranks)).to_dict("records")
                for r in range(ranks)
            ]
            heads = [row for row in found["shared"][0]["heads"] if row["step"] == step]
            for head, row in enumerate(heads):
                mine = [part[head] for part in parts]
                for name in monitored_columns([2]):
                    values = [(other[name], other["rows"]) for other in mine if not math.isnan(other[name])]
                    if name in LARGEST:
                        assert row[name] == max(value for value, _ in values)
                    elif name in SMALLEST:
                        assert row[name] == min(value for value, _ in values)
                    elif values:
                        mean = sum(value * rows for value, rows in values) / sum(rows for _, rows in values)
                        assert row[name] == pytest.approx(mean, rel=1e-14), name
                    else:
                        assert math.isnan(row[name])

    def test_all_ranks_have_the_same_tables_and_rank_0_alone_writes(self, found, folder, ranks):
        first, *others = found["shared"]
        for other in others:
            assert json.dumps(other["heads"]) == json.dumps(first["heads"])
            assert json.dumps(other["layers"]) == json.dumps(first["layers"])
            assert other["sent"] == []
        assert first["sent"] == [0, 1]
        written = pd.read_csv(folder / f"shared-{ranks}-heads.csv")
        assert written["max_logit"].tolist() == [row["max_logit"] for row in first["heads"]]
        assert [row["rows"] for row in first["layers"]] == [70, 70]

    def test_an_alarm_that_raises_stops_all_ranks_alike(self, found):
        told = {json.dumps(saw["told"]) for saw in found["ddp"]}
        assert len(told) == 1
        assert "alarm band=WARNING step=4 layer=0 head=" in told.pop()
        for saw in found["ddp"]:
            assert saw["steps"] == 4
            assert {row["step"] for row in saw["heads"]} == {0, 2, 4}
            assert {row["rows"] for row in saw["heads"]} == {30}

    def test_a_rank_that_cannot_look_keeps_no_other_waiting(self, found, ranks):
        rows = pd.DataFrame(found["nothing_seen"][0]["heads"]).groupby("step")["rows"].first().tolist()
        assert rows == [35, 35 - 7 * monitored_ranks.PARTS[ranks][-1], 35]
        assert not found["nothing_seen"][0]["said"]
        assert "please report it" in found["nothing_seen"][-1]["said"][0]

    def test_monitors_may_stop_right_behind_a_look(self, found, ranks):
        assert [saw["said"] for saw in found["often"]] == [[]] * ranks

    def test_a_rank_that_dies_or_hangs_ends_the_look_of_the_others_with_one_line(self, found, ranks):
        name, why = {
            2: ("killed", "another rank has ended or stopped its monitor"),
            3: ("hanging", "not every rank arrived within 2 s"),
        }[ranks]
        for rank in range(ranks - 1):
            saw = found[name][rank]
            assert saw["said"] == [f"The monitor of rank {rank} looks at its own rank only from step 1 on: {why}."]
            rows = pd.DataFrame(saw["heads"]).groupby("step")["rows"].first().tolist()
            assert rows == [35, *[7 * monitored_ranks.PARTS[ranks][rank]] * 2]


class TestTwoProcesses:
    pytestmark = PROCESSES

    def test_ranks_may_look_alone(self, two):
        for rank, saw in enumerate(two["alone"]):
            expected = looked(Exact().train(), own(whole_numbers(), rank, 2))
            alike(saw["heads"], expected, monitored_columns([2]), abs=0, rel=0)

    def test_sharded_weights_are_one_model(self, two):
        expected = looked(blocks(), batch())
        for saw in two["fsdp"]:
            assert without_numbers(pd.DataFrame(saw["heads"])) == without_numbers(expected)
            alike(saw["heads"], expected, ("max_logit", "entropy", "key_norm"), rel=1e-5)  # float32 products

    def test_heads_of_tensor_parallel_layers_are_numbered_on(self, two):
        expected = looked(blocks(), batch(), batch())
        for saw in two["tensor_parallel"]:
            assert without_numbers(pd.DataFrame(saw["heads"])) == without_numbers(expected)
            alike(saw["heads"], expected, monitored_columns([2]), rel=1e-3, abs=1e-5)  # products of other widths

    def test_distributed_queries_are_named(self, two):
        for saw in two["distributed_queries"]:
            (said,) = saw["said"]
            assert said.startswith("The monitor cannot see all attention: it has no rows for 1 (")
            assert "DTensor" in said
            assert {row["module"] for row in saw["heads"]} == {"0"}

    def test_a_rank_with_fewer_batches_stops_its_monitor_and_keeps_no_other_waiting(self, two):
        first, last = two["joined"]
        assert {row["step"]: row["rows"] for row in first["heads"]} == {0: 30, 1: 30, 2: 18, 3: 18}
        assert {row["step"] for row in last["heads"]} == {0, 1}
        why = "another rank has ended or stopped its monitor"
        assert first["said"] == [f"The monitor of rank 0 looks at its own rank only from step 2 on: {why}."]
        assert last["said"] == []

    def test_a_forward_of_one_rank_alone_waits_no_longer_than_its_patience(self, two):
        reasons = "not every rank arrived within 2 s", "another rank has ended or stopped its monitor"
        for rank, saw in enumerate(two["lone"]):
            why = f"looks at its own rank only from step 2 on: {reasons[rank]}."
            assert saw["said"] == [f"The monitor of rank {rank} {why}"]
            rows = pd.DataFrame(saw["heads"]).groupby("step")["rows"].first().tolist()
            assert rows == [35, 35, *([21, 21], [14])[rank]]
        assert two["lone"][0]["seconds"] >= 2

    def test_looks_at_different_steps_are_not_mixed(self, two):
        for rank, saw in enumerate(two["other_steps"]):
            (said,) = saw["said"]
            assert said.endswith("the ranks look at different steps (1, 11).")
            assert {row["rows"] for row in saw["heads"] if row["step"]} == {(21, 14)[rank]}

    def test_a_forward_that_fails_keeps_no_other_rank_waiting(self, two):
        first, last = two["failing"]
        assert "from step 1 on: another rank has ended" in first["said"][0]
        assert "from step 1 on: its forward pass failed" in last["said"][0]
        assert {row["step"] for row in last["heads"]} == {0, 2}

    def test_monitors_of_other_arguments_are_refused_in_every_rank(self, two):
        for rank, saw in enumerate(two["other_settings"]):
            assert f"every is {2 + rank} in rank {rank} and {3 - rank} in rank {1 - rank}." in saw["told"][0]


@pytest.mark.slow
@PROCESSES[1]
def test_a_monitor_in_rank_0_alone_is_refused(tmp_path):
    """The other rank lives on: it only starts no monitor."""
    (saw,) = [each for each in run(2, tmp_path, "one_monitor")["one_monitor"] if "told" in each]
    assert "not every rank arrived within 2 s when it started" in saw["told"][0]
    assert 'ranks="own"' in saw["told"][0]


def test_weights_are_told_apart_by_their_values_and_by_those_around():
    one, other = blocks(), blocks()
    assert _fingerprint(one, "1") == _fingerprint(other, "1") != _fingerprint(one, "0")
    with torch.no_grad():
        other[1].k.weight[-1, -1] += 1
        other[1].k.bias[0] += 1
    assert _fingerprint(one, "1") != _fingerprint(other, "1")
    bare = nn.Sequential(nn.Sequential(Block(True), nn.Softmax(-1)))
    assert _fingerprint(bare, "0.1") == _fingerprint(bare, "0")
    assert _fingerprint(nn.Softmax(-1), "") == _fingerprint(nn.Softmax(-1), "not there")


def test_one_process_is_alone_whatever_is_asked():
    for asked in ("all", "own"):
        ranks, one = Ranks(asked), Look(0, [], [], {})
        ranks.open({"every": 1})
        assert ranks.together(one) == [one]
        assert (ranks.rank, ranks.reports, ranks.parts) == (0, True, {})
        ranks.fail(0)
        ranks.leave()
    with pytest.raises(InputError, match=r'^ranks must be "all" or "own"\. Got 3\.$'):
        Monitor(blocks(), ranks=3)


@pytest.fixture
def one_rank(monkeypatch):
    """A real group of gloo with one rank, which counts as several."""
    if not torch.distributed.is_available():
        pytest.skip("this torch knows no processes")
    monkeypatch.setattr(monitor_ranks, "_several", torch.distributed.is_initialized)

    def begin():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    yield begin
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_group_of_one_sees_what_a_process_alone_sees(one_rank):
    expected = looked(blocks(), batch())
    one_rank()
    with Monitor(blocks(), **LOOK) as monitor, torch.no_grad():
        assert monitor.start() is monitor
        monitor.model(batch())
        assert monitor._ranks.parts.keys() == {"0", "1"}
    pd.testing.assert_frame_equal(monitor.heads, expected)
    assert torch.distributed.is_initialized()


def test_a_training_that_closes_all_groups_leaves_the_monitor_alone(one_rank):
    one_rank()
    with Monitor(Exact().train(), **LOOK) as monitor:
        monitor.model(whole_numbers(0))
        torch.distributed.destroy_process_group()
        with pytest.warns(UserWarning, match=r"its own rank only from step 1 on: the ranks could not be reached"):
            monitor.model(whole_numbers(1))
        monitor.model(whole_numbers(2))
    assert monitor.heads["step"].unique().tolist() == [0, 1, 2]


def test_a_forward_that_fails_in_a_look_ends_looking_together(one_rank):
    one_rank()
    with Monitor(Exact().train(), **LOOK) as monitor:
        with (
            pytest.warns(UserWarning, match=r"its own rank only from step 0 on: its forward pass failed"),
            pytest.raises(RuntimeError),
        ):
            monitor.model(whole_numbers()[..., :5])
        monitor.model(whole_numbers())
    assert monitor.heads["step"].unique().tolist() == [1]


def test_a_monitor_that_was_made_too_early_says_that_it_is_alone(one_rank):
    monitor = Monitor(Exact().train(), **LOOK)
    one_rank()
    with pytest.warns(UserWarning, match=r"was made before torch\.distributed was initialised") as said:
        monitor.start()
    assert Path(said[0].filename).name == "test_monitor_ranks.py"
    monitor.model(whole_numbers())
    monitor.stop()
    assert len(monitor.heads) == 2
