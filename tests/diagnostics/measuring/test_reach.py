"""What masks let a model see together: against gradients of real encoders, and tasks that this rules out."""

import pytest
import torch

from semdiag.measuring.reach import WITNESSES, cannot_represent, receptive_fields
from semdiag_models import Encoder, ModelConfig, find_task
from semdiag_models.tasks import TASKS

LOCAL_FOR_ALL = {"parity", "even-pairs", "stack-manipulation", "cycle-navigation", "modular-arithmetic",
                 "solve-equation"}  # fmt: skip


def configured(task, **given):
    task = find_task(task)
    return ModelConfig(task.vocabulary_size, task.classes, **{"length": 40, "k": 5, **given})


def depends(config):
    """(P, L): whether the gradient of a pooled output by a token's embedding is not zero, in float64."""
    torch.manual_seed(0)
    encoder = Encoder(config).double().eval()
    x = encoder.embed(torch.randint(2, (1, config.length))).detach().requires_grad_()
    out = x
    for block in encoder.blocks:
        out = block(out, None)
    pooled = out[0, :1] if config.pooling == "cls" else out[0]
    rows = [
        torch.autograd.grad(row.square().sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0 for row in pooled
    ]
    front = config.cls_tokens
    return torch.stack(rows)[:, front : front + config.length]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(
    "attention", [{"k": None}, {"attention": "banded"}, {"attention": "banded", "global_tokens": 1},
                  {"attention": "block"}, {"attention": "block", "global_tokens": 1},
                  {"attention": "random", "selection_seed": 3}],
    ids=str,
)  # fmt: skip
def test_fields_are_what_outputs_depend_on(attention, pooling, blocks):
    config = ModelConfig(3, 2, **{"length": 11, "k": 3, **attention}, blocks=blocks, pooling=pooling, width=8)
    assert torch.equal(receptive_fields(config), depends(config))


def test_an_input_dependent_mask_may_reach_anything():
    assert receptive_fields(configured("parity", attention="topk", k=1, blocks=1)).all()


@pytest.mark.parametrize(
    ("attention", "out_of_reach"),
    [("banded", LOCAL_FOR_ALL), ("block", LOCAL_FOR_ALL | {"missing-duplicate"})],
)
def test_local_masks_of_the_recipes_cannot_represent_most_tasks_and_a_global_token_removes_that(
    attention, out_of_reach
):
    found = {name for name in WITNESSES if cannot_represent(TASKS[name], configured(name, attention=attention))}
    assert found == out_of_reach
    with_global = [configured(name, attention=attention, global_tokens=1) for name in WITNESSES]
    assert not any(cannot_represent(TASKS[n], c) for n, c in zip(WITNESSES, with_global, strict=True))


def top(tokens):
    stack = []
    for token in tokens:
        if token != 2:
            stack.append(token % 3)
        elif stack:
            stack.pop()
    return stack[-1] if stack else 2


def unknown(text):
    left, right = text.split("=")
    (x,) = [x for x in range(5) if eval(left.replace("x", str(x))) % 5 == int(right)]
    return x


def written(name, tokens):
    return "".join(TASKS[name].symbols[token] for token in tokens)


RULES = {
    "parity": lambda tokens: sum(tokens) % 2,
    "even-pairs": lambda tokens: tokens[0] ^ tokens[-1],
    "missing-duplicate": lambda tokens: tokens[(tokens.index(2) + len(tokens) // 2) % (len(tokens) // 2 * 2)],
    "stack-manipulation": top,
    "cycle-navigation": lambda tokens: sum(token - 1 for token in tokens) % 5,
    "modular-arithmetic": lambda tokens: eval(written("modular-arithmetic", tokens)) % 5,
    "solve-equation": lambda tokens: unknown(written("solve-equation", tokens)),
}


@pytest.mark.parametrize("name", WITNESSES)
@pytest.mark.parametrize("length", [2, 5, 9, 12, 20, 21, 40])
def test_witnesses_are_inputs_of_the_task_and_balance_for_single_tokens(name, length):
    """Without attention to others a model is additive over tokens, and every witness must rule it out."""
    found = list(WITNESSES[name](TASKS[name], length))
    for inputs in found[:3]:
        assert all(len(tokens) == length for tokens, _, _ in inputs)
        assert all(0 <= other < TASKS[name].classes for _, _, other in inputs)
        assert [RULES[name](tokens) for tokens, _, _ in inputs] == [label for _, label, _ in inputs]
    if length >= 20:
        assert found
        assert cannot_represent(TASKS[name], configured(name, length=length, attention="block", k=1))


def test_logits_of_any_weights_satisfy_the_identity():
    """Even-pairs: what the four corners have in common cancels in the logits of a banded model, to rounding."""
    config = configured("even-pairs", attention="banded")
    torch.manual_seed(1)
    encoder = Encoder(config).double().eval()
    (inputs,) = WITNESSES["even-pairs"](TASKS["even-pairs"], 40)
    with torch.no_grad():
        logits = encoder(torch.tensor([tokens for tokens, _, _ in inputs]))
    interaction = logits[0] - logits[1] - logits[2] + logits[3]
    assert interaction.abs().max() < 1e-13 * logits.abs().max().clamp(min=1)


def test_padding_behind_the_inputs_is_not_part_of_them():
    config = configured("even-pairs", length=45, attention="block")
    assert cannot_represent(TASKS["even-pairs"], config, 40)
    assert not cannot_represent(TASKS["even-pairs"], config, 5)  # one block


def test_of_listops_nothing_is_claimed():
    assert not cannot_represent(TASKS["listops"], configured("listops", attention="block"))
