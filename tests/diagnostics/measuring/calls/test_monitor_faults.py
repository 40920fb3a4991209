"""A monitor never stops a training: exceptions planted in whatever it runs become warnings."""

import os
import random
import sys
import threading
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils import _python_dispatch as dispatch

from semdiag import Monitor, capture
from semdiag.capturing import patches, private_parts

# What begins a guard, or is one: an exception raised as it is entered has no guard around it.
GUARDS = {
    "Hooks.__init__.<locals>.unless_removed", "Monitor._before", "Monitor._after", "Monitor._report_alarms",
    "Faults.reporting", "_Hooks.before", "_Hooks.after", "FunctionWatch.__torch_function__", "Once.__init__",
    "OperationWatch.__torch_dispatch__", "Recorder.forgives", "undone", "Monitor.stop", "Monitor._leave",
    "Monitor._reduce", "Monitor._catch_up", "Monitor._undo", "Recorder.guarded",
}  # fmt: skip
DRAWN = None if os.environ.get("SEMDIAG_EVERY_CASE") else 12


class ByHand(nn.Module):
    """Attention by hand and fused, which all ways of watching see."""

    def __init__(self):
        super().__init__()
        self.q, self.out, self.fails = nn.Linear(4, 12), nn.Linear(4, 2), False

    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        mixed = (q @ k.mT / 2).softmax(-1) @ v
        if self.fails:
            raise torch.OutOfMemoryError("of the training")
        return self.out(mixed + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]).mean(1)


class PlantedError(Exception):
    pass


def trained(plant=None, steps=2):
    """The losses of a monitored training, with an exception at the nth call of a function; and all calls."""
    calls = Counter()

    def look(frame, event, argument):
        code = frame.f_code
        if event == "call" and ("/semdiag/" in code.co_filename or "/semdiag_files/" in code.co_filename):
            place = code.co_filename, code.co_firstlineno, code.co_qualname
            calls[place] += 1
            if plant == (place, calls[place]):
                raise PlantedError

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = ByHand().train(), torch.randn(5, 6, 4)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    monitor = Monitor(model, every=1, k=2, log=lambda numbers, step: None, alarm={"entropy": 0.01}).start()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threading.settrace(look)
        sys.settrace(look)
        try:
            for _ in range(steps):
                loss = F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1, 1]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            monitor.stop()
        finally:
            sys.settrace(None)
            threading.settrace(None)
            monitor.stop()
            left = left_behind(model)
    return losses, calls, len(said), left


def left_behind(model):
    """Hooks and modes that stand on the model or in torch, which are taken off."""
    tables = [(owner, name) for owner in (model, of_all_modules) for name in vars(owner) if "_hook" in name]
    left = [name for owner, name in tables if isinstance(getattr(owner, name), dict) and getattr(owner, name)]
    for owner, name in tables:
        if name in left:
            getattr(owner, name).clear()
    modes = patches.modes_here()
    for mode in modes:
        patches.take_off(mode)
    return left + modes


@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # plants as a generator closes
def test_exceptions_in_anything_that_a_monitor_runs_stop_no_training():
    losses, calls, _, left = trained()
    assert not left
    plants = [(place, n) for place, count in calls.items() if place[2] not in GUARDS for n in {1, count}]
    assert len(plants) > 300
    for plant in plants if DRAWN is None else random.Random(0).sample(plants, DRAWN):
        found, _, said, left = trained(plant)
        assert (found, left) == (losses, []), plant
        assert said <= 6, plant


@pytest.mark.parametrize("watch", ["monitor", "capture"])
def test_an_exception_of_the_training_reaches_it_as_it_is(watch):
    model, x = ByHand().train(), torch.randn(5, 6, 4)
    with Monitor(model, every=1) if watch == "monitor" else capture(model):
        model(x)
        model.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="of the training"):
            model(x)
        model.fails = False
        model(x)
    assert not left_behind(model)


def test_a_writer_that_fails_on_closing_is_a_warning(tmp_path, monkeypatch):
    board = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)

    def fail(writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board.SummaryWriter, "close", fail)
    model = ByHand().train()
    with (
        pytest.warns(UserWarning, match="No space left on device"),
        Monitor(model, tensorboard=tmp_path / "board"),
    ):
        model(torch.randn(5, 6, 4))


MISSING = [
    (torch._C, "_current_graph_task_id"), (torch._C, "_dispatch_has_kernel"), (torch._C, "_ForceDispatchKeyGuard"),
    (torch._C, "DisableTorchFunction"), (torch._C._functorch, "is_functorch_wrapped_tensor"),
    (dispatch, "_disable_current_modes"), (dispatch, "_get_current_dispatch_mode_stack"),
    (patches, "_get_current_function_mode_stack"), (of_all_modules, "_global_forward_hooks_always_called"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", MISSING, ids=lambda part: part[1])
def test_a_private_part_that_torch_has_no_longer_is_remarked_on(part, monkeypatch):
    model, x = ByHand(), torch.randn(5, 6, 4)
    with torch.no_grad():
        expected = model(x)
    private_parts._failed.cache_clear()
    monkeypatch.delattr(*part)
    try:
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            if part[1].startswith("_global"):  # a model itself needs it
                assert private_parts.broken_parts(model)
                monkeypatch.undo()
                assert not left_behind(model)
                return
            with capture(model) as calls:
                outputs = [model(x)]
            with Monitor(model.train(), every=1):
                outputs += [model(x)]
        assert all(torch.equal(output, expected) for output in outputs)
        assert calls.audit["reason"].str.contains("behaves otherwise").any()
        assert any("behaves otherwise" in str(warning.message) for warning in said)
    finally:
        monkeypatch.undo()
        private_parts._failed.cache_clear()
    assert not left_behind(model)
