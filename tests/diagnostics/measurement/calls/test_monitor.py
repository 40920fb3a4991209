"""The training monitor in real little trainings: what it writes, and that it changes nothing."""

import csv
import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag import InputError, Monitor
from semdiag.capturing.attention_calls import watch_attention
from semdiag.mathematics.row_statistics import row_statistics
from semdiag.measurement.calls.monitor import describe, sampled_rows
from semdiag_models import Encoder, ModelConfig

INSIDE = pytest.mark.skipif(
    not hasattr(torch.overrides, "redispatch_function"), reason="torch's own layers are seen into from 2.13 on"
)


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
@pytest.mark.parametrize("build", [encoder, lambda: encoder("topk"), pytest.param(Foreign, marks=INSIDE), gpt2])
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
    numbers = monitor.table[["dispersion", "entropy", "xi", "dispersion_k3", "mass_k3"]]
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
            "mass_k2": whole.mass_kept(2),
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
        found, counted = sampled_rows(call, [2], generator)
        allowed = call.allowed_keys(0, 12)
        whole = row_statistics(call.q, call.k, call.scale, allowed, call.selected, top=2, bias=call.bias)
        assert found.keys.shape == (4, call.q.shape[1], 8)
        assert counted.all()
        entire = torch.stack([whole.entropy, whole.dispersion(), whole.dispersion(2)], -1).flatten(0, 2)
        sampled = torch.stack([found.entropy, found.dispersion(), found.dispersion(2)], -1).flatten(0, 2)
        nearest = (sampled[:, None] - entire).abs().amax(-1).amin(1)
        assert nearest.max() < 1e-5


def test_padded_queries_are_left_out():
    model = made(encoder).train()
    pad = model.config.pad_id
    tokens = torch.full((1, 12), pad)
    tokens[0, :3] = 0
    with Monitor(model, every=1) as monitor:
        model(tokens)
    assert (monitor.table["keys"] == 3).all()
    assert (monitor.table["rows"] <= 3 * model.config.heads).all()


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
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_csv_is_there_while_the_training_runs(tmp_path):
    path = tmp_path / "attention.csv"
    model = made(encoder)
    with Monitor(model, every=1, path=path):
        train(model, 1)
        with path.open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == 2


def test_scalars_go_to_a_writer():
    written = []

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            written.append((tag, scalar_value, global_step))

    model = made(lambda: encoder("topk"))
    with Monitor(model, every=2, tensorboard=Writer()) as monitor:
        train(model, 3)
    expected = {
        (f"{name}/layer {row['layer']}", row[name], row["step"])
        for row in monitor.table.to_dict("records")
        for name in ("keys", "dispersion", "separation", "xi", "entropy")
    }
    assert set(written) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_go_to_a_tensorboard_folder(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = made(encoder)
    with Monitor(model, every=2, tensorboard=tmp_path) as monitor:
        train(model, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [event.value for event in events.Scalars("dispersion/layer 1")]
    assert found == pytest.approx(monitor.table.query("layer == 1")["dispersion"].tolist())


def test_wrong_arguments_are_refused(tmp_path):
    model = made(encoder)
    with pytest.raises(InputError, match=r"^every must be at least 1 forward call. Got 0\.$"):
        Monitor(model, every=0)
    with pytest.raises(InputError, match=r"^k must be at least 1. Got 0\.$"):
        Monitor(model, k=[4, 0])
    with pytest.raises(InputError, match=r"^A monitor writes .csv or .parquet. Got rows.txt\.$"):
        Monitor(model, path="rows.txt")
    with pytest.raises(InputError, match="there is no folder"):
        Monitor(model, path=tmp_path / "not there" / "rows.csv")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be continued: its columns are a, b, not step, layer"):
        Monitor(model, path=other)
    assert other.read_text(encoding="utf-8") == "a,b\n1,2\n"


def test_rows_without_any_key_have_no_numbers():
    found = row_statistics(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 1), 1.0, torch.zeros(1, 1, 2, 3).bool())
    described = describe(found, torch.ones(1, 1, 2, dtype=torch.bool), ())
    assert described.pop("rows") == 0
    assert list(described) == ["keys", "dispersion", "separation", "xi", "entropy"]
    assert all(math.isnan(number) for number in described.values())
