"""Functions that a forward pass gives to other threads: captured, not masked, and nothing is left behind."""

import _thread
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.provenance.softmaxes import IN_THREADS
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_files import InputError

WIDTH = 8


def attend(q, k, v):
    return torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v


def no_attention(q, k, v):
    return torch.tanh(q * k) + v


def by_thread(function, *given):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*given)))
    thread.start()
    thread.join()
    return found[0]


def by_subclass(function, *given):
    class Mixing(threading.Thread):
        def run(self):
            self.found = function(*given)

    thread = Mixing()
    thread.start()
    thread.join()
    return thread.found


def by_timer(function, *given):
    found = []
    thread = threading.Timer(0, lambda: found.append(function(*given)))
    thread.start()
    thread.join()
    return found[0]


def by_raw_thread(function, *given):
    found, done = [], threading.Event()

    def run():
        found.append(function(*given))
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(60)
    return found[0]


def by_new_pool(function, *given):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *given).result()


def by_new_thread_pool(function, *given):
    with ThreadPool(1) as pool:
        return pool.apply(function, given)


def by_asyncio(function, *given):
    async def run():
        return await asyncio.to_thread(function, *given)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


@pytest.fixture(scope="module")
def thread_pool():
    with ThreadPool(1) as pool:
        pool.apply(int)
        yield pool


@pytest.fixture(
    params=[
        *(by_thread, by_subclass, by_timer, by_raw_thread, by_new_pool, by_new_thread_pool, by_asyncio),
        *("submit", "map", "apply", "starmap", "imap", "imap_unordered"),
    ]
)
def give(request, executor, thread_pool):
    ways = {
        "submit": lambda f, *x: executor.submit(f, *x).result(),
        "map": lambda f, *x: next(executor.map(f, *([y] for y in x))),
        "apply": lambda f, *x: thread_pool.apply(f, x),
        "starmap": lambda f, *x: thread_pool.starmap(f, [x])[0],
        "imap": lambda f, *x: next(thread_pool.imap(lambda y: f(*y), [x])),
        "imap_unordered": lambda f, *x: next(thread_pool.imap_unordered(lambda y: f(*y), [x])),
    }
    return ways[request.param] if isinstance(request.param, str) else request.param


class Layer(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.qkv, self.run = nn.Linear(WIDTH, 3 * WIDTH), run

    def forward(self, x):
        return self.run(*self.qkv(x).chunk(3, -1))


def stacked(run):
    torch.manual_seed(0)
    return nn.Sequential(Layer(attend), Layer(run)), torch.randn(2, 5, WIDTH)


def audited(model, x):
    calls = []
    with torch.no_grad():
        before = model(x)
        with watch_attention(model, calls.append) as audit:
            assert torch.equal(model(x), before)
    return calls, [*audit.skipped]


def test_attention_in_another_thread_is_captured_and_not_masked(give):
    model, x = stacked(lambda *qkv: give(attend, *qkv))
    calls, skipped = audited(model, x)
    assert [call.module for call in calls] == ["0", "1"]
    assert not skipped
    weights = calls[1].scores(torch.float64).softmax(-1)  # sums of 8 products in float32 round by 1e-6 at most
    torch.testing.assert_close(weights @ calls[1].v.double(), calls[1].mixed.double(), rtol=1e-5, atol=1e-6)
    with (
        pytest.raises(
            InputError, match=r"would hit something else\. 1: softmax provenance .*in another thread"
        ) as e,
        sparsify(model, TopK(2)),
    ):
        model(x)
    assert str(e.value).count("1: ") == 1
    with torch.no_grad(), sparsify(model, TopK(2), partial=True) as masked:
        model(x)
    assert [seen.module for seen in masked.unmasked] == ["1"]
    assert masked.calls == 1


def test_what_is_no_attention_is_not_named_in_another_thread(give):
    model, x = stacked(lambda *qkv: give(no_attention, *qkv))
    calls, skipped = audited(model, x)
    assert [call.module for call in calls] == ["0"]
    assert not skipped
    with torch.no_grad(), sparsify(model, TopK(2)) as masked:
        model(x)
    assert masked.calls == 1


def test_nothing_is_left_in_a_pool_or_in_the_process(executor, thread_pool):
    originals = threading.Thread.start, _thread.start_new_thread, ThreadPoolExecutor.submit, ThreadPool.imap
    model, x = stacked(lambda *qkv: executor.submit(thread_pool.apply, attend, qkv).result())
    calls, skipped = audited(model, x)
    assert len(calls) == 2
    assert not skipped

    def modes():
        return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]

    assert executor.submit(modes).result() == thread_pool.apply(modes) == modes() == []
    now = threading.Thread.start, _thread.start_new_thread, ThreadPoolExecutor.submit, ThreadPool.imap
    assert now == originals
    assert "imap" not in vars(ThreadPool)


def test_work_that_is_given_outside_of_the_model_is_not_its_own(executor):
    model, x = stacked(attend)
    calls = []
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        executor.submit(attend, x, x, x).result()
        model(x)
    assert [call.module for call in calls] == ["0", "1"]
    assert not audit.skipped


def test_calls_of_one_module_in_many_threads_are_numbered():
    def many(q, k, v):
        with ThreadPoolExecutor(4) as pool:
            return torch.stack([*pool.map(attend, q, k, v)]) + attend(q, k, v)

    calls, skipped = audited(Layer(many), torch.randn(16, 5, WIDTH))
    assert sorted(call.occurrence for call in calls) == [*range(17)]
    assert not skipped


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_that_cross_threads_may_hide_attention(weighted):
    """A router's scores, products with parameters, do not."""
    table = nn.Parameter(torch.randn(5, WIDTH))

    def made_there(q, k, v):
        keys = table if weighted else k
        return by_thread(lambda: torch.softmax(q @ keys.mT, -1)) @ v

    def used_there(q, k, v):
        weights = torch.softmax(q @ (table if weighted else k).mT, -1)
        return by_thread(lambda: weights @ v)

    for run in (made_there, used_there):
        model = Layer(run)
        model.table = table
        _, skipped = audited(model, torch.randn(2, 5, WIDTH))
        assert skipped == ([] if weighted else [("", "softmax", IN_THREADS)])
