"""Watches that overlap in threads and asynchronous tasks, and end in any order."""

import asyncio
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

import semdiag
from semdiag.capturing.patches import put_on, take_off

ROUNDS = 10


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def by_hand():
    return nn.Sequential(ByHand()), torch.ones(2, 3, 8)


def llama():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
        model = transformers.LlamaModel._from_config(config, attn_implementation="sdpa").eval()
    return model, torch.ones(2, 3, dtype=torch.int64)


def changed():
    """What a watch changes in the process and may not leave behind."""
    import torch._dynamo
    from torch.nn.modules import module

    modeling = pytest.importorskip("transformers.modeling_utils")
    return (
        modeling.AttentionInterface.get_interface,
        torch._dynamo.eval_frame._stance.stance,
        torch._C._len_torch_function_stack(),
        len(module._global_forward_hooks),
        len(module._global_forward_pre_hooks),
        list(warnings.filters),
    )


@pytest.fixture(autouse=True)
def nothing_stays():
    before = changed()
    yield
    assert changed() == before


@pytest.mark.parametrize("built", [by_hand, llama])
def test_the_first_to_begin_may_be_the_first_to_end(built):
    model, x = built()
    first, second = semdiag.capture(model), semdiag.capture(model)
    calls, later = first.__enter__(), second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert (len(calls), len(later)) == (1, 2)


@pytest.mark.parametrize("built", [by_hand, llama])
def test_each_asynchronous_task_sees_its_own_calls(built):
    model, x = built()

    async def task(number):
        with semdiag.capture(model) as calls:
            await asyncio.sleep(0.002 * number)
            model(x)
            await asyncio.sleep(0.002 * (4 - number))
            model(x)
        return calls

    async def together():
        return await asyncio.gather(*map(task, range(4)))

    for calls in asyncio.run(together()):
        assert len(calls) == 2
        assert (calls.dispersion()["occurrence"] == 0).all()


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("built", [by_hand, llama])
def test_each_thread_sees_its_own_calls(built):
    model, x = built()
    found = []

    def serve():
        with semdiag.capture(model) as calls:
            for _ in range(ROUNDS):
                model(x)
        found.append(calls)

    in_threads(serve, serve, serve)
    assert [len(calls) for calls in found] == [ROUNDS] * 3
    assert all((calls.dispersion()["occurrence"] == 0).all() for calls in found)


def test_two_threads_that_serve_one_model_do_not_jumble_occurrences_or_padding():
    model, x = llama()
    barrier = threading.Barrier(2)

    def serve(real):
        mask = torch.tensor([[1] * real + [0] * (3 - real)] * 2)
        for _ in range(ROUNDS):
            barrier.wait()
            model(x, attention_mask=mask)

    with semdiag.capture(model) as calls:
        in_threads(lambda: serve(1), lambda: serve(2))
    rows = calls.dispersion()
    assert len(calls) == 2 * ROUNDS
    assert (rows["occurrence"] == 0).all()
    per_call = rows.groupby("call").size()  # 2 samples, 2 heads, 1 or 2 real queries
    assert sorted(per_call) == [4] * ROUNDS + [8] * ROUNDS


def test_a_mode_is_taken_off_wherever_it_stands():
    modes = [BaseTorchFunctionMode() for _ in range(3)]
    for mode in modes:
        put_on(mode)
    assert not take_off(BaseTorchFunctionMode())
    assert take_off(modes[1])
    assert not take_off(modes[1])
    assert torch.overrides._pop_mode() is modes[2]
    assert take_off(modes[0])
