"""An interrupt at any line of an opening leaves nothing behind."""

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import semdiag
from semdiag import Monitor, TopK, capture, sparsify

HOME = str(Path(semdiag.__file__).parent)
PLACE = []  # of the last interrupt


def state(model):
    """Everything that a watch may change, by what it is and not by what it equals."""
    tables = [*vars(of_all_modules).items(), *(pair for m in model.modules() for pair in vars(m).items())]
    hooks = [(name, list(table)) for name, table in tables if "hooks" in name and isinstance(table, dict)]
    modes = [len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())]
    flags = [
        torch._C._len_torch_dispatch_stack(),
        torch.compile,
        threading.Thread.start,
        vars(threading.Thread)["start"],
    ]
    return hooks, modes, flags, sorted(vars(torch.autograd.function._SingleLevelFunction))


def interrupted(run, line, places=("",)):
    """Run with an interrupt at the line with this number, counted in semdiag; return whether it was reached."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(tuple(HOME + place for place in places)):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                PLACE[:] = [frame.f_code.co_filename[len(HOME) :], frame.f_lineno]
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def opened_capture(model):
    with capture(model):
        sys.settrace(None)


def opened_sparsify(model):
    with sparsify(model, TopK(2)):
        sys.settrace(None)


def opened_monitor(model):
    with Monitor(model):
        sys.settrace(None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("opened", "places"),
    [
        (opened_capture, ("",)),
        (opened_sparsify, ("",)),
        (
            opened_monitor,
            ("/measuring/calls/",),
        ),  # it also opens a watch to try, and closes it
    ],
)
@pytest.mark.parametrize("hooked", [False, True], ids=["any model", "torch's layer"])
def test_an_interrupt_while_a_context_opens_leaves_nothing_behind(opened, places, hooked):
    model = (
        nn.TransformerEncoderLayer(8, 2, batch_first=True)
        if hooked
        else nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2))
    )
    opened(model)
    before, line, left = state(model), 1, []
    while interrupted(lambda: opened(model), line, places):
        gc.collect(0)
        if state(model) != before:
            left.append((line, *PLACE))
            break
        line += 1
    assert not left
    assert line > 50
