"""What models select themselves, beside their routers and indexers worked out by hand in float64."""

import pytest
import torch
from indexers_by_hand import INDEXED, LATENT, LENGTH, half_split, index_scores, inputs_of, interleaved, margin
from torch import nn

from semdiag import InputError
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.rounding import FORMATS
from semdiag.questions.selections.answer import own_sentences, own_summary
from semdiag.selections.capture import Tokens, kind_of, watch_selections
from semdiag.selections.own import own_selections

ROUTERS = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen2Moe": {"num_experts": 8, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 8, "head_dim": 8},
    "DeepseekV3": {**LATENT, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    "GptOss": {"num_local_experts": 8, "head_dim": 8, "sliding_window": 16},
}
UNIT = 2.0**-24


def selected(model, *batches, format="bfloat16"):
    """Its own selections."""
    loaded = LoadedModel("tiny", "", model, "hugging face", "unknown")
    return own_selections(loaded, batches, FORMATS[format], torch.device("cpu"), torch.float32).selections


def by_hand(router, hidden, k, config):
    """The scores that a router chooses by at each stage, groups first, and the chosen experts, in float64.

    Returns:
        Pairs of scores (tokens, n) and k; the chosen; and how far the float32 scores may be off. A sum of n
        products is off by at most (n + 1)u Σ|x||w|; a sigmoid is no steeper than 1, and it, the bias and the sum
        of two scores add a few roundings of numbers below 4.
    """
    x, weight = hidden.double().reshape(-1, hidden.shape[-1]), router.weight.detach().double()
    logits = x @ weight.T + (router.bias.detach().double() if hasattr(router, "bias") else 0)
    off = float((x.shape[1] + 2) * UNIT * (x.abs() @ weight.abs().T + 1).amax())
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is None:
        return [(logits, k)], margin(logits, k)[1], off
    scores = logits.sigmoid() + correction.double()
    in_groups = scores.view(len(scores), config.n_group, -1)
    of_groups = in_groups.sort(-1).values[..., -2:].sum(-1)
    masked = torch.full_like(in_groups, -torch.inf)
    for row, own in enumerate(margin(of_groups, config.topk_group)[1].tolist()):
        masked[row, own] = in_groups[row, own]
    masked = masked.flatten(1)
    return [(of_groups, config.topk_group), (masked, k)], margin(masked, k)[1], 2 * (off + 8 * UNIT)


def certificate(scores, k):
    """Margin, and by how much it is above what rounding to float8_e4m3fn can do to the two scores."""
    ordered = scores.sort(-1, descending=True).values
    last, after = ordered[:, k - 1], ordered[:, k]
    return last - after, last - after - 2.0**-4 * (last.abs() + after.abs()) - 2.0**-9


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_are_those_worked_out_by_hand(tiny, batch, family):
    model = tiny(family, **ROUTERS[family])
    names = [name for name, _ in model.named_modules() if name.endswith((".gate", ".router"))]
    given = inputs_of(model, names)
    found = selected(model, batch, format="float8_e4m3fn")
    # The first versions of transformers choose experts of DeepSeek-V3 in the module around the router.
    routers = [name if name in names else f"{name}.gate" for name in (entry.module for entry in found)]
    assert routers == names
    assert [entry.layer for entry in found] == [0, 1]
    real = batch["attention_mask"].bool().flatten()
    for name, entry in zip(names, found, strict=True):
        router, (part,) = model.get_submodule(name), entry.parts
        stages, chosen, off = by_hand(router, given[name][0][0], 3, model.config)
        found_by_hand = [certificate(scores[real], k) for scores, k in stages]
        truth = torch.stack([margin for margin, _ in found_by_hand]).amin(0)
        above, chosen = torch.stack([above for _, above in found_by_hand]).amin(0), chosen[real]
        experts = router.weight.shape[0]
        assert (part.kind, part.choices, part.k, part.padded) == ("experts", experts, 3, 13)
        assert part.groups == ((4, 2) if family == "DeepseekV3" else None)
        assert float((part.margin - truth).abs().max()) <= 2 * off
        load, close = torch.bincount(chosen.flatten(), minlength=experts), int((truth <= 2 * off).sum())
        assert int((part.load - load).abs().sum()) <= 6 * close <= 18, "hardly a choice hangs on float32"
        assert dict(part.counts) == {"exact": len(truth)}
        sure = above.abs() > 3 * off
        assert torch.equal(part.certified[sure], (above > 0)[sure])
        assert 0 < int(part.certified.sum()) < len(truth)


def test_the_smaller_margin_of_groups_and_experts_counts(tiny, batch):
    model = tiny("DeepseekV3", **ROUTERS["DeepseekV3"])
    given = inputs_of(model, ["model.layers.0.mlp.gate"])
    part = selected(model, batch)[0].parts[0]
    router = model.get_submodule("model.layers.0.mlp.gate")
    logits = given["model.layers.0.mlp.gate"][0][0].double().flatten(0, 1) @ router.weight.detach().double().T
    scores = (logits.sigmoid() + router.e_score_correction_bias.double())[batch["attention_mask"].bool().flatten()]
    of_groups = margin(scores.view(-1, 4, 4).sort(-1).values[..., -2:].sum(-1), 2)[0]
    by_groups = int(((part.margin - of_groups).abs() < 1e-5).sum())  # a hundred times what float32 is off
    assert 0 < by_groups < len(scores), "each stage decides some rows"
    assert bool((part.margin <= of_groups + 1e-5).all())


@pytest.mark.parametrize(("family", "rotate"), [("DeepseekV32", half_split), ("GlmMoeDsa", interleaved)])
def test_indexers_are_those_worked_out_by_hand(tiny, batch, family, rotate):
    model = tiny(family, **INDEXED)
    names = ["model.layers.0.self_attn.indexer", "model.layers.1.self_attn.indexer"]
    given = inputs_of(model, names)
    found = {entry.module: entry.parts[0] for entry in selected(model, batch)}
    assert list(found) == [*names, "model.layers.1.mlp.gate"]
    valid = batch["attention_mask"].bool()
    allowed = (valid[:, None] & torch.ones(LENGTH, LENGTH).tril().bool())[valid]
    first = allowed.int().argmax(1)
    must_choose = allowed.sum(1) > 6
    for name in names:
        args, _ = given[name]
        scores = index_scores(model.get_submodule(name), args[0], args[1], *args[2], rotate)[valid]
        truth, chosen = margin(scores.masked_fill(~allowed, -torch.inf), 6)
        part = found[name]
        assert (part.kind, part.choices, part.k, part.padded, part.causal) == ("keys", LENGTH, 6, 13, True)
        assert torch.equal(part.margin < torch.inf, must_choose)
        off = 1e-6 * float(scores.abs().max())  # sums of 32, 16, 16 and 2 products: below 16 roundings of 2^-24
        assert float((part.margin - truth)[must_choose].abs().max()) <= off
        sure = must_choose & (truth > off)
        kept = int((chosen == first[:, None]).any(1)[sure].sum())
        assert kept <= part.first_kept <= kept + int((must_choose & ~sure).sum())
        assert 0 < part.first_kept < int(must_choose.sum())
        assert set(part.counts) <= {"exact", "legal_tie"}
        assert part.load is None


def test_an_indexer_that_keeps_every_key_is_inactive(tiny, batch):
    model = tiny("GlmMoeDsa", **{**INDEXED, "index_topk": LENGTH})
    part = selected(model, batch)[0].parts[0]
    assert (part.kind, part.k, part.choices) == ("keys", LENGTH, LENGTH)
    assert bool((part.margin == torch.inf).all())


def test_batches_are_put_together_and_nothing_stays_on_the_model(tiny, batch):
    model = tiny("Mixtral", **ROUTERS["Mixtral"])
    with torch.no_grad():
        before = model(**batch).logits
    whole = selected(model, batch)[0].parts[0]
    halves = [{name: each[rows] for name, each in batch.items()} for rows in (slice(0, 3), slice(3, 6))]
    parts = selected(model, *halves)[0].parts
    assert torch.allclose(torch.cat([part.margin for part in parts]), whole.margin, rtol=0, atol=1e-5)
    assert torch.equal(sum(part.load for part in parts), whole.load)
    given = []
    with torch.no_grad(), watch_selections(model, lambda *seen: given.append(seen)):
        during = model(**batch).logits
    assert torch.equal(before, during)
    assert len(given) == 2
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


class Selecting(nn.Module):
    """A part that scores tokens (B, L) against choices and selects by a function."""

    def __init__(self, choose, scores):
        super().__init__()
        self.choose, self.scores = choose, scores

    def forward(self, x):
        return self.choose(self.scores(x))


class Whole(nn.Module):
    """A model with one selecting part."""

    def __init__(self, choose, scores=None, name="router"):
        super().__init__()
        table = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.add_module(name, Selecting(choose, scores or (lambda x: table[x])))

    def forward(self, x):
        for part in self.children():
            part(x)
        return x


IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize(
    ("choose", "k", "sign"),
    [
        (lambda s: s.topk(2), 2, 1),
        (lambda s: s.topk(2, largest=False), 2, -1),
        (lambda s: (s.topk(2), None)[1], 2, 1),
        (lambda s: s.argmax(-1), 1, 1),
        (lambda s: s.argmax(-1, keepdim=True), 1, 1),
        (lambda s: s.sort(-1, descending=True)[1][..., :3], 3, 1),
        (lambda s: s.argsort(descending=True, stable=True)[..., :3], 3, 1),
        (lambda s: s.argsort()[..., :3], 3, -1),
        (lambda s: s.argsort()[..., -3:], 3, 1),
        (lambda s: s.argsort()[..., 5:8], 3, 1),
        (lambda s: s.argsort(descending=True)[..., 5:], 3, -1),
        (lambda s: s.softmax(-1).topk(2), 2, 1),
        (lambda s: s.sigmoid().topk(2), 2, 1),
        (lambda s: s.flatten(0, 1).topk(2), 2, 1),
    ],
)
def test_every_way_to_select_is_seen(choose, k, sign):
    model = Whole(choose)
    (entry,) = selected(model, IDS)
    scores = sign * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))[IDS.flatten()]
    truth, chosen = margin(scores.double(), k)
    assert (entry.module, entry.layer, entry.parts[0].k) == ("router", None, k)
    assert entry.parts[0].margin.tolist() == truth.tolist()
    assert entry.parts[0].load.tolist() == torch.bincount(chosen.flatten(), minlength=8).tolist()


@pytest.mark.parametrize(
    "choose",
    [
        lambda s: s.topk(2, dim=1),  # of tokens, along another axis
        lambda s: s.argmax(),
        lambda s: (s > 0).int().argmax(-1),
        lambda s: s.sort(-1, descending=True)[1],
        lambda s: s.argsort()[..., 2:5],
        lambda s: s.view(3, 4, 8).topk(2),
        lambda s: s.amax(-1),
    ],
)
def test_what_selects_nothing_for_tokens_is_refused(choose):
    with pytest.raises(InputError, match=r"tiny selects nothing for its tokens.* k-sweep tiny --rerun"):
        selected(Whole(choose), IDS)


def in_groups(mask, taken=1):
    """A function that chooses one of four groups of two by its largest score, and in it by scores with a mask."""

    def choose(scores):
        best = scores.unflatten(-1, (4, 2)).amax(-1).topk(1).indices
        left = torch.zeros(2, 6, 4, dtype=torch.bool).scatter(-1, best, True).repeat_interleave(2, -1)
        below = scores.masked_fill(~left, torch.inf).amin(-1, keepdim=True) - 2**-10
        return scores.where(left, below if mask == "below" else mask or scores).topk(taken)

    return choose


@pytest.mark.parametrize("mask", [-torch.inf, "below"])
def test_groups_are_a_stage_whatever_masks_the_others(mask):
    (entry,) = selected(Whole(in_groups(mask, 2)), IDS)
    scores = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))[IDS.flatten()]
    truth = margin(scores.double().view(12, 4, 2).amax(-1), 1)[0]
    assert entry.parts[0].groups == (4, 1)
    assert entry.parts[0].margin.tolist() == truth.tolist(), "both experts of a group are chosen"


def test_two_selections_that_agree_are_no_stages():
    groups, experts = selected(Whole(in_groups(None)), IDS)  # of groups the best, of experts the best of all
    assert (groups.parts[0].choices, experts.parts[0].choices) == (4, 8)
    assert experts.parts[0].groups is None
    filled = selected(Whole(in_groups(-torch.inf, 3)), IDS)  # a third expert, from another group
    assert [entry.parts[0].groups for entry in filled] == [None, None]


def test_what_the_model_writes_into_its_scores_later_changes_nothing():
    (entry,) = selected(Whole(lambda s: (s.topk(2), s.zero_())), IDS)
    assert float(entry.parts[0].margin.min()) > 0


def test_a_softmax_along_another_axis_has_no_logits_of_the_choice():
    (entry,) = selected(Whole(lambda s: s.softmax(1).topk(2)), IDS)
    scores = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))[IDS].softmax(1).flatten(0, 1)
    assert not entry.parts[0].logits
    assert entry.parts[0].margin.tolist() == margin(scores.double(), 2)[0].tolist()


def test_other_numbers_of_choices_are_other_selections():
    table = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    found = selected(Whole(lambda s: s.topk(2), lambda x: table[x][..., : x.shape[1] - 1]), IDS, IDS[:, :4])
    assert [entry.parts[0].choices for entry in found] == [5, 3]


def test_a_mistake_of_ours_is_not_blamed_on_the_model(monkeypatch):
    def mistake(*arguments):
        raise RuntimeError("a mistake")

    monkeypatch.setattr("semdiag.selections.own.own_rows", mistake)
    with pytest.raises(RuntimeError, match="a mistake"):
        selected(Whole(lambda s: s.topk(2)), IDS)


def test_places_in_a_table_of_other_indices_are_no_experts():
    def two_levels(scores):
        outer = scores.topk(4)
        inner = outer.values.abs().topk(2)
        return outer.indices.gather(-1, inner.indices)

    outer, inner = selected(Whole(two_levels), IDS)
    assert outer.parts[0].load is not None
    assert inner.parts[0].load is None


def causal(choose):
    """A model whose indexer is causal, as it says."""
    model = Whole(choose, lambda x: torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1)), "indexer")
    model.indexer.is_causal = True
    return model


def masked(scores, mask):
    """Scores with a mask at later keys."""
    return scores.masked_fill(~torch.ones(6, 6).tril().bool(), mask)


def test_future_keys_are_counted_where_others_were_left():
    bad = selected(causal(lambda s: s.topk(2)), IDS)[0].parts[0]
    scores = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
    chosen, at = scores.topk(2).indices, torch.arange(6)[None, :, None]
    future = (chosen > at).any(-1)
    future[:, 0] &= ~(chosen[:, 0] == 0).any(-1)  # the first query has one key: the rest are fillers
    future[:, 1] &= (chosen[:, 1] > 1).any(-1)
    assert bad.counts["future"] == int(future.sum()) > 0
    for mask in (torch.finfo(torch.float32).min, -torch.inf, -65504.0):  # the last one is float16's
        good = selected(causal(lambda s, mask=mask: masked(s, mask).topk(2)), IDS)[0].parts[0]
        assert dict(good.counts) == {"exact": 12}
        assert int((good.margin < torch.inf).sum()) == 8, "two queries of each sample have no more than two keys"


class Masked(Whole):
    """A model that is given a mask."""

    def forward(self, x, attention_mask):
        return super().forward(x)


@pytest.mark.parametrize(("length", "left", "unknown"), [(6, 9, False), (8, 12, True)])
def test_padding_that_does_not_fit_the_rows_is_told(length, left, unknown):
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, :3] = 0
    model = Masked(lambda s: (s.topk(2), s.view(3, 4, 8).topk(2)))
    loaded = LoadedModel("tiny", "", model, "factory", "unknown")
    batch = {"x": IDS, "attention_mask": mask}
    found = own_selections(loaded, [batch], FORMATS["bfloat16"], torch.device("cpu"), torch.float32)
    (part,) = found.selections[0].parts
    assert (len(part.margin), part.unmatched) == (left, unknown)
    said = own_sentences(own_summary(found, "tiny", "bfloat16", {})["results"][0])
    assert ("All rows count, as it is unknown which are padding: router." in said) == unknown
    assert "Not measured, as their rows are not tokens: router (3, 4, 8)." in said


def test_scores_that_are_not_numbers_are_refused():
    with pytest.raises(InputError, match="tiny: router: The scores of row 0 hold NaN"):
        selected(Whole(lambda s: (s * torch.nan).topk(2)), IDS)


def test_a_selection_outside_all_parts_is_none_of_a_layer(tiny, batch):
    model = tiny("Mixtral", **ROUTERS["Mixtral"])
    model.config.output_router_logits = True  # then the loss selects once more
    loaded = LoadedModel("tiny", "", model, "hugging face", "unknown")
    found = own_selections(loaded, [batch], FORMATS["bfloat16"], torch.device("cpu"), torch.float32)
    assert [entry.module for entry in found.selections] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert all(not module for module, _ in found.others)


def test_as_many_experts_as_tokens_are_told_by_their_name():
    tokens = Tokens(2, frozenset({6}), {})
    assert kind_of("layers.0.gate", (2, 6, 6), tokens) == "experts"
    assert kind_of("layers.0.moe.indexer", (2, 6, 6), tokens) == "keys"
    assert kind_of("layers.0.attention", (2, 3, 6, 6), tokens) == "keys"
    assert kind_of("layers.0.attention", (2, 3, 6, 4), tokens) == "blocks"
    assert kind_of("layers.0.gate", (12, 6), tokens) == "experts"
    assert kind_of("layers.0.gate", (12, 4, 2), tokens) == ""
    assert kind_of("layers.0.gate", (2, 5, 6), tokens) == ""
    assert kind_of("layers.0.gate", (2, 6), tokens) == ""
    images = Tokens(2, frozenset(), {})
    assert kind_of("layers.0.gate", (10, 6), images) == "experts"
    assert kind_of("decoder", (2, 300), images) == "", "the best of all places, for each image"
