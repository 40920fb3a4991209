"""How many keys a budget keeps: against the masks themselves, query by query."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from semdiag.capturing.call_strips import allowed_mask
from semdiag.capturing.choices import choice_of
from semdiag.capturing.kept_keys import all_kept
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import TopK
from semdiag.measuring.calls.running import running
from semdiag.questions.k_sweep.budgets import NeededKeys


class Cross(nn.Module):
    """A few queries that attend to many keys, of which some are hidden from some."""

    def forward(self, q, k, hidden):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=~hidden)


def drawn(keys, samples=2, heads=2, queries=5):
    generator = torch.Generator().manual_seed(keys)
    q = 3 * torch.randn(samples, heads, queries, 4, generator=generator, dtype=torch.float64)
    k = torch.randn(samples, heads, keys, 4, generator=generator, dtype=torch.float64)
    ends = torch.randint(1, keys + 1, (samples, 1, queries, 1), generator=generator)
    return {"q": q, "k": k, "hidden": torch.arange(keys) >= ends}


def kept_by_masks(calls, k, block, min_keys):
    """Kept keys and all keys of every place and head, from the masks that a model is run with."""
    found = {}
    for call in calls:
        kept = all_kept(choice_of(TopK(k, block=block), call))
        part = call.part()
        allowed = allowed_mask(part)
        counted = part.counted & (allowed.sum(-1) >= min_keys)
        parts = [(x & allowed & counted[..., None]).sum((0, 2, 3)) for x in ((kept or (allowed,))[0], allowed)]
        place = call.module, call.occurrence
        found[place] = found.get(place, 0) + torch.stack(parts).numpy()
    return found


def compare(module, batches, blocks=(1,), min_keys=1, ks=(1, 2, 3, 50)):
    calls, needed = [], NeededKeys(min_keys)
    loaded = LoadedModel("own:model", "", module, "factory", "unknown")
    with running(loaded, lambda call: (calls.append(call), needed.add(call)), None, torch.float64) as run:
        for batch in batches:
            run(batch)
    for block in blocks:
        for k in ks:
            places = {place: [k] * len(needed.ranked[place, block]) for place in needed.layers}
            table = needed.table("own:model", {("some", block): places})
            for place, (kept, every) in kept_by_masks(calls, k, block, min_keys).items():
                rows = table[(table["module"] == place[0]) & (table["occurrence"] == place[1])]
                assert rows["kept_keys"].tolist() == kept.tolist()
                assert rows["all_keys"].tolist() == every.tolist()
                assert (every > 0).all()
    return table


@pytest.mark.parametrize(("kind", "min_keys"), [("full", 1), ("full", 5), ("topk", 1), ("topk", 2)])
def test_kept_keys_are_those_of_the_masks_in_padded_batches_and_beside_a_mask_of_its_own(
    wild_encoder, padded_tokens, kind, min_keys
):
    tokens, _ = padded_tokens
    table = compare(wild_encoder(kind), [tokens[:5], tokens[5:]], min_keys=min_keys)
    lengths = [n for n in (9, 12, 4, 1, 12, 12, 11) if n >= min_keys]
    assert table["all_keys"].unique() == sum(n * (min(n, 3) if kind == "topk" else n) for n in lengths)


def test_kept_keys_in_blocks_are_those_of_the_masks_even_where_a_batch_has_one_block():
    batches = [drawn(150), drawn(40), drawn(90, samples=3)]
    batches[2]["hidden"][1, :, :, :30] = True  # padding in front
    compare(Cross(), batches, blocks=(1, 64, 128), ks=(1, 2, 3))


def test_kept_keys_are_no_more_where_a_query_has_fewer_than_k():
    """Of k = 3 and 1 and 5 keys they were 3 of 3 on average: every key, although two of six are dropped."""
    q, k = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    hidden = torch.arange(5) >= torch.tensor([1, 5])[None, None, :, None]
    table = compare(Cross(), [{"q": q.double(), "k": k.double(), "hidden": hidden}], ks=(3,))
    assert table[["kept_keys", "all_keys"]].to_numpy().tolist() == [[4, 6]]
