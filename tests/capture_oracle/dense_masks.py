"""Attention under a rule's mask as it is defined: dense, and with keys that are chosen row by row.

It shares nothing with ``sparsify``: it replaces torch's softmax and fused attention themselves.
"""

import contextlib
import math
from unittest import mock

import torch
import torch.nn.functional as F

from semdiag import RandomK, TopP


class DenseMask:
    """A softmax over the keys that a rule keeps, in place of torch's.

    Attributes:
        rule: the rule; each softmax is a layer of its own, in the order in which they run.
        heads: number of heads.
        key_heads: number of heads of keys.
        sinks: number of logits at the end of a row that are no keys.
    """

    def __init__(self, rule, heads, key_heads, sinks=0):
        self.rule, self.heads, self.key_heads, self.sinks = rule, heads, key_heads, sinks
        self.place, self.first, self.kept = 0, 0, torch.empty(0)

    @contextlib.contextmanager
    def installed(self):
        """All of torch's softmaxes and fused attention are this one in the context."""
        with (
            mock.patch.multiple(F, softmax=self.softmax, scaled_dot_product_attention=self.fused),
            mock.patch("torch.softmax", self.softmax),
            mock.patch("torch.Tensor.softmax", lambda *args, **more: self.softmax(*args, **more)),
            mock.patch("torch.backends.mha.get_fastpath_enabled", return_value=False),
        ):
            yield

    def softmax(self, scores, dim=-1, dtype=None, _stacklevel=3):
        """Return the weights, in the dtype of the scores."""
        if scores.ndim < 3:  # a router's
            return scores.log_softmax(dim).exp()
        if scores.ndim == 3:
            return self.softmax(scores.unflatten(0, (-1, self.heads))).flatten(0, 1)
        keys = scores.shape[-1] - self.sinks
        z, allowed = scores[..., :keys].detach(), scores[..., :keys] > -1e4
        self.kept = self.choice(z, allowed, scores[..., keys:].detach())
        self.place += 1
        dropped = F.pad(allowed & ~self.kept, (0, self.sinks))
        return scores.masked_fill(dropped, -torch.inf).log_softmax(-1).exp().nan_to_num()

    def fused(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """Return attention as it is defined."""
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.softmax(scores) @ v

    def choice(self, z, allowed, sink):
        """Return the kept keys (B, H, Lq, Lk) of scores z."""
        rule, (batch, heads, queries, length) = self.rule, z.shape
        if self.place - self.first < getattr(rule, "every", 1) and self.kept.shape == z.shape:
            return self.kept & allowed
        self.first = self.place
        ranked, kept = z, torch.zeros_like(allowed)
        if isinstance(rule, RandomK):
            draws = torch.Generator().manual_seed(rule.seed * 100_003 + 1009 * self.place)
            ranked = torch.rand(heads, queries, length, generator=draws, dtype=torch.float64).expand_as(z)
        if getattr(rule, "shared", "head") != "head":  # by the mean weight of the heads
            share = heads if rule.shared == "layer" else heads // self.key_heads
            weights = torch.cat([z.masked_fill(~allowed, -torch.inf), sink], -1).log_softmax(-1).exp()
            ranked = weights[..., :length].unflatten(1, (-1, share)).mean(2).log().repeat_interleave(share, 1)
        both_sides = bool((allowed & torch.ones(queries, length).triu(1).bool()).any())
        for b in range(batch):
            real = [j for j in range(length) if allowed[b, :, :, j].any()]
            for h, i in ((h, i) for h in range(heads) for i in range(queries)):
                keys = [j for j in range(length) if allowed[b, h, i, j]]
                sinks = real[: getattr(rule, "sinks", 0)]
                fixed = [j for j in keys if near(rule, i, j, both_sides) or j in sinks]
                free = [j for j in keys if j not in fixed]
                kept[b, h, i, fixed + chosen(rule, ranked[b, h, i].tolist(), free, h, real[0]) or keys] = True
        return kept


def near(rule, query, key, both_sides):
    """Whether a key is in the window."""
    width = getattr(rule, "window", 0)
    before = width // 2 if both_sides and getattr(rule, "centred", False) else width - 1
    after = width - 1 - before if before < width - 1 else width - 1
    return width > 0 and -after <= query - key <= before


def chosen(rule, scores, free, head, first):
    """The free keys that are kept for their scores; of equal ones, the first."""
    if isinstance(rule, TopP):
        order = sorted(free, key=lambda j: (-scores[j], j))
        weights = [math.exp(scores[j] - scores[order[0]]) for j in order]
        return [j for n, j in enumerate(order) if sum(weights[:n]) < rule.p * sum(weights)]
    size, k = getattr(rule, "block", 1), rule.k[head] if isinstance(rule.k, list) else rule.k
    if size == 1:
        return sorted(free, key=lambda j: (-scores[j], j))[:k]
    blocks = {}
    for j in free:
        blocks.setdefault((j - first) // size, []).append(j)
    summary = {"weight": lambda z: sum(map(math.exp, z)), "best": max, "mean": lambda z: sum(z) / len(z)}[rule.by]
    best = {n: summary([scores[j] for j in keys]) for n, keys in blocks.items()}
    return [j for n in sorted(blocks, key=lambda n: (-best[n], n))[:k] for j in blocks[n]]
