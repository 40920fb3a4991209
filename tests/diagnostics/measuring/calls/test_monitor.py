"""The training monitor in real little trainings: what it writes, and that it changes nothing."""

import contextlib
import copy
import csv
import io
import math
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag import InputError, Monitor, TopK, capture, sparsify
from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.mathematics.row_statistics import row_statistics
from semdiag.measuring.calls import monitor as monitoring
from semdiag.measuring.calls import monitor_alarms as monitor_log
from semdiag.measuring.calls.counted_rows import counted_rows
from semdiag.measuring.calls.monitor_heads import describe_layer, looked_at, monitored_columns, sampled_rows
from semdiag_models import Encoder, ModelConfig


def files(folder):
    return sorted(file.name for file in folder.iterdir())


def beside(*names):
    """Names of a monitor's files and of those of its heads."""
    return sorted([*names, *(name.replace(".", "-heads.") for name in names)])


class Foreign(nn.Module):
    """A causal model of torch's own parts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=True).mean(1))


def encoder(attention="full", heads=2):
    k = None if attention == "full" else 3
    config = ModelConfig(
        vocabulary_size=3, classes=2, length=12, attention=attention, k=k, blocks=2, heads=heads, width=16
    )
    return Encoder(config)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=3, n_positions=12, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2ForSequenceClassification(config.__class__(**{**config.to_dict(), "pad_token_id": 2}))


def train(model, steps, monitor=None):
    """Gradients of the last step and the random numbers that follow a short training."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(steps):
        tokens = torch.randint(2, (6, 12))
        output = model(tokens)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        optimizer.zero_grad()
        F.cross_entropy(logits, tokens.sum(1) % 2).backward()
        optimizer.step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.rand(3)


def made(build):
    torch.manual_seed(0)
    return build()


@pytest.mark.processor
@pytest.mark.parametrize("build", [encoder, lambda: encoder("topk"), Foreign, gpt2])
def test_a_training_is_the_same_to_the_last_bit_and_nothing_stays_behind(build):
    plain, watched = made(build), made(build)
    expected, after = train(plain, 5)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in watched.modules()]
    with Monitor(watched, every=2, k=[3]) as monitor:
        found, after_watched = train(watched, 5)
    assert torch.equal(after, after_watched)
    assert len(expected) == len(found) > 5
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in watched.modules()]
    assert monitor.table[["step", "layer"]].values.tolist() == [[s, n] for s in (0, 2, 4) for n in (0, 1)]
    numbers = monitor.table[["dispersion", "entropy", "xi", "dispersion_k3", "weight_kept_k3"]]
    assert numbers.notna().all(axis=None)
    assert (numbers.drop(columns="dispersion_k3") > 0).all(axis=None)
    assert (numbers["dispersion_k3"] >= 0).all()  # 0: without positions, equal tokens have equal scores
    assert monitor.table["xi"].between(0, 0.5).all()
    train(watched, 3)
    assert len(monitor.table) == 6


def test_numbers_are_medians_over_rows_of_the_attention_call():
    model, tokens = made(encoder).train(), torch.tensor([[0, 1, 1, 0]])
    config, calls = model.config, []
    with watch_attention(model, calls.append), Monitor(model, every=1, k=[2]) as monitor:
        model(tokens)
    for call, row in zip(calls, monitor.table.to_dict("records"), strict=True):
        whole = row_statistics(call.q, call.k, call.scale, call.allowed, top=2)
        weight = whole.largest_weight()
        assert row["rows"] == config.heads * 4  # all there are: the sample is the whole call
        for name, values in {
            "dispersion": whole.dispersion(),
            "entropy": whole.entropy,
            "xi": 2 * weight * (1 - weight),
            "separation_k2": whole.separation(2),
            "weight_kept_k2": whole.mass_kept(2),
        }.items():
            assert row[name] == pytest.approx(values.detach().quantile(0.5).item(), rel=1e-5), name
        assert math.isnan(row["separation"])


@pytest.mark.parametrize("build", [encoder, lambda: encoder("topk"), Foreign])
def test_sampled_rows_are_rows_of_the_whole_call(build):
    calls = []
    tokens = torch.randint(2, (6, 12), generator=torch.Generator().manual_seed(0))
    model = made(build).train()
    with watch_attention(model, calls.append):
        model(tokens)
    generator = torch.Generator().manual_seed(5)
    for call in calls:
        sample = sampled_rows(call, [2], generator)
        found, allowed = sample.statistics, call.part().allowed
        whole = row_statistics(call.q, call.k, call.scale, allowed, call.selected, top=2, bias=call.bias)
        assert found.keys.shape == (4, call.q.shape[1], 8)
        assert sample.queries.all()
        entire = torch.stack([whole.entropy, whole.dispersion(), whole.dispersion(2)], -1).flatten(0, 2)
        sampled = torch.stack([found.entropy, found.dispersion(), found.dispersion(2)], -1).flatten(0, 2)
        nearest = (sampled[:, None] - entire).abs().amax(-1).amin(1)
        assert nearest.max() < 1e-5


def test_the_first_key_of_sampled_rows_is_that_of_the_sequence_not_of_the_windows_drawn():
    """In a window of 3, no query from the third on sees key 0: their weight on it is 0, whatever was drawn."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(6, 2, 40, 5, generator=draw)
    places = torch.arange(40)
    window = (places <= places[:, None]) & (places > places[:, None] - 3)
    call = AttentionCall("", 0, q, q, q, 1.0, window[None, None], None, None, q)
    scores = (q @ q.transpose(2, 3)).masked_fill(~window, -torch.inf)
    for seed in range(5):
        found = sampled_rows(call, [], torch.Generator().manual_seed(seed))
        drawn = torch.Generator().manual_seed(seed)
        b, r = (torch.randperm(n, generator=drawn)[:m].sort().values for n, m in ((6, 4), (40, 8)))
        weights = scores.softmax(-1)[b][:, :, r, 0]
        torch.testing.assert_close(found.first_weight(), weights, rtol=1e-5, atol=1e-7)


def eager():
    model = gpt2()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("build", [encoder, Foreign, gpt2, eager, lambda: nn.Sequential(encoder())])
@pytest.mark.parametrize("first", ["mask", "monitor"])
def test_under_sparsify_the_rows_are_those_of_the_masked_model(build, first):
    """With one key left nothing is dispersed, whichever context was opened first, and training is as without."""
    model, other = made(build), made(build)
    with sparsify(other, TopK(1)):
        expected = train(other, 2)
    monitor = Monitor(model, every=1)
    with contextlib.ExitStack() as stack:
        for context in (sparsify(model, TopK(1)), monitor)[:: 1 if first == "mask" else -1]:
            stack.enter_context(context)
        found = train(model, 2)
    assert len(monitor.table) == 4
    assert (monitor.table[["dispersion", "xi", "entropy"]].abs() < 1e-6).all(axis=None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with Monitor(model, every=1) as after:
        train(model, 1)
    assert (after.table["dispersion"] > 0.001).all()


def test_padded_queries_are_left_out():
    model = made(encoder).train()
    pad = model.config.pad_id
    tokens = torch.full((1, 12), pad)
    tokens[0, :3] = 0
    with Monitor(model, every=1) as monitor:
        model(tokens)
    assert (monitor.table["keys"] == 3).all()
    assert (monitor.table["rows"] <= 3 * model.config.heads).all()


def test_padded_queries_of_a_foreign_model_are_left_out():
    """The model is asked for its first look while it runs: its arguments count as those of its modules do."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = made(lambda: nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)).train()
    x, real = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) < 3
    calls = []
    with watch_attention(model, calls.append), Monitor(model, every=1) as monitor:
        model(x, src_key_padding_mask=~real.expand(3, 8))
    (row,), (call,) = monitor.table.to_dict("records"), calls
    scores = (call.q @ call.k.mT * call.scale)[:, :, real][..., real].detach()
    assert row["rows"] == 3 * 3 * 2
    assert row["dispersion"] == pytest.approx((scores.amax(-1) - scores.amin(-1)).quantile(0.5).item(), rel=1e-5)


class Marked(nn.Module):
    """Takes a mask of tokens, and may leave the padding in its attention."""

    def __init__(self, obedient):
        super().__init__()
        self.obedient = obedient

    def forward(self, x, attention_mask):
        scores = x @ x.mT
        scores = scores.masked_fill(~attention_mask[:, None], -math.inf) if self.obedient else scores
        return scores.softmax(-1) @ x


@pytest.mark.parametrize(("obedient", "rows"), [(True, 7), (False, 12)])
def test_a_mask_that_the_model_itself_takes_counts_where_it_is_true_of_the_keys(obedient, rows, recwarn):
    model, x = Marked(obedient).train(), torch.randn(2, 6, 4)
    with Monitor(model, every=1) as monitor:
        for _ in range(2):
            model(x, attention_mask=torch.arange(6) < torch.tensor([[6], [1]]))
    assert monitor.table["rows"].tolist() == [rows, rows]
    assert ["all queries count" in str(said.message) for said in recwarn] == [True] * (not obedient)


class Moved(nn.Module):
    """Attention whose weights are moved before they meet values: no capture follows it."""

    def __init__(self, moved):
        super().__init__()
        self.moved = moved

    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return (weights.roll(1, -1) if self.moved else weights) @ x


def test_attention_that_the_monitor_cannot_see_is_named_once(recwarn):
    model = nn.Sequential(*(Moved(i > 0) for i in range(6))).train()
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))  # others let the last rows become alike
    with Monitor(model, every=1) as monitor:
        for _ in range(3):
            model(x)
    assert list(monitor.table["module"]) == ["0"] * 3
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == 1
    assert said[0].startswith(
        "The monitor cannot see all attention: it has no rows for 1, 2, 3 and 2 more (softmax, its weights were"
    )


def test_evaluation_is_neither_counted_nor_watched():
    model = made(encoder)
    with Monitor(model, every=2) as monitor:
        for training in (True, False, False, True, True, False):
            model.train(training)(torch.zeros(1, 12, dtype=torch.int64))
    assert monitor.table["step"].unique().tolist() == [0, 2]
    assert monitor.step == 3


def test_an_exception_in_the_model_leaves_nothing_behind_and_the_next_call_is_watched():
    model = made(encoder).train()
    with Monitor(model, every=1) as monitor:
        with pytest.raises(IndexError):
            model(torch.full((1, 12), 99))
        model(torch.zeros(1, 12, dtype=torch.int64))
    assert monitor.table["step"].tolist() == [1, 1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_look_belongs_to_the_thread_that_began_it():
    """The second thread's forward begins, attends and ends while the first one's look is in progress."""
    model, tokens = made(encoder).train(), torch.zeros(1, 12, dtype=torch.int64)
    other = threading.Thread(target=lambda: model(tokens))

    def meanwhile(module, inputs):
        if threading.current_thread() is not other and other.ident is None:
            other.start()
            other.join()

    model.get_submodule("blocks.1").register_forward_pre_hook(meanwhile)
    with Monitor(model, every=1) as monitor:
        model(tokens)
        model(tokens)
    assert monitor.step == 3
    assert monitor.table[["step", "layer", "occurrence"]].values.tolist() == [
        [0, 0, 0],
        [0, 1, 0],
        [2, 0, 0],
        [2, 1, 0],
    ]


def test_a_thread_that_ended_in_the_middle_of_a_look_keeps_it_from_nobody():
    class Killed(BaseException):
        pass

    model, tokens = made(encoder).train(), torch.zeros(1, 12, dtype=torch.int64)

    def kill(module, inputs):
        raise Killed

    def interrupted():
        with contextlib.suppress(Killed):
            model(tokens)

    with Monitor(model, every=1) as monitor:
        hook = model.get_submodule("blocks.1").register_forward_pre_hook(kill)
        thread = threading.Thread(target=interrupted)
        thread.start()
        thread.join()
        hook.remove()
        model(tokens)
    assert monitor.table[["step", "layer"]].values.tolist() == [[1, 0], [1, 1]]


@pytest.mark.slow
def test_threads_that_train_one_model_mix_up_no_looks():
    model, tokens = made(encoder).train(), torch.zeros(1, 12, dtype=torch.int64)
    with Monitor(model, every=1) as monitor:
        threads = [threading.Thread(target=lambda: [model(tokens) for _ in range(20)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert monitor.step == 60
    assert not monitor.table.empty
    assert {tuple(layers) for _, layers in monitor.table.groupby("step")["layer"]} == {(0, 1)}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_monitor_may_be_stopped_when_a_forward_has_begun():
    """As by another thread; torch calls its hook all the same, without the keyword arguments."""
    model = made(encoder).train()
    monitor = Monitor(model, every=1)
    monitor.start()
    model.register_forward_pre_hook(lambda *_: monitor.stop(), prepend=True)
    with pytest.warns(UserWarning, match="saw no forward call"):
        model(torch.zeros(1, 12, dtype=torch.int64))
    assert monitor.table.empty


def test_an_error_before_the_first_forward_is_all_that_is_told(recwarn):
    model = made(encoder)
    with pytest.raises(ZeroDivisionError), Monitor(model):
        raise ZeroDivisionError
    assert not [str(warning.message) for warning in recwarn]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_stand_in_the_file_and_a_later_training_continues_it(tmp_path, suffix):
    path = tmp_path / f"attention.{suffix}"
    model = made(encoder)
    with Monitor(model, every=2, k=[3], path=path) as monitor:
        train(model, 3)
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    pd.testing.assert_frame_equal(read(path), monitor.table, check_dtype=False)
    with Monitor(model, every=2, k=[3], path=path, first_step=3) as later:
        train(model, 2)
    assert read(path)["step"].tolist() == later.table["step"].tolist() == [0, 0, 2, 2, 4, 4]
    assert files(tmp_path) == beside(path.name)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_is_one_monitors_alone_until_it_stops(tmp_path, suffix):
    path, model = tmp_path / f"attention.{suffix}", made(encoder)
    with Monitor(model, every=1, path=path) as first:
        train(model, 1)
        with pytest.raises(InputError, match=rf"attention\.{suffix} is in use: another process"):
            Monitor(model, path=path)
        with Monitor(model, every=1, path=tmp_path / f"other.{suffix}"):
            train(model, 1)
    with Monitor(model, every=1, path=path, first_step=2) as second:
        train(model, 1)
    with first:  # it goes on, in place of what another has written meanwhile
        train(model, 1)
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    assert read(path)["step"].tolist() == first.table["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert second.table["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert files(tmp_path) == beside(path.name, f"other.{suffix}")


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_place_that_cannot_be_written_is_refused_as_such(folder, suffix):
    if not os.path.ismount(folder):
        pytest.skip(f"{folder} is a folder like any other here")  # in a chroot
    with pytest.raises(InputError, match=rf"^{folder}/x\.{suffix} cannot be written: [A-Z][a-z ]+\.$"):
        Monitor(made(encoder), path=f"{folder}/x.{suffix}")


def test_a_place_where_no_file_can_be_locked_is_written_all_the_same(tmp_path, monkeypatch):
    def fail(*arguments):
        raise NotImplementedError

    monkeypatch.setattr(monitor_log, "RunLock", fail)
    for name in ("attention.csv", "attention.parquet"):
        model = made(encoder)
        with Monitor(model, every=1, path=tmp_path / name):
            assert not list(tmp_path.glob(f"*{name}*"))
            train(model, 1)
    assert files(tmp_path) == beside("attention.csv", "attention.parquet")


def test_a_file_that_has_the_steps_already_is_continued_with_a_warning(tmp_path):
    path, model = tmp_path / "attention.csv", made(encoder)
    with Monitor(model, every=1, path=path):
        train(model, 2)
    for first_step, warned in ((0, True), (1, True), (2, False)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Monitor(model, path=path, first_step=first_step).stop()
        assert bool(said) is warned
        for warning in said:
            assert f"goes up to step 1, but this monitor starts at step {first_step}" in str(warning.message)
            assert Path(warning.filename).name == "test_monitor.py"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_training_resumed_before_its_last_look_has_every_step_once(tmp_path, suffix):
    path, model = tmp_path / f"run.{suffix}", made(encoder)
    with Monitor(model, every=2, path=path) as first:
        train(model, 7)
    with pytest.warns(UserWarning, match=r"up to step 6, but this monitor starts at step 3: its rows from there"):
        resumed = Monitor(model, every=2, path=path, first_step=3)
    with resumed:
        train(model, 2)
    again = Monitor(model, every=1, path=path, first_step=5)
    with again:
        train(model, 1)
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    for name, monitored in ((path, again.table), (path.with_name(f"run-heads.{suffix}"), again.heads)):
        table = read(name)
        pd.testing.assert_frame_equal(
            table.drop(columns="alarm", errors="ignore"),
            monitored.drop(columns="alarm", errors="ignore"),
            check_dtype=False,
        )
        assert table["step"].unique().tolist() == [0, 2, 4, 5]
        assert not table.duplicated([*{"step", "layer", "head"} & {*table}]).any()
    pd.testing.assert_frame_equal(read(path)[:4], first.table[:4], check_dtype=False)
    assert read(path).loc[4, "dispersion"] != first.table.loc[4, "dispersion"]  # of the resumed training


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_training_that_goes_back_has_every_step_once_and_another_run_follows(tmp_path, suffix):
    path, model = tmp_path / f"run.{suffix}", made(encoder)
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    with Monitor(model, every=1, path=path) as monitor:
        train(model, 4)
        monitor.begin_step(2)
        train(model, 1)
    assert monitor.table["step"].tolist() == read(path)["step"].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.warns(UserWarning, match="its rows follow as another run's"):
        another = Monitor(model, every=1, path=path)
    with another:
        train(model, 2)
    with pytest.warns(UserWarning, match="will be replaced"):
        resumed = Monitor(model, every=1, path=path, first_step=1)
    for _ in range(2):
        with resumed:
            train(model, 1)
    steps = [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]  # the first run is complete
    assert resumed.table["step"].tolist() == read(path)["step"].tolist() == steps


def test_rows_to_be_replaced_are_left_out_as_soon_as_the_file_can_be_written(tmp_path, monkeypatch):
    path = tmp_path / "run.csv"
    log = monitor_log.MonitorLog(path, ["step", "layer"], 0)
    for step in range(4):
        log.add([{"step": step, "layer": 0}])
    with monkeypatch.context() as patched:
        patched.setattr(monitor_log, "_cut", lambda *arguments: open("/dev/null/no"))  # noqa: SIM115
        for step in (2, 1):
            with pytest.raises(OSError, match="directory"):
                log.add([{"step": step, "layer": 1}])
        assert log.table().to_numpy().tolist() == [[0, 0], [1, 1]]
        assert pd.read_csv(path)["step"].tolist() == [0, 1, 2, 3]
    log.close()
    assert pd.read_csv(path).to_numpy().tolist() == log.table().to_numpy().tolist() == [[0, 0], [1, 1]]


def test_a_file_whose_steps_are_no_numbers_is_continued_without_a_word(tmp_path):
    path, model = tmp_path / "attention.csv", made(encoder)
    with Monitor(model, every=1, path=path):
        train(model, 1)
    path.write_text(path.read_text(encoding="utf-8").replace("\n0,", "\nfirst,"), encoding="utf-8")
    Monitor(model, path=path).stop()


def test_csv_is_there_while_the_training_runs(tmp_path):
    path = tmp_path / "attention.csv"
    model = made(encoder)
    with Monitor(model, every=1, path=path):
        train(model, 1)
        with path.open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == 2


def written(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"semdiag" not in file.getvalue()  # it is read where there is none
    return file


# All that a saved model may name: classes of its own, and what a hook is saved as, which does nothing.
NAMED = (
    *(nn.TransformerEncoderLayer, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear),
    *(nn.Linear, nn.LayerNorm, nn.Dropout, nn.functional.relu),
    *(torch.utils.hooks.RemovableHandle, contextlib.nullcontext, getattr),
)


def whole_model(file):
    file.seek(0)
    with torch.serialization.safe_globals(list(NAMED)):
        return torch.load(file, weights_only=True)


def saved(model):
    return whole_model(written(model))


@pytest.mark.parametrize("watch", [lambda model: Monitor(model, every=1), capture])
@pytest.mark.parametrize("copied", [copy.deepcopy, torch.optim.swa_utils.AveragedModel, saved])
def test_a_copy_of_a_watched_model_is_not_watched(copied, watch):
    model = made(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)).train()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    with watch(model) as watched:
        model(x)
        twin = copied(model)
        assert torch.equal(twin(x), expected)
    rows = len(watched.table if isinstance(watched, Monitor) else watched.dispersion())
    assert rows == (1 if isinstance(watched, Monitor) else 2 * 2 * 3)  # of one forward
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(twin(x), expected)


def test_hooks_of_who_reads_a_saved_model_are_numbered_after_those_it_was_saved_with(monkeypatch):
    """Torch files by a hook's number whether it gets keyword arguments: by another's it would get them."""
    model, seen = nn.TransformerEncoderLayer(4, 1, 8), []
    with Monitor(model, every=1):
        model(torch.zeros(1, 1, 4))
        file, number = written(model), next(iter(model._forward_pre_hooks))
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", number)  # as in a process of few hooks
    twin = whole_model(file)
    twin.register_forward_pre_hook(lambda module, args: seen.append(args))
    twin(torch.zeros(1, 1, 4))
    assert len(seen) == 1


def test_scalars_go_to_a_writer():
    written = []

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            written.append((tag, scalar_value, global_step))

    model = made(lambda: encoder("topk"))
    with Monitor(model, every=2, tensorboard=Writer()) as monitor:
        train(model, 3)
    expected = {
        (f"attention/layer_{row['layer']}/head_{row['head']}/{name}", row[name], row["step"])
        for row in monitor.heads.to_dict("records")
        for name in monitored_columns(())
        if not math.isnan(row[name])
    }
    assert {each for each in written if "head_" in each[0]} == expected


def test_wrong_arguments_are_refused(tmp_path):
    model = made(encoder)
    for wrong, said in (
        ({"every": 0}, "every must be at least 1. Got 0."),
        ({"every": 2.5}, "every must be a whole number. Got 2.5."),
        ({"k": [4, 0]}, "k must be at least 1. Got 0."),
        ({"k": [2.5]}, "k must be a whole number. Got 2.5."),
        ({"k": "8"}, "k must be a whole number. Got '8'."),
        ({"queries": 2.5}, "queries must be a whole number. Got 2.5."),
        ({"first_step": -1}, "first_step must be at least 0. Got -1."),
        ({"seed": None}, "seed must be a whole number. Got None."),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
            Monitor(model, **wrong)
    with pytest.raises(InputError, match=r"^A monitor writes .csv or .parquet. Got rows.txt\.$"):
        Monitor(model, path="rows.txt")
    with pytest.raises(InputError, match="there is no folder"):
        Monitor(model, path=tmp_path / "not there" / "rows.csv")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be continued: its columns are a, b, not step, layer"):
        Monitor(model, path=other)
    assert other.read_text(encoding="utf-8") == "a,b\n1,2\n"


def test_one_k_need_not_stand_in_a_list_and_none_counts_twice():
    tables = []
    for k in (3, [3], [3, 3]):
        model = made(encoder).train()
        with Monitor(model, every=1, k=k) as monitor:
            model(torch.zeros(1, 12, dtype=torch.int64))
        tables.append(monitor.table)
    assert "weight_kept_k3" in tables[0]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0])


def test_rows_without_any_key_have_no_numbers():
    q, keys, nothing = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 2, 3).bool()
    rows = counted_rows(AttentionCall("", 0, q, keys, keys, 1.0, nothing, None, None, q))
    described = describe_layer(looked_at(rows), ())
    assert described.pop("rows") == 0
    assert set(described) == {"keys", "dispersion", "separation", "xi", "entropy"}
    assert all(math.isnan(number) for number in described.values())


def test_a_module_that_attends_itself_is_watched():
    model = nn.MultiheadAttention(8, 2)
    with Monitor(model, every=1) as monitor:
        model(*[torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))] * 3)
    assert monitor.table[["module", "rows"]].values.tolist() == [["", 3 * 2 * 4]]


class Simple(nn.Module):
    """Compiles into one graph."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(3, 16), nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.head((x + mixed.transpose(1, 2).reshape(x.shape)).mean(1))


@pytest.fixture
def compiled():
    """A model and what compiles it without a break."""
    torch._dynamo.reset()
    model = made(Simple).train()
    yield model, torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def loss(run):
    tokens = torch.randint(2, (6, 12), generator=torch.Generator().manual_seed(0))
    return F.cross_entropy(run(tokens), tokens.sum(1) % 2)


@pytest.mark.slow
def test_a_monitor_of_a_compiled_model_looks_and_leaves_one_graph(compiled):
    _, run = compiled
    expected = loss(run)
    with Monitor(run, every=2) as monitor:
        losses = [loss(run) for _ in range(3)]
    assert torch.equal(losses[1], expected)  # of a step that was not looked at: compiled
    torch.testing.assert_close(losses[::2], [expected] * 2, rtol=1e-6, atol=0)  # as written: rounds otherwise
    assert monitor.table["step"].tolist() == [0, 2]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch 2.7 compiles the monitor, which says that it failed")
def test_a_monitor_inside_a_compiled_model_says_so_before_the_first_step_and_breaks_no_graph(compiled):
    model, run = compiled
    expected = loss(run)
    torch._dynamo.reset()
    monitor = Monitor(model).start()
    with pytest.warns(UserWarning, match="A monitored module is being compiled. .* even with fullgraph: give"):
        found = loss(run)
    assert torch.equal(found, expected)
    with pytest.warns(UserWarning, match="The monitor saw no forward call in training mode"):
        monitor.stop()
    assert monitor.table.empty


def test_a_module_compiled_in_place_is_refused_before_the_training():
    model = made(Simple)
    model.compile(backend="aot_eager")
    with pytest.raises(InputError, match=r"compiled in place.*Monitor\(torch\.compile\(model\)\)\.$"):
        Monitor(model).start()


def test_a_torn_last_line_is_left_out_and_the_file_goes_on(tmp_path):
    path = tmp_path / "attention.csv"
    model = made(encoder)
    with Monitor(model, every=1, path=path) as monitor:
        train(model, 2)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) - 9, whole.index(b"\n") + 4, 5):
        path.write_bytes(whole[:kept])
        with (
            pytest.warns(UserWarning, match=r"The last line of .*attention\.csv was incomplete and is left out\."),
            Monitor(model, every=1, path=path, first_step=2) as later,
        ):
            train(model, 1)
        lines = max(0, whole[:kept].count(b"\n") - 1)
        read = pd.read_csv(path)
        assert read["step"].tolist() == later.table["step"].tolist() == [*[0, 0, 1, 1][:lines], 2, 2]
        pd.testing.assert_frame_equal(read[:lines], monitor.table[:lines], check_dtype=False)


FULL = """
import resource, sys, warnings, torch
from pathlib import Path
from semdiag import Monitor
from semdiag_models import Encoder, ModelConfig

model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=2)).train()
for path in sys.argv[1:]:
    said = []
    warnings.showwarning = lambda message, *others: said.append(str(message))
    warnings.simplefilter("always")
    with Monitor(model, every=1, path=path) as monitor:
        for step in range(4):
            # From the second step on no file may grow beyond 400 bytes; in the fourth it may again.
            most = {0: 10**6, 1: 400, 2: 400, 3: 10**6}[step]
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            model(torch.tensor([[0, 1, 1, 0]])).sum().backward()
            print(Path(path).read_bytes().count(b"\\n") if path.endswith("csv") else "", len(said))
    print(said[0] if said else "")
"""


@pytest.mark.slow
def test_a_training_goes_on_while_the_disk_is_full_and_the_rows_are_written_later(tmp_path):
    paths = [tmp_path / suffix / f"attention.{suffix}" for suffix in ("csv", "parquet")]
    for path in paths:
        path.parent.mkdir()
    done = subprocess.run([sys.executable, "-c", FULL, *paths], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines[:4]] == [["3", "0"], ["3", "1"], ["3", "1"], ["9", "1"]]
    assert [lines[at].startswith("The monitor cannot write (") for at in (4, 9)] == [True, True]
    assert len(lines) == 10
    for path, read in zip(paths, (pd.read_csv(paths[0]), pd.read_parquet(paths[1])), strict=True):
        assert read["step"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert files(path.parent) == beside(path.name)


@pytest.mark.parametrize("place", ["monitor_heads.sampled_rows", "watch_attention"])
def test_a_failure_of_the_monitor_is_a_warning_and_the_training_goes_on(monkeypatch, place):
    def fail(*arguments, **options):
        raise RuntimeError("broken")

    plain, watched = made(encoder), made(encoder)
    expected, _ = train(plain, 3)
    with Monitor(watched, every=1) as monitor:
        monkeypatch.setattr(f"{monitoring.__name__}.{place}", fail)
        with pytest.warns(UserWarning, match=r"semdiag failed on it \(RuntimeError: broken\): please report it"):
            found, _ = train(watched, 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert monitor.table.empty


def test_a_writer_that_fails_stops_neither_the_training_nor_the_file(tmp_path):
    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            raise OSError(28, "No space left on device")

    model, path = made(encoder), tmp_path / "attention.csv"
    with (
        pytest.warns(UserWarning, match=r"The monitor cannot write \(No space left on device\)"),
        Monitor(model, every=1, tensorboard=Writer(), path=path) as monitor,
    ):
        train(model, 2)
    assert len(pd.read_csv(path)) == len(monitor.table) == 4


@pytest.mark.parametrize(
    "content", [b'"st\nep","la\r\nyer"\n0,0\n', b"step,layer\n0,0\n1,2,3\n", b"", b'step,layer\n"0']
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content + b"\n")
    with pytest.raises(InputError, match=r"rows\.csv cannot be continued") as refused:
        monitor_log.MonitorLog(path, ["step", "layer"], 0)
    assert len(str(refused.value).splitlines()) == 1


def test_a_step_of_400_digits_cannot_be_continued(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"step,layer\n{'9' * 400},0\n", encoding="utf-8")
    if int(pd.__version__.partition(".")[0]) < 3:
        pytest.skip("pandas 2 reads it as text: a step that is no number")
    for _ in range(2):  # and the file is let go
        with pytest.raises(InputError, match=r"rows\.csv cannot be continued \("):
            monitor_log.MonitorLog(path, ["step", "layer"], 0)


def test_that_no_attention_is_captured_is_said_once():
    class Sometimes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.used = torch.nn.MultiheadAttention(4, 1, batch_first=True), False

        def forward(self, x):
            return self.attention(x, x, x)[0] if self.used else x

    model = Sometimes().train()
    with warnings.catch_warnings(record=True) as said, Monitor(model, every=1):
        warnings.simplefilter("always")
        for used in (False, False, True, False):
            model.used = used
            model(torch.ones(1, 3, 4))
    assert [str(one.message) for one in said] == ["No attention was captured in step 0."]


def test_where_warnings_are_errors_training_goes_on_and_the_warning_is_printed(capsys):
    model = encoder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Monitor(model, every=1, alarm={"entropy": (1e9, "below")}) as monitor:
            for _ in range(2):
                model(torch.zeros(2, 12, dtype=torch.long))
    assert len(monitor.table) == 4
    assert "semdiag: alarm band=WARNING step=0" in capsys.readouterr().err


def test_a_file_that_is_removed_during_training_is_said(tmp_path):
    model = encoder()
    with Monitor(model, every=1, path=tmp_path / "run.csv") as monitor:
        model(torch.zeros(2, 12, dtype=torch.long))
        (tmp_path / "run.csv").unlink()
        with pytest.warns(UserWarning, match=r"run\.csv was removed or shortened .*: it goes on with step 1\."):
            model(torch.zeros(2, 12, dtype=torch.long))
        model(torch.zeros(2, 12, dtype=torch.long))
    assert monitor.table["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert (tmp_path / "run.csv").read_text(encoding="utf-8").count("\n") == 5
