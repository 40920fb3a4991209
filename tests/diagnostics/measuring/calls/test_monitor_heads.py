"""What a monitor says of each head, whom it alarms, and where it logs."""

import math
import re
import warnings
from contextlib import suppress
from pathlib import Path

import monitor_alarms
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from semdiag import InputError, Monitor, watch_attention
from semdiag.commands.check import monitor as monitor_command
from semdiag.measuring.calls.monitor_alarms import (
    Alarm,
    AlarmError,
    Watch,
    extremes_of,
    read_heads,
    rules_of,
    summary_of,
)
from semdiag.measuring.calls.monitor_heads import head_columns, monitored_columns, scalars
from semdiag.presenting.drawing.panels import NothingToDrawError, monitored_run
from semdiag_models import Encoder, ModelConfig

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


def encoder(attention="full", heads=2, seed=0, scale=1.0):
    k = None if attention == "full" else 3
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Encoder(
            ModelConfig(3, 2, 12, attention=attention, k=k, blocks=2, heads=heads, width=16, dropout=0.0)
        )
        made.scale_queries_and_keys(scale)
        return made.train()


def tokens(seed=0, samples=6):
    return torch.randint(2, (samples, 12), generator=torch.Generator().manual_seed(seed))


def train(model, steps):
    for step in range(steps):
        model.zero_grad()
        F.cross_entropy(model(tokens(step)), tokens(step).sum(1) % 2).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad


def seen(model):
    found = []
    with torch.no_grad(), watch_attention(model, found.append):
        model(tokens())
    return found


def test_all_rows_hold_the_largest_logit_and_a_sample_no_more():
    every, some, model = {}, {}, encoder(scale=3.0)
    for rows, found in (("all", every), ("sample", some)):
        with Monitor(model, every=1, rows=rows, queries=2) as monitor:
            model(tokens(samples=9))
        found.update(monitor.heads.set_index(["layer", "head"])[["max_logit", "rows"]].T.to_dict())
    calls = []
    with torch.no_grad(), watch_attention(model, calls.append):
        model(tokens(samples=9))
    for call in calls:
        for head in range(2):
            exact = call.scores(torch.float64)[:, head].max().item()
            assert every[call.layer, head]["max_logit"] == pytest.approx(exact, rel=1e-5)
            assert every[call.layer, head]["rows"] == 9 * 12
            assert some[call.layer, head]["max_logit"] <= exact * (1 + 1e-5)
            assert some[call.layer, head]["rows"] == 4 * 2


def test_the_first_crossing_of_each_head_is_told_once_with_its_place():
    told, model = [], encoder()
    model.scale_queries_and_keys(1.0)
    with Monitor(model, every=1, rows="all", alarm={"max_logit": (-1e9, 1e9)}, on_alarm=told.append) as monitor:
        train(model, 3)
    assert [(a.step, a.layer, a.head, a.quantity, a.band) for a in told] == [
        (0, layer, head, "max_logit", "WARNING") for layer in (0, 1) for head in (0, 1)
    ]
    first = monitor.heads[monitor.heads["step"] == 0]
    assert [a.value for a in told] == first["max_logit"].tolist()
    assert monitor.alarms == told
    assert set(monitor.heads["alarm"]) == {"max_logit:WARNING"}


def test_a_severe_alarm_follows_a_warning_and_one_side_is_below():
    rules = rules_of({"entropy": (0.5, 0.05, "below")}, (), 1)
    watch, found = Watch(rules), []
    for step, value in enumerate((1.0, 0.4, 0.3, 0.04, 0.01)):
        row = {"step": step, "layer": 0, "head": 1, "occurrence": 0, "entropy": value}
        found += watch.look([row])
    assert [(a.step, a.band, a.value) for a in found] == [(1, "WARNING", 0.4), (3, "SEVERE", 0.04)]


def test_a_severe_alarm_says_what_its_warning_would_and_is_told_alone():
    for setting, values in (((50, 100), (120.0, 70.0, 130.0)), ((0.5, 0.05, "below"), (0.01, 0.2, 0.01))):
        name = "max_logit" if setting[0] == 50 else "entropy"
        watch, found = Watch(rules_of({name: setting}, (), 1)), []
        for step, value in enumerate(values):
            found += watch.look([{"step": step, "layer": 0, "head": 1, "occurrence": 0, name: value}])
        assert [(a.step, a.band) for a in found] == [(0, "SEVERE")]


def test_a_change_is_seen_within_its_steps_and_not_later():
    rules = rules_of({"entropy": ("halves", 20), "max_logit": ("doubles", 20)}, (), 10)
    for values, steps in (([2.0, 1.5, 0.9], [20]), ([2.0, 1.9, 1.8, 1.7, 1.0], []), ([2.0, math.nan, 0.9], [20])):
        watch, found = Watch(rules), []
        for at, value in enumerate(values):
            row = {"step": 10 * at, "layer": 0, "head": 0, "occurrence": 0, "entropy": value, "max_logit": 1.0}
            found += watch.look([row])
        assert [a.step for a in found] == steps
    watch, rise = Watch(rules), []
    for at, value in enumerate((1.0, 1.5, 2.5)):
        row = {"step": 10 * at, "layer": 0, "head": 0, "occurrence": 0, "entropy": 1.0, "max_logit": value}
        rise += watch.look([row])
    assert [(a.quantity, a.rule) for a in rise] == [("max_logit", "doubles above 0.1 within 20")]


@pytest.mark.parametrize(
    ("quantity", "setting", "values", "steps"),
    [
        ("first_weight", ("doubles", 500), (0.019, 0.04, 0.09), []),
        ("first_weight", ("doubles", 500), (0.04, 0.09, 0.11), [20]),
        ("first_weight", ("doubles", 500, 0.5), (0.04, 0.11, 0.5, 0.51), [30]),
        ("first_weight", ("doubles", 500, 0), (0.019, 0.04), [10]),
        ("first_weight", ("halves", 500), (0.04, 0.019), []),
        ("first_weight", ("halves", 500), (0.11, 0.04), [10]),
        ("xi", ("doubles", 500), (0.01, 0.04, 0.051), [20]),
        ("entropy", ("halves", 500), (0.09, 0.01), []),
        ("entropy", ("halves", 500), (0.11, 0.01), [10]),
        ("query_norm", ("doubles", 500), (0.001, 0.003), [10]),
    ],
)
def test_a_change_of_small_values_is_no_alarm(quantity, setting, values, steps):
    watch, found = Watch(rules_of({quantity: setting}, (), 10)), []
    for at, value in enumerate(values):
        found += watch.look([{"step": 10 * at, "layer": 0, "head": 0, "occurrence": 0, quantity: value}])
    assert [a.step for a in found] == steps


def test_the_text_of_an_alarm_is_read_by_a_program():
    alarm = Alarm(400, 3, 5, "max_logit", 61.25, "SEVERE", "above 50")
    found = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', str(alarm)))
    assert found == {
        "band": "SEVERE", "step": "400", "layer": "3", "head": "5", "quantity": "max_logit", "value": "61.25",
        "rule": '"above 50"',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("alarm", "said"),
    [
        ({"max_logits": 50}, r"there is no quantity 'max_logits'\. Known: max_logit, above"),
        ({"weight_kept_k8": 0.5}, r"there is no quantity 'weight_kept_k8'\. Add that k to the monitor\'s k\."),
        ({"entropy": (0, "below")}, r"entropy is never below 0: it lies between 0 and inf\."),
        ({"first_weight": 1}, r"first_weight is never above 1: it lies between 0 and 1\."),
        ({"xi": 0.5}, r"xi is never above 0\.5"),
        ({"output_rank": (1.0, "below")}, r"output_rank is never below 1"),
        ({"max_logit": (100, 50)}, r"the warning must come before the severe threshold"),
        ({"max_logit": math.nan}, r"a rule must look like 50, "),
        ({"max_logit": math.inf}, r"a rule must look like 50, "),
        ({"max_logit": "high"}, r"a rule must look like 50, "),
        ({"max_logit": (50, "over")}, r"a rule must look like 50, "),
        ({"max_logit": ()}, r"a rule must look like 50, "),
        ({"max_logit": (1, 2, 3)}, r"a rule must look like 50, "),
        ({"max_logit": ([1], "below")}, r"a rule must look like 50, "),
        ({"max_logit": True}, r"a rule must look like 50, "),
        ({"entropy": ("halves", 5)}, r"looked at every 10 steps; what halves within 5 is missed"),
        ({"first_weight": ("doubles", 500, 1)}, r"floor of a change of first_weight must be .* below 1\. Got 1\."),
        ({"max_logit": ("doubles", 500, "1")}, r"floor of a change of max_logit must be a number"),
        ({"max_logit": ("doubles", 500, math.nan)}, r"floor of a change of max_logit must be a number"),
        ([("max_logit", 50)], r"alarm takes a dictionary"),
    ],
)
def test_a_rule_that_no_row_can_meet_is_refused_at_the_start(alarm, said):
    with pytest.raises(InputError, match=said):
        Monitor(encoder(), every=10, alarm=alarm)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_alarm": "shout"}, "on_alarm must be"),
        ({"rows": "some"}, "rows must be"),
        ({"log": 3}, "log must be a function"),
    ],
)
def test_other_arguments_are_checked_as_well(options, said):
    with pytest.raises(InputError, match=said):
        Monitor(encoder(), **options)


def test_raise_ends_the_training_behind_the_forward_and_leaves_nothing_behind(tmp_path):
    model, path = encoder(), tmp_path / "attention.csv"
    with (
        pytest.raises(AlarmError, match=r"^alarm band=WARNING step=0 layer=0 head=0 .* and 3 more$") as error,
        Monitor(model, every=1, path=path, alarm={"max_logit": -1e9}, on_alarm="raise"),
    ):
        train(model, 3)
    assert error.value.alarm.quantity == "max_logit"
    assert len(pd.read_csv(tmp_path / "attention-heads.csv")) == 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_look_warns_once_for_all_its_alarms():
    model = encoder()
    with (
        pytest.warns(UserWarning, match=r"^alarm band=WARNING .* and 3 more$") as said,
        Monitor(model, every=1, alarm={"max_logit": -1e9}),
    ):
        train(model, 3)
    assert len(said) == 1


def test_a_rule_that_watched_nothing_is_named_at_the_end():
    model = encoder()
    with (
        pytest.warns(UserWarning, match=r"No row had a value of separation: these alarms watched nothing"),
        Monitor(model, every=1, alarm={"separation": (1e-3, "below")}),
    ):
        train(model, 1)


def test_accumulated_steps_are_counted_and_their_first_call_is_looked_at():
    model = encoder()
    with Monitor(model, every=2, accumulation=3) as monitor:
        for _ in range(15):
            model(tokens())
        model.eval()(tokens())
    assert monitor.step == 5
    assert monitor.table["step"].unique().tolist() == [0, 2, 4]
    with Monitor(model.train(), every=2, accumulation=3) as monitor:
        model(tokens())
        monitor.begin_step(4)
        model(tokens())
    assert monitor.table["step"].unique().tolist() == [0, 4]


def test_a_logger_gets_heads_and_layers_under_one_naming():
    sent, model = {}, encoder()
    with Monitor(model, every=2, k=[2], log=lambda numbers, step: sent.update({step: numbers})) as monitor:
        train(model, 3)
    assert sorted(sent) == [0, 2]
    heads = monitor.heads[monitor.heads["step"] == 2]
    for step, own in monitor.heads.groupby("step"):
        assert sent[step] == scalars(own.to_dict("records"), [2])
    own = heads[heads["layer"] == 1]["max_logit"]
    found = {name: sent[2][f"attention/layer_1/max_logit/{name}"] for name in ("max", "min", "median")}
    assert found == pytest.approx({"max": own.max(), "min": own.min(), "median": own.median()})
    assert not any(math.isnan(value) for value in sent[2].values())


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError])
def test_a_logger_that_fails_warns_once_and_stops_nothing(kind):
    def fail(numbers, step):
        raise kind(f"no network in step {step}")

    model = encoder()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Monitor(model, every=1, log=fail) as monitor:
            train(model, 4)
    assert len(said) == 1
    assert "no network in step 0" in str(said[0].message)
    assert monitor.heads["step"].nunique() == 4


def test_the_summary_names_the_extremes_and_the_alarms():
    model = encoder()
    with Monitor(model, every=1, rows="all") as quiet:
        model(tokens())
    assert quiet.summary().startswith("no alarm\nstep 0, 4 heads:\n  max_logit: ")
    told = []
    with Monitor(model, every=1, alarm={"max_logit": -1e9}, on_alarm=told.append) as loud:
        model(tokens())
    assert loud.summary().splitlines()[:4] == [str(alarm) for alarm in told]
    assert Monitor(model).summary() == "No step was looked at."


class NumbersOnly(torch.nn.Module):
    """Attention whose scores pass through an operation that is not followed: queries and keys are not known."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        scores = (self.q(x) @ self.k(x).transpose(1, 2)).square()
        return scores.softmax(-1) @ self.v(x)


def test_norms_of_queries_and_keys_that_are_not_known_are_missing_not_0():
    torch.manual_seed(0)
    model = NumbersOnly().train()
    with Monitor(model, every=1, rows="all") as monitor:
        model(torch.randn(2, 6, 8))
    (row,) = monitor.heads.to_dict("records")
    assert row["max_logit"] > 0
    assert math.isnan(row["query_norm"])
    assert math.isnan(row["key_norm"])
    assert "norm" not in monitor.summary()


class Masked(torch.nn.Module):
    """Attention written out, with a mask of keys."""

    def forward(self, x, real):
        scores = (x @ x.transpose(1, 2)).masked_fill(~real[:, None], -math.inf)
        return scores.softmax(-1) @ x


def test_a_sample_without_any_key_changes_no_number():
    """Its outputs are NaN, and its queries, the longest here, attend to nothing."""
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    x[2] *= 10
    real = torch.ones(3, 6, dtype=torch.bool)
    real[2] = False
    found = []
    for samples in (2, 3):
        with Monitor(Masked().train(), every=1, rows="all") as monitor:
            assert Masked()(x[:samples], real[:samples]).isnan().any() == (samples == 3)
            monitor.model(x[:samples], real[:samples])
        found.append(monitor.heads)
    assert found[0]["rows"].item() == 12
    assert found[0]["output_rank"].item() > 1
    pd.testing.assert_frame_equal(*found, check_exact=False, rtol=1e-6)


def rows_of_heads(*values):
    """A row for each step and head: ``values`` by step, then by head."""
    place = {
        "layer": 0,
        "module": "",
        "occurrence": 0,
        "rows": 8,
        **dict.fromkeys(monitored_columns(()), math.nan),
    }
    rows = [
        {**place, "step": step, "head": head, "above": value, "alarm": alarm}
        for step, of_step in enumerate(values)
        for head, (value, alarm) in enumerate(of_step)
    ]
    return pd.DataFrame(rows)


def test_a_quantity_that_is_the_same_everywhere_is_told_once():
    same = rows_of_heads([(0.0, ""), (0.0, "")], [(0.0, ""), (0.0, "")])
    assert extremes_of(same)[2:] == ["above: 0 (2 heads)"]
    assert summary_of(same.to_dict("records"), [], ["above"]).splitlines()[2] == "  above: 0 (2 heads)"
    one = rows_of_heads([(0.0, "")])
    assert extremes_of(one)[2:] == ["above: 0 (layer_0/head_0, step 0)"]


def test_an_extreme_is_told_where_it_was_first_met():
    rows = rows_of_heads([(0.0, ""), (0.5, "")], [(1.0, ""), (0.0, "")], [(1.0, ""), (1.0, "")])
    assert extremes_of(rows)[2:] == ["above: 0 (layer_0/head_0, step 0) to 1 (layer_0/head_0, step 1)"]


def test_a_head_that_is_severe_at_once_has_crossed_the_warning_too():
    rows = rows_of_heads([(0.9, "above:SEVERE"), (0.0, "")], [(0.9, "above:SEVERE"), (0.6, "above:WARNING")])
    assert extremes_of(rows)[:2] == [
        "alarm above:WARNING: 2 heads, first at step 0, layer_0/head_0",
        "alarm above:SEVERE: 1 head, first at step 0, layer_0/head_0",
    ]


def test_the_command_shows_the_quantities_of_each_k(tmp_path):
    path, model = tmp_path / "run.csv", encoder()
    with Monitor(model, every=1, k=3, rows="all", path=path):
        model(tokens())
    lines = extremes_of(read_heads(path))
    assert [line.split(":")[0] for line in lines if "_k3" in line] == [
        "dispersion_k3",
        "separation_k3",
        "weight_kept_k3",
    ]


@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 100), *(pytest.param(seed, 300, marks=pytest.mark.nightly) for seed in (0, 1, 2))]
)
def test_a_run_that_diverges_alarms_and_a_healthy_one_does_not(seed, steps, monkeypatch):
    """As large a rate leaves no doubt on any processor: the loss ends above ten times that of chance."""
    monkeypatch.setattr(monitor_alarms, "STEPS", steps)
    alarms, lost, last = monitor_alarms.run(seed, 0.1)
    assert alarms[0] is not None  # of the largest score
    assert lost is not None
    assert last > 10 * math.log(monitor_alarms.LETTERS)
    assert monitor_alarms.run(seed, 0.003)[:2] == ([None] * len(alarms), None)


def test_scores_that_are_no_numbers_alarm_as_infinite():
    told, model = [], encoder()
    with torch.no_grad():
        next(model.blocks[1].parameters()).fill_(math.nan)
    with Monitor(model, every=1, rows="all", alarm={"max_logit": 50}, on_alarm=told.append) as monitor:
        model(tokens())
    assert {(a.layer, a.value) for a in told} >= {(1, math.inf)}
    assert len(monitor.heads) == 4
    assert monitor.heads["above"][monitor.heads["layer"] == 1].tolist() == [1, 1]  # as max_logit says


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_command_tells_the_run_and_draws_it(tmp_path, suffix, capsys):
    path, model = tmp_path / f"run.{suffix}", encoder()
    rules = {"max_logit": (-1e9, 1e9), "entropy": (1e9, "below")}  # crossed by all
    with Monitor(model, every=1, path=path, alarm=rules, on_alarm=lambda alarm: None) as monitor:
        train(model, 3)
    monitor_command(path)
    said = capsys.readouterr().out
    heads = monitor.heads
    assert said.startswith("alarm max_logit:WARNING: 4 heads, first at step 0, layer_0/head_0\n")
    assert "\n3 looks, steps 0 to 2\nmax_logit: " in said
    worst = heads.loc[heads["max_logit"].idxmax()]
    assert (
        f"to {worst['max_logit']:.4g} (layer_{worst['layer']}/head_{worst['head']}, step {worst['step']})" in said
    )
    assert "alarm max_logit:WARNING: 4 heads, first at step 0, layer_0/head_0" in said
    assert not list(tmp_path.glob("*.png"))
    figure = monitored_run(heads)
    marks = [ax.lines[0] for ax in figure.axes if ax.lines]
    assert [len(line.get_xdata()) for line in marks] == [2, 2]
    monitor_command(tmp_path / f"run-heads.{suffix}", tmp_path / "other.svg")
    for out, refused in (
        (tmp_path / "run.txt", r"--out takes"),
        (tmp_path / "no" / "run.png", "cannot be written"),
    ):
        with pytest.raises(InputError, match=refused):
            monitor_command(path, out)
    assert (tmp_path / "other.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_the_figure_shows_the_head_that_alarmed_and_each_quantity_that_did():
    rows = [
        {**dict.fromkeys(head_columns(()), 1.0), "step": step, "layer": layer, "head": head, "occurrence": 0,
         "dispersion": 10.0 - head, "alarm": ""}
        for step in (0, 5) for layer in (0, 1) for head in (0, 1, 2)
    ]  # fmt: skip
    for row in rows:
        if (row["step"], row["layer"], row["head"]) == (5, 1, 2):
            row["alarm"] = "dispersion:WARNING key_norm:SEVERE"
    figure = monitored_run(pd.DataFrame(rows))
    panels = {ax.get_title("left"): ax for ax in figure.axes if ax.get_title("left")}
    assert len(panels) == 5
    (dispersion,) = [ax for title, ax in panels.items() if "dispersion" in title]
    assert dispersion.images[0].get_array().tolist() == [[10, 10], [10, 8]]
    marked = [ax for ax in panels.values() if ax.lines]
    assert [title for title, ax in panels.items() if ax.lines] == [
        "largest median dispersion δ (nats)", "largest key norm of any head",
    ]  # fmt: skip
    for ax in marked:
        assert ax.lines[0].get_xydata().tolist() == [[1, 1]]
        assert [text.get_text() for text in ax.texts] == ["head 2"]


def _heads(number):
    """A table of heads with one row, of which every cell is this."""
    columns = head_columns(())
    return f"{','.join(columns)}\n{','.join([number] * len(columns))}\n".encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"run-heads\.csv does not exist: a Monitor with path=… writes it"),
        (b"step,layer\n0,0\n", r"is not a monitor's table of heads: it lacks the column head"),
        (b"\x00\xff", r"run-heads\.csv cannot be read"),
        (b"", r"run-heads\.csv cannot be read"),
        (_heads("9" * 400), r"run-heads\.csv cannot be read \(\w+: (int too large|Unable to parse)"),
        (_heads("inf"), r"run-heads\.csv cannot be read"),
        (b"," * 3_000_000 + b"\n", r"a line has 3,000,001 cells; a table has up to 10,000 columns"),
        (_heads("1") + b"," * 3_000_000, r"a line has 3,000,001 cells"),
        (_heads("\x1b]0;title\x07"), r"run-heads\.csv cannot be read"),
    ],
)
def test_a_file_that_is_none_of_a_monitor_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "run-heads.csv").write_bytes(content)
    with pytest.raises(InputError, match=said):
        monitor_command(tmp_path / "run.csv")
    with pytest.raises(InputError, match=r"A monitor writes \.csv or \.parquet"):
        monitor_command(tmp_path / "run.txt")


def _one_head(**cells):
    """A table of heads with one row; quantities are 1."""
    place = dict.fromkeys(("step", "layer", "head", "occurrence", "rows"), 0) | {"module": "m", "alarm": ""}
    return pd.DataFrame([dict.fromkeys(head_columns(()), 1.0) | place | cells])[head_columns(())]


@pytest.mark.slow
def test_cells_of_a_file_reach_the_terminal_as_text(tmp_path, capsys):
    attack = "\x1b]0;title\x07\x1b[2J\u202e:SEVERE"
    _one_head(alarm=attack).to_csv(tmp_path / "run-heads.csv", index=False)
    monitor_command(tmp_path / "run.csv", tmp_path / "run.svg")
    said = capsys.readouterr().out
    assert "\\x1b]0;title\\x07\\x1b[2J\\u202e" in said
    assert not set("\x1b\x07\u202e") & set(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "column"),
    [
        *(("csv", name) for name in ("step", "layer", "head", "occurrence", "rows", "alarm", "entropy", "module")),
        *(("parquet", name) for name in ("step", "rows", "module")),
    ],
)
def test_an_empty_cell_is_no_error_of_ours(tmp_path, suffix, column, capsys):
    table = pd.concat([_one_head(), _one_head(**{"step": 1, column: None})])
    path = tmp_path / f"run-heads.{suffix}"
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path, index=False)
    monitor_command(path, tmp_path / "run.svg")
    looks = "1 look" if column in ("step", "layer", "head", "occurrence") else "2 looks"
    assert looks in capsys.readouterr().out


@pytest.mark.parametrize("column", ["step", "occurrence", "alarm", "module", "entropy"])
@pytest.mark.parametrize("cell", [{"a": 1}, [1]], ids=["struct", "list"])
def test_columns_of_structs_are_refused(tmp_path, column, cell):
    table = _one_head().astype(object)
    table.at[0, column] = cell
    table.to_parquet(tmp_path / "run-heads.parquet", index=False)
    with pytest.raises(InputError, match=r"run-heads\.parquet cannot be read \(ValueError: It has columns of"):
        monitor_command(tmp_path / "run.parquet")


@pytest.mark.parametrize("damage", [b"{", b"[]", b"3", b'{"columns": 3}', b'{"index_columns": [{"kind": 1}]}'])
def test_damaged_notes_of_pandas_are_refused_or_do_not_matter(tmp_path, damage):
    path = tmp_path / "run-heads.parquet"
    table = pa.Table.from_pandas(_one_head(), preserve_index=False)
    pq.write_table(table.replace_schema_metadata({"pandas": damage}), path)
    with suppress(InputError):
        monitor_command(path)


def test_a_file_without_rows_is_not_drawn(tmp_path, capsys):
    _one_head().iloc[:0].to_csv(tmp_path / "run-heads.csv", index=False)
    monitor_command(tmp_path / "run.csv")
    assert capsys.readouterr().out == "no rows\n"
    with pytest.raises(InputError, match=r"run\.csv has no rows: no step was looked at"):
        monitor_command(tmp_path / "run.csv", tmp_path / "run.png")


def test_a_run_without_looks_has_no_figure(tmp_path):
    monitor = Monitor(encoder(), path=tmp_path / "run.csv")
    assert monitor.heads.empty
    with pytest.raises(NothingToDrawError, match="no step was looked at"):
        monitored_run(monitor.heads)
