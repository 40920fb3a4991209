"""What really happened below Python: every softmax and every fused attention, whoever wrote the model.

A dispatch mode of its own, which shares nothing with the capture. Each softmax's input is kept with its result; a
product uses a softmax if one of its factors holds the softmax's numbers, in whatever order.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.provenance.softmaxes import NO_SOFTMAX

_SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "_log_softmax")
_EXPONENTIALS = ("exp", "exp_", "expm1", "expm1_", "exp2", "exp2_", "pow", "pow_")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv")


@dataclass(eq=False)
class TrueSoftmax:
    """One softmax.

    Attributes:
        scores: its input, (…, keys): the axis it runs over comes last.
        used: whether its numbers, in any order of axes, were a factor of a later product with another tensor.
        mixed: of the first such product, the result.
    """

    scores: Tensor
    weights: Tensor
    used: bool = False
    mixed: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class TrueFused:
    """One fused attention: q, k, v (…, L, D), the mask that is added, whether it is causal, the scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    @property
    def scores(self):
        z = self.scale * self.q.double() @ self.k.double().mT
        if self.mask is not None:
            mask = self.mask
            z = z + (mask.double() if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf).double())
        if self.causal:
            z = z.masked_fill(~torch.ones(z.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return z


class RecordedSoftmaxes(TorchDispatchMode):
    """Records every softmax and fused attention in the order in which they run, and logarithms of exponentials."""

    def __init__(self):
        super().__init__()
        self.seen: list[TrueSoftmax | TrueFused] = []
        self.exponentials: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        before = None
        with _disable_current_modes():
            if name in _SOFTMAX:
                before = args[0].detach().clone()
            if name in _EXPONENTIALS:
                self._exponential(name.rstrip("_"), args)
            if name in _PRODUCTS:
                self._product(name, args)
            fused = name.startswith("_scaled_dot_product_")
            qkv = [x.detach().clone() for x in args[:3]] if fused else []
        result = func(*args, **kwargs)
        with _disable_current_modes():
            if before is not None:
                weights = result.detach().clone()
                weights = weights.exp() if "log" in name else weights
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                self.seen.append(TrueSoftmax(before.movedim(dim, -1), weights))
            elif fused:
                scale = kwargs.get("scale")
                mask = kwargs.get("attn_mask")
                given = qkv[0].shape[-1] ** -0.5 if scale is None else scale
                causal = bool(args[4] if len(args) > 4 else kwargs.get("is_causal", False))
                self.seen.append(TrueFused(*qkv, None if mask is None else mask.clone(), causal, given))
        return result

    def _exponential(self, name, args):
        base, exponent = (2.0, args[0]) if name == "exp2" else args[:2] if name == "pow" else (math.e, args[0])
        if isinstance(exponent, Tensor) and torch.as_tensor(base).numel() == 1 and float(base) > 0:
            unit = 1.0 if base == math.e else math.log(float(base))
            self.exponentials.append(exponent.detach().clone() if unit == 1 else exponent.detach().double() * unit)

    def _product(self, name, args):
        factors = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        for factor in factors:
            if not isinstance(factor, Tensor) or not factor.is_floating_point():
                continue
            for softmax in self.seen:
                if isinstance(softmax, TrueSoftmax) and not softmax.used and _holds(factor, softmax.weights):
                    softmax.used = True

    @property
    def attentions(self):
        """The softmaxes that met a product, and all fused ones."""
        return [s for s in self.seen if isinstance(s, TrueFused) or s.used]


def _holds(factor, weights):
    """Whether a tensor holds the numbers of weights, in any order of axes; dropped ones may be 0."""
    if factor.numel() != weights.numel() or factor.numel() == 0:
        return False
    a, b = (x.double().flatten().sort().values for x in (factor, weights))
    return bool(torch.allclose(a, b, rtol=1e-2, atol=1e-12))


def described(scores, allowed=None):
    """Softmax rows as numbers: probabilities (rows, keys), how many keys are allowed, the range of their scores.

    Rows without keys are left out. Without ``allowed``, scores that are -inf, -1e36 or less where others are
    above, or below the best of the row by 8,999 and more with nothing between them and half of that, are
    forbidden.
    """
    z = scores.double().reshape(-1, scores.shape[-1])
    if allowed is None:
        lowest = max(-1e36, torch.finfo(scores.dtype).min / 2)
        z = z.masked_fill((z <= lowest) & (z.amax(-1, keepdim=True) > lowest), -torch.inf)
        below = (z - z.amax(-1, keepdim=True)).nan_to_num(nan=0.0, neginf=0.0)
        steep = below <= -8_999
        gap = below.masked_fill(~steep, -torch.inf).amax(-1, keepdim=True) / 2
        z = z.masked_fill(steep & (below.masked_fill(steep, 0.0).amin(-1, keepdim=True) > gap), -torch.inf)
    else:
        z = z.masked_fill(~allowed.expand(scores.shape).reshape(z.shape), -torch.inf)
    z = z[z.isfinite().any(-1) & (z < torch.inf).all(-1)]  # not finite: the model's own fault
    lowest = z.masked_fill(z == -torch.inf, torch.inf).amin(-1)
    return torch.cat([z.softmax(-1), z.isfinite().sum(-1, True), (z.amax(-1) - lowest)[:, None]], -1)


def agrees(call, truth, tolerance=1e-5):
    """Whether a captured call has the rows of a true attention, in whatever order.

    Args:
        call: an attention call; its sinks are one more key, the first or the last, in each head.
        truth: of a softmax or a fused attention.
        tolerance: on probabilities; relative to 1 + its size on the range of the scores.
    """
    call = call.averaged()
    scores, allowed = call.scores(torch.float64), call.part().allowed
    allowed = torch.ones(scores.shape, dtype=torch.bool) if allowed is None else allowed.expand(scores.shape)
    if call.sinks is None:
        return _alike(scores, allowed, truth, tolerance)
    sink = call.sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    there = torch.ones_like(sink, dtype=torch.bool)
    return any(
        _alike(torch.cat(z, -1), torch.cat(a, -1), truth, tolerance)
        for z, a in (((scores, sink), (allowed, there)), ((sink, scores), (there, allowed)))
    )


def _alike(scores, allowed, truth, tolerance):
    ours, theirs = described(scores, allowed), described(truth.scores)
    if ours.shape != theirs.shape:
        return False
    if bool(((ours - theirs).abs() <= tolerance * (1 + theirs.abs())).all()):
        return True
    mark = torch.rand(ours.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mark[-1] = 1e-3
    ours, theirs = (x[(x @ mark).argsort()] for x in (ours, theirs))
    return not ours.numel() or bool(((ours - theirs).abs() <= tolerance * (1 + theirs.abs())).all())


@dataclass(frozen=True)
class Found:
    """What became of a model's softmaxes and fused attentions, by number."""

    seen: int
    captured: int
    wrong: int
    audited: int
    others: int
    met_values: int  # of those that no call matches
    same: bool


def found_in(model, run):
    """Hold what is captured of a model against what happens without the watch.

    Args:
        model: in evaluation mode.
        run: calls it; returns a tensor.
    """
    wrong, calls = [], 0

    def hold(call):
        nonlocal calls
        calls += 1
        mine = [t for t in left if agrees(call, t)]
        if mine:
            left[:] = [t for t in left if t is not mine[0]]
        else:
            wrong.append(call.module)

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        with RecordedSoftmaxes() as truth:
            before = run(model)
        written_out = [SimpleNamespace(scores=z, used=False) for z in truth.exponentials if z.ndim > 1]
        left = [*truth.seen, *written_out]
        torch.manual_seed(0)
        with watch_attention(model, hold) as audit:
            during = run(model)
    extra = {id(t) for t in written_out}
    still = [t for t in left if id(t) not in extra]
    return Found(
        seen=calls + len(still),
        captured=calls,
        wrong=len(wrong),
        audited=sum(times for seen, times in audit.skipped.items() if seen.reason != NO_SOFTMAX),
        others=audit.others.total(),
        met_values=sum(isinstance(t, TrueFused) or t.used for t in still),
        same=torch.equal(before, during),
    )
