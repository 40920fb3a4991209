"""What a monitor logs, read back from the files of TensorBoard and of Weights & Biases."""

import json
import struct

import pytest
import torch

from semdiag import Monitor
from semdiag.measuring.calls.monitor_heads import scalars
from semdiag_models import Encoder, ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # of the loggers


def watched(**where):
    """By step the numbers that a monitor has sent; one head's scores become infinite in the last."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ModelConfig(3, 2, 12, attention="topk", k=3, blocks=2, heads=2, width=16, dropout=0.0)
        model = Encoder(config).train()
    with Monitor(model, every=2, k=[2], **where) as monitor:
        for step in range(5):
            if step == 4:
                with torch.no_grad():
                    next(model.blocks[1].parameters()).fill_(torch.inf)
            model(torch.randint(2, (6, 12), generator=torch.Generator().manual_seed(step)))
    heads = monitor.heads
    sent = {int(step): scalars(own.to_dict("records"), [2]) for step, own in heads.groupby("step")}
    assert sorted(sent) == [0, 2, 4]
    assert sent[4]["attention/layer_1/max_logit/max"] == torch.inf
    return sent


def read_tensorboard(folder):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = events.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    return found


def test_tensorboard_reads_every_number_of_every_step(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra test-loggers")
    from torch.utils.tensorboard import SummaryWriter

    sent = watched(tensorboard=tmp_path / "own")
    with SummaryWriter(str(tmp_path / "given")) as writer:
        watched(tensorboard=writer)
        writer.add_scalar("loss", 0.5, 4)  # it is still open
    given = read_tensorboard(tmp_path / "given")
    assert given[4].pop("loss") == 0.5
    for found in (read_tensorboard(tmp_path / "own"), given):
        assert sorted(found) == sorted(sent)
        for step, numbers in sent.items():
            assert found[step] == pytest.approx(numbers, rel=1e-7)  # it keeps float32


def read_wandb(file):
    """By step the numbers of a run: records of protobuf, in the format of LevelDB's logs."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, at, whole, found = file.read_bytes(), 7, b"", {}
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:  # no part crosses the end of a block
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only or the last part of a record
            record, whole = records.Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                found[record.history.step.num] = {
                    name: float(json.loads(value))
                    for name, value in items.items()
                    if name.startswith("attention/")
                }
    return found


@pytest.mark.slow
def test_weights_and_biases_offline_keeps_every_number_of_every_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra test-loggers")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    run = wandb.init(mode="offline", project="attention", dir=tmp_path, settings=settings)
    try:
        sent = watched(log=run.log)
    finally:
        run.finish()
        wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert read_wandb(file) == sent
