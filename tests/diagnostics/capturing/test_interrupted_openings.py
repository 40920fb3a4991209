"""An interrupt at any line while a context opens or closes leaves nothing behind."""

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import semdiag
from semdiag import Monitor, TopK, capture, sparsify
from semdiag.capturing.patches import SharedChange, modes_here, replaced
from semdiag.capturing.private_parts import _Kinds, _Names, works

HOME = str(Path(semdiag.__file__).parent)
PLACE = []  # of the last interrupt
INSIDE = [None]  # what traces from the inside of a context on


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


def interrupted(run, line, closing=False):
    """Run with an interrupt at the line with this number, counted in semdiag; return whether it was reached."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                PLACE[:] = [frame.f_code.co_filename[len(HOME) :], frame.f_lineno]
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    INSIDE[0] = trace
    sys.settrace(None if closing else trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


OPENED = {"capture": capture, "sparsify": lambda model: sparsify(model, TopK(2)), "monitor": Monitor}


def small(hooked):
    """A model, of which semdiag hooks only some modules, or also torch's own layer."""
    if hooked:
        return nn.TransformerEncoderLayer(8, 2, batch_first=True)
    return nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("hooked", [False, True], ids=["any model", "torch's layer"])
@pytest.mark.parametrize("closing", [False, True], ids=["opening", "closing"])
def test_an_interrupt_while_a_context_opens_or_closes_leaves_nothing_behind(opened, hooked, closing):
    """But before the first instruction of a monitor's end, which no code of ours can precede: stop() ends it."""
    model, made = small(hooked), []

    def run():
        made[:] = [OPENED[opened](model)]
        with made[0]:
            sys.settrace(INSIDE[0] if closing else None)

    INSIDE[0] = None
    run()
    before, line = state(model), 1
    while interrupted(run, line, closing):
        if closing and opened == "monitor" and line == 1:
            made[0].stop()
        made.clear()
        gc.collect(0)
        assert state(model) == before, (line, *PLACE)
        line += 1
    assert line > 50


class Owner:
    @staticmethod
    def one():
        return 1


def test_an_interrupt_while_a_shared_change_closes_leaves_nothing_behind():
    """The line at which it begins to close is counted, too: all of them lie within two layers of finally."""
    change = SharedChange(lambda: replaced(Owner, "one", lambda original: 2))

    def closed():
        with change.held():
            assert Owner.one() == 2
            sys.settrace(INSIDE[0])

    line = 1
    while interrupted(closed, line, closing=True):
        assert (Owner.one(), change._holders, change._made) == (1, set(), None), PLACE
        line += 1
    assert line > 10


class Mode(TorchFunctionMode):
    pass


def test_an_interrupted_probe_leaves_no_modes_and_keeps_those_of_the_caller():
    def probe():
        _Names().__enter__()
        _Kinds().__enter__()
        raise KeyboardInterrupt

    with Mode() as own:
        before = modes_here()
        with pytest.raises(KeyboardInterrupt):
            works(probe)
        assert modes_here() == before
        assert own in before


def test_a_capture_that_another_thread_closes_is_said_and_undone_when_the_next_one_opens():
    def held():
        with capture(model):
            yield

    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2))
    before, said = state(model), []
    holder = held()
    next(holder)

    def close():
        with pytest.warns(UserWarning, match="opened in MainThread was closed in other") as warned:
            holder.close()
        said.append(len(warned))

    thread = threading.Thread(target=close, name="other")
    thread.start()
    thread.join()
    assert said == [1]
    with capture(model) as calls:
        x = torch.ones(1, 2, 4)
        model[1](x, x, x)
    assert len(calls) == 1
    assert state(model) == before
