"""Attention over blocks of keys that are merged by their log-sum-exp: it is said of them, and of nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import flex_attention

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.provenance.softmaxes import MERGED, UNMASKED_SUM
from semdiag.capturing.sparsify import TopK, sparsify
from semdiag_models import InputError

pytestmark = pytest.mark.usefixtures("own_random_numbers")
WIDTH, HEADS, LENGTH, BLOCKS = 16, 4, 12, 3
FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without")


def by_logsumexp(q, k, v):
    z = q @ k.mT / 2
    sums = z.logsumexp(-1, keepdim=True)
    return torch.exp(z - sums) @ v, sums


def by_softmax(q, k, v):
    z = q @ k.mT / 2
    return z.softmax(-1) @ v, z.logsumexp(-1, keepdim=True)


def by_exp(q, k, v):
    e = (q @ k.mT / 2).exp()
    sums = e.sum(-1, keepdim=True)
    return (e / sums) @ v, sums.log()


def less_the_largest(q, k, v):
    z = q @ k.mT / 2
    top = z.amax(-1, keepdim=True)
    e = (z - top).exp()
    sums = e.sum(-1, keepdim=True)
    return e.div(sums) @ v, top + sums.log()


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v), (q @ k.mT / 2).logsumexp(-1, keepdim=True)


def below(q, k, v):
    o, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return o, sums[..., None]


def flexible(q, k, v):
    if not hasattr(flex, "AuxRequest"):  # before torch 2.9
        o, sums = flex_attention(q, k.contiguous(), v.contiguous(), return_lse=True)
        return o, sums[..., None]
    o, found = flex_attention(q, k.contiguous(), v.contiguous(), return_aux=flex.AuxRequest(lse=True))
    return o, found.lse[..., None]


def one_by_one(found):
    out, total = found[0]
    for o, sums in found[1:]:
        out = out - torch.sigmoid(sums - total) * (out - o)
        total = total - F.logsigmoid(total - sums)
    return out


def in_place(found):
    total = torch.logsumexp(torch.cat([sums for _, sums in found], -1), -1, keepdim=True)
    out = torch.zeros_like(found[0][0])
    for o, sums in found:
        out.addcmul_(o, (sums - total).exp())
    return out


def by_lerp(found):
    out, total = found[0]
    for o, sums in found[1:]:
        total = torch.logaddexp(total, sums)
        out = torch.lerp(out, o, (sums - total).exp())
    return out


def stacked(found):
    o, sums = torch.stack([o for o, _ in found]), torch.stack([sums for _, sums in found])
    return (o * (sums - sums.logsumexp(0)).exp()).sum(0)


def by_einsum(found):
    o, sums = torch.stack([o.transpose(1, 2) for o, _ in found]), torch.stack([sums for _, sums in found])
    w = (sums - sums.logsumexp(0))[..., 0].exp()
    return torch.einsum("nbhl,nblhd->bhld", w, o)


def added_up(found):
    weights = [sums.exp() for _, sums in found]
    return sum(w * o for w, (o, _) in zip(weights, found, strict=True)) / sum(weights)


ATTENTIONS = {
    **{f.__name__: f for f in (by_logsumexp, by_softmax, by_exp, less_the_largest, fused, below)},
    "flexible": flexible,
}
MERGERS = {f.__name__: f for f in (one_by_one, in_place, by_lerp, stacked, by_einsum, added_up)}


class Blocks(nn.Module):
    def __init__(self, attend, merge, blocks=BLOCKS):
        super().__init__()
        self.qkv, self.attend, self.merge, self.blocks = nn.Linear(WIDTH, 3 * WIDTH), attend, merge, blocks

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        chunks = zip(k.chunk(self.blocks, 2), v.chunk(self.blocks, 2), strict=True)
        return self.merge([self.attend(q, *kv) for kv in chunks]).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, attend, merge, blocks=1):
        super().__init__()
        self.attention, self.out = Blocks(attend, merge, blocks), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.rms_norm(x + self.out(self.attention(x)), (WIDTH,)) * 2


def watched(model, context=torch.no_grad):
    calls, x = [], torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    with context():
        before = model(x)
        with watch_attention(model, calls.append) as audit:
            during = model(x)
    assert torch.equal(before, during)
    remarks = {(r.module, r.text) for r in audit.remarks}
    return during, calls, remarks, {s.reason for s in audit.skipped}


@FLEX
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("merge", MERGERS)
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_each_block_is_captured_and_it_is_said_that_it_is_one(attend, merge, context):
    if attend == "flexible" and context is torch.inference_mode and torch.__version__ < (2, 8):
        pytest.skip("flex_attention of torch 2.7 fails in inference mode once it has seen several lengths")
    model = Block(ATTENTIONS[attend], MERGERS[merge], BLOCKS)
    output, calls, remarks, skipped = watched(model, context)
    assert [call.k.shape[2] for call in calls] == [LENGTH // BLOCKS] * BLOCKS
    assert remarks == {("attention", MERGED)}
    # The weights of all blocks at once are a softmax of their own, and one over no keys: that is in the audit.
    assert len(skipped) == (merge in ("stacked", "by_einsum"))
    whole = model.attention
    whole.attend, whole.merge, whole.blocks = by_softmax, lambda found: found[0][0], 1
    torch.testing.assert_close(output, watched(model)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", ["by_logsumexp", "by_exp"])
def test_a_gradient_changes_nothing(attend):
    _, calls, remarks, skipped = watched(Block(ATTENTIONS[attend], one_by_one, BLOCKS), torch.enable_grad)
    assert (len(calls), remarks, skipped) == (BLOCKS, {("attention", MERGED)}, set())


def logged(found):
    (o, sums), *others = found
    statistic = sums.square().mean() + (o.norm() * 0)
    return sum([o, *(x for x, _ in others)]) + 0 * statistic.detach().isnan()


USUAL = {
    "the output alone": lambda found: found[0][0],
    "blocks with a softmax each, added": lambda found: sum(o for o, _ in found),
    "sums that are a statistic": logged,
    "outputs that gate each other": lambda found: found[0][0] * found[-1][0].sigmoid(),
    "the norm of a head": lambda found: F.rms_norm(found[0][0], (WIDTH // HEADS,)),
}


@FLEX
@pytest.mark.parametrize("blocks", [1, BLOCKS])
@pytest.mark.parametrize("usual", USUAL)
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_nothing_is_said_of_usual_attention(attend, usual, blocks):
    model = nn.Sequential(*(Block(ATTENTIONS[attend], USUAL[usual], blocks) for _ in range(2)))
    _, calls, remarks, skipped = watched(model)
    assert (len(calls), remarks, skipped) == (2 * blocks, set(), set())


def test_sums_that_are_not_divided_are_in_the_audit():
    """Blocks whose outputs are added before they are divided by anything are no attention of their own."""

    def undivided(q, k, v):
        e = (q @ k.mT / 2).exp()
        return e @ v, e.sum(-1, keepdim=True)

    def divided(found):
        return sum(o for o, _ in found) / sum(sums for _, sums in found)

    model, calls = Blocks(undivided, divided), []
    with torch.no_grad(), watch_attention(model, calls.append) as audit:
        model(torch.randn(2, LENGTH, WIDTH))
    assert not calls
    assert sum(audit.skipped.values()) == BLOCKS


def scored(model, x):
    q, k, v = model.qkv(x).chunk(3, -1)
    return q @ k.mT / 2, v


SECOND_READERS = {
    "a sink": lambda m, z, v: (z.softmax(-1) @ v) * (z.logsumexp(-1, keepdim=True) - 0.7).sigmoid(),
    "its complement": lambda m, z, v: (z.softmax(-1) @ v) * (1 - (0.7 - z.logsumexp(-1, keepdim=True)).sigmoid()),
    "read first": lambda m, z, v: (z.logsumexp(-1, keepdim=True) - 0.7).sigmoid() * (z.softmax(-1) @ v),
    "behind a projection": lambda m, z, v: m.out(z.softmax(-1) @ v) * z.logsumexp(-1, keepdim=True).sigmoid(),
    "exp and sum": lambda m, z, v: (z.softmax(-1) @ v) * (1 - 1 / (1 + z.exp().sum(-1, keepdim=True))),
    "of two": lambda m, z, v: (
        (z.softmax(-1) @ v) * F.pad(z.logsumexp(-1, keepdim=True), (0, 1)).softmax(-1)[..., :1]
    ),
    "joined": lambda m, z, v: torch.cat([z.softmax(-1) @ v, z.logsumexp(-1, keepdim=True)], -1),
}


class Read(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.qkv, self.out, self.read = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), read

    def forward(self, x):
        return self.read(self, *scored(self, x))


@pytest.mark.parametrize("name", SECOND_READERS)
def test_a_mask_that_reaches_one_of_two_readers_of_the_scores_is_refused(name):
    model, x = Read(SECOND_READERS[name]), torch.randn(2, LENGTH, WIDTH)
    with pytest.raises(InputError, match="which the mask does not reach"), sparsify(model, TopK(2)):
        model(x)
    with sparsify(model, TopK(2), partial=True) as masked:
        model(x)
    assert (masked.calls, {seen.reason for seen in masked.unmasked}) == (1, {UNMASKED_SUM})


@pytest.mark.parametrize("merge", ["one_by_one", "in_place", "by_lerp", "added_up"])
def test_a_mask_of_merged_blocks_is_refused(merge):
    model = Block(by_softmax, MERGERS[merge], BLOCKS)
    with pytest.raises(InputError, match="which the mask does not reach"), sparsify(model, TopK(2)):
        model(torch.randn(2, LENGTH, WIDTH))


def test_a_sum_that_is_only_a_statistic_takes_a_mask():
    seen = []

    def read(model, z, v):
        seen.append(z.logsumexp(-1).square().mean().detach())
        return z.softmax(-1) @ v

    with sparsify(model := Read(read), TopK(2)) as masked:
        model(torch.randn(2, LENGTH, WIDTH))
    assert (masked.calls, masked.unmasked, len(seen)) == (1, [], 1)
