"""What a watch captured of a model's attention, and what it saw and did not capture, with the reason."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from semdiag.capturing.attention_call import AttentionCall

_STEEP = -1000.0  # biases below this get a remark
_FAINT = math.log(1e-9)  # so do biases that lower a key's weight by this factor
NUMBERS_DIFFER = (
    "its number of calls in a forward pass depends on the input (windows, chunks): rows of several inputs are "
    "pooled by the order of the calls, although the same occurrence may be another part of each input"
)
PREFIXED = (
    "keys precede the first token that was seen: if they are virtual tokens (a prefix) and not earlier text, they "
    "count as keys, and the first key and sinks are theirs"
)
PADDED_WINDOWS = (
    "its batch axis holds several rows per sample, and tokens at the end of the last row are all alike: if these "
    "are windows padded to a common size, the padding counts as queries and keys"
)


class Captured(NamedTuple):
    """A module whose attention was captured, and how."""

    module: str  # dotted name in the model
    mechanism: str  # adapter that saw it


class Skipped(NamedTuple):
    """An operation that looks like attention and was not captured."""

    module: str  # dotted name of the innermost module that was running
    operation: str  # its name in PyTorch
    reason: str  # reason for not capturing it


# Severities of remarks.
NOTE = "note"
WARNING = "warning"
# Codes of remarks that concern the user's request or invalidate an answer; commands print them, too.
WARNINGS = frozenset((
    "input-length", "k-left-out", "labels-unread", "logits-as-outputs", "loss-of-logits", "nan-logits",
    "no-overlap", "no-secants", "no-secants-there", "no-mask-stability-there", "outputs-compared",
    "padding-compared", "private-part", "queries-drawn", "random-forward", "texts-cut", "weights-differ",
    "weights-not-loaded",
))  # fmt: skip


class Remark(NamedTuple):
    """A note on captured attention that readers of its statistics should know."""

    module: str  # dotted name in the model
    text: str  # note in words
    code: str = "attention"  # kind of remark, by which programs recognise it

    @property
    def severity(self) -> str:
        """``warning`` if it invalidates an answer or concerns the user's request; else ``note``."""
        return WARNING if self.code in WARNINGS else NOTE

    def to_dict(self) -> dict[str, str]:
        """Return the remark as plain values."""
        return {**self._asdict(), "severity": self.severity}


@dataclass(frozen=True)
class Audit:
    """Everything that a watch saw; it fills while the model runs."""

    modules: list[str] = field(default_factory=list)  # names of the modules with attention
    captured: Counter[Captured] = field(default_factory=Counter)  # number of calls by module and mechanism
    skipped: Counter[Skipped] = field(default_factory=Counter)  # number of occurrences of each skipped operation
    remarks: Counter[Remark] = field(default_factory=Counter)  # number of occurrences of each remark
    others: Counter[str] = field(default_factory=Counter)  # number of softmaxes that never met values, by module

    def layer(self, module: str) -> int:
        """Return the position of a module among the attention modules; append a new one."""
        if module not in self.modules:
            self.modules.append(module)
        return self.modules.index(module)


def failure(error: Exception) -> str:
    """Return one line about a failure of semdiag."""
    message = " ".join(str(error).split())[:120]
    return f"semdiag failed on it ({type(error).__name__}{message and ': '}{message}): please report it"


def remarks(call: AttentionCall, shapes: list[tuple[int, ...]], first: bool, training: bool) -> Iterator[Remark]:
    """Yield what readers should know of a call, perhaps its module's first; ``shapes``: of the running inputs."""
    if first and call.first_query + call.keys_before:
        yield Remark("", PREFIXED)
    samples = next((shape[0] for shape in shapes if shape), len(call.q))
    if samples < len(call.q) and _ends_alike(call):
        yield Remark("", PADDED_WINDOWS)
    if call.dropout:
        text = "what the layer returns is not what its formula gives, so there is no residual"
        if training:
            yield Remark(call.module, f"dropout of {call.dropout:g} in training mode: {text}; model.eval() first")
        else:
            yield Remark(call.module, f"dropout of {call.dropout:g} in evaluation mode: {text}")
    yield from (Remark(call.module, text) for text in _of_numbers(call, shapes[-1] if shapes else ()))


def _of_numbers(call: AttentionCall, shape: tuple[int, ...]) -> Iterator[str]:
    _, heads, length, width = call.q.shape
    square = call.k.shape[2] == length != width
    if len(shape) == 3 and (width, heads * length) == shape[1:] and square:
        yield f"its queries and keys are channels, not positions: the product runs over the {width} positions"
    if call.forbidding is not None:
        yield f"a mask of {call.forbidding:.3g} instead of -inf: the keys that it is given to count as forbidden"
    if call.bias is None:
        return
    alike = call.bias == call.bias[..., :1]  # constant over a query's keys: changes no softmax
    bias = call.bias.masked_fill(alike.all(-1, keepdim=True), 0)
    if bool((bias <= _STEEP).any()):
        yield f"a term of down to {float(bias.min()):.3g} counts as a bias on the scores, not as a mask"
        return
    below = bias - bias.amax(-1, keepdim=True)
    faint = below <= _FAINT  # terms near their row's best and terms far below, and none in between
    masks = bool(faint.any()) and not bool((~faint & (below < _FAINT / 2)).any())
    if masks and bool(call.q.any()):  # if all queries are 0, the scores are in the bias
        yield (
            f"a term of down to {float(bias.min()):.3g} counts as a bias on the scores: if it is meant as a "
            "mask, the keys that it is given to count as attended all the same"
        )


def _ends_alike(call: AttentionCall) -> bool:
    """Return whether the last row's last token has the query and key of another token there, up to rounding."""
    length = call.q.shape[2]
    alike = torch.ones((), dtype=torch.bool, device=call.q.device)
    if call.k.shape[2] != length or call.q.shape[3] == 1:
        return False
    for rows in (call.q[-1], call.k[-1]):
        limit = 16 * torch.finfo(rows.dtype).eps * rows.abs().amax()
        alike = alike & ((rows - rows[:, -1:]).abs() <= limit).all(-1).all(0)
    return 2 <= int(alike.sum()) < length


def bare_blocks(model: nn.Module, ran: set[str], attentions: set[str]) -> Iterator[tuple[str, str]]:
    """Yield lists of blocks in which some ran without attention, each with a remark."""
    outer: list[str] = []  # prefixes of the names of modules inside lists
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or name.startswith((*outer,)):
            continue
        running, bare = _running_and_bare(name, module, ran, attentions)
        if isinstance(module, nn.ModuleList) or running > 1:
            outer.append(f"{name}." if name else "")
        if 0 < bare < running:
            yield name, f"{bare} of {running} blocks ran without softmax attention"


def _running_and_bare(name: str, module: nn.Module, ran: set[str], attentions: set[str]) -> tuple[int, int]:
    """Return how many blocks of a list ran, of a sequence only those like one with attention; and without it."""
    blocks = {f"{name}.{key}".lstrip("."): type(block) for key, block in module.named_children()}
    attending = {block for block in blocks if _holds_any(block, attentions)}
    of_one_list = isinstance(module, nn.ModuleList)
    kinds = {kind for block, kind in blocks.items() if of_one_list or block in attending}
    running = [block for block, kind in blocks.items() if kind in kinds and block in ran]
    return len(running), len([block for block in running if block not in attending])


def _holds_any(name: str, modules: set[str]) -> bool:
    """Return whether a module is one of these modules, or has one inside."""
    return any(f"{module}.".startswith(f"{name}.") for module in modules)
