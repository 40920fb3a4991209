"""A monitor inside the Trainer of transformers."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="the Trainer needs the extra hf")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from semdiag.integrations import MonitorCallback

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(tmp_path, callbacks, accumulation):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(20, (36, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=3, report_to=[], use_cpu=True,
        gradient_accumulation_steps=accumulation, eval_strategy="epoch", save_strategy="no", disable_tqdm=True,
        seed=1,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks
    )
    trainer.train()
    return trainer


def test_optimiser_steps_are_counted_and_the_training_is_the_same(tmp_path):
    callback = MonitorCallback(every=2, path=tmp_path / "attention.csv", rows="all")
    watched = trained(tmp_path, [callback], accumulation=5)  # twelve batches an epoch: the third step has two
    steps = watched.state.global_step
    monitor = callback.monitor
    assert monitor.heads["step"].unique().tolist() == list(range(0, steps, 2))
    assert (tmp_path / "attention-heads.csv").exists()
    assert set(monitor.heads["rows"]) == {3 * 12}  # of a batch of training; those of evaluation have eight samples
    plain = trained(tmp_path, [], accumulation=5)
    for a, b in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(module._forward_hooks for module in watched.model.modules())


def test_an_alarm_may_stop_the_trainer(tmp_path):
    callback = MonitorCallback(every=1, alarm={"max_logit": -1e9}, on_alarm="raise")
    with pytest.raises(RuntimeError, match="alarm band=WARNING step=0"):
        trained(tmp_path, [callback], accumulation=1)


def test_a_training_after_one_that_failed_has_the_file_again(tmp_path):
    told = []

    def fail_once(alarm):
        told.append(alarm.step)
        if len(told) == 1:
            raise RuntimeError("enough")

    path = tmp_path / "attention.csv"
    callback = MonitorCallback(every=1, path=path, alarm={"max_logit": -1e9}, on_alarm=fail_once)
    with pytest.raises(RuntimeError, match="enough"):
        trained(tmp_path, [callback], accumulation=1)
    trained(tmp_path, [callback], accumulation=1)
    assert len(told) > 1
