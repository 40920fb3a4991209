"""What choices of blocks for tiles of queries keep: attention weight, and blocks of the exact choice."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.batches import Batch, each
from semdiag.capturing.call_strips import integers, mark_largest
from semdiag.capturing.choices import SkippedTiles
from semdiag.capturing.kept_keys import Choice
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.rules import SkipTiles
from semdiag.capturing.sparsify import engine_rule
from semdiag.capturing.tiles import Tiles
from semdiag.measuring.calls.running import running, unnamed
from semdiag.measuring.table import Table
from semdiag_files import InputError

TILES = Table(
    "tiles",
    "One row per kind of choice, k, layer and head of a model that runs as it is. Shares: keys, of the visible "
    "pairs of a query and a key that are kept; weight, of the attention weight that they hold; exact_weight, that "
    "of as many blocks with the largest weight; top_weight, that of the k largest keys of each query; recall, of "
    "the exact blocks that are kept, without those of a tile's own positions, over tiles that drop some (NaN: "
    "none does); chance, the recall of as many other blocks drawn at random.",
    {"model": "str", "length": "int64", "kind": "str", "k": "int64", "module": "str"}
    | dict.fromkeys(("layer", "head"), "int64")
    | dict.fromkeys(("keys", "weight", "exact_weight", "top_weight", "recall", "chance"), "float64"),
)


class TileWeights:
    """Adds up, call by call, what kinds of choices keep of the scores as they are."""

    def __init__(self, kinds: Sequence[str], ks: Sequence[int]) -> None:
        pairs = [(kind, k) for kind in kinds for k in (ks if kind.startswith("tile-") else (0,))]
        self._rules = [(*pair, rule) for pair in pairs if (rule := engine_rule(*pair)) is not None]
        if not self._rules:
            raise InputError(f"None of {', '.join(kinds) or 'no kinds'} keeps a block with k = {list(ks)}.")
        self._sums: dict[tuple[str, int, str, int], Tensor] = {}
        self._length = 0

    def add(self, call: AttentionCall) -> None:
        """Add a call."""
        self._length = max(self._length, call.k.shape[2])
        for size in {(rule.query_block, rule.block) for _, _, rule in self._rules}:
            choice = SkippedTiles(SkipTiles(math.inf, *size), call)
            tiles = choice.tiles
            sums = choice.block_sums
            weight = sums.weight[:, :, :-1]
            pairs = sums.pairs[:, :, :-1]
            visible = pairs > 0
            exact = sums.ranking("weight")
            heads = call.q.shape[1]
            beyond_own = visible if tiles.position_blocks is None else visible & ~tiles.position_blocks[:, None]
            for kind, k, rule in self._rules:
                if (rule.query_block, rule.block) != size:
                    continue
                if isinstance(rule, SkipTiles):
                    chosen = (sums.ranking("gap") >= -rule.threshold) & visible
                    best = mark_largest(exact, chosen.sum(-1, keepdim=True))
                    top = torch.full((heads,), math.nan)
                else:
                    number = integers(k // rule.block, device=visible.device)[:, None, None]
                    values = exact if rule.estimate is None else tiles.estimates(rule.estimate)
                    chosen, best = (tiles.best(x, visible, number, heads) for x in (values, exact))
                    top = _top_weight(choice, tiles, k)
                parts = [pairs * chosen, pairs, weight * chosen, weight * best, weight]
                parts += _found(chosen, best, beyond_own & (best.sum(-1) < visible.sum(-1))[..., None])
                shares = torch.stack([*(x.double().sum((0, 2, 3)) for x in parts), top.to(visible.device)]).cpu()
                place = (kind, k, call.module, call.layer)
                self._sums[place] = shares + self._sums.get(place, 0)

    def table(self, model: str) -> pd.DataFrame:
        """Return a row for each kind, k, layer and head."""
        rows: list[dict[str, Any]] = []
        for (kind, k, module, layer), sums in self._sums.items():
            for head, of_head in enumerate(sums.T.tolist()):
                kept_pairs, pairs, kept_weight, exact_weight, all_weight, *blocks, top = of_head
                chosen_exact, by_chance, exact = blocks
                recalls = [chosen_exact / exact, by_chance / exact] if exact else [math.nan] * 2
                shares = [
                    kept_pairs / pairs,
                    kept_weight / all_weight,
                    exact_weight / all_weight,
                    top / all_weight,
                    *recalls,
                ]
                place = [model, self._length, kind, k, module, layer, head]
                rows.append(dict(zip(TILES.columns, [*place, *shares], strict=True)))
        return TILES.of_rows(rows)


def _found(chosen: Tensor, exact: Tensor, candidates: Tensor) -> list[Tensor]:
    """Return, by tile and block, the exact blocks among the others: kept ones, those that chance keeps, all."""
    exact = exact & candidates
    share = (chosen & candidates).sum(-1, keepdim=True) / candidates.sum(-1, keepdim=True).clamp(min=1).double()
    return [chosen & exact, exact * share, exact]


def _top_weight(choice: Choice, tiles: Tiles, k: int) -> Tensor:
    """Return the weight of the k largest keys of each query that counts, summed by head."""
    call = choice.call
    total = torch.zeros(call.q.shape[1], dtype=torch.float64, device=call.q.device)
    real = tiles.query_tiles.expand(len(call.q), -1) < tiles.count
    for strip in choice.strips():
        scores = choice.scores(strip).masked_fill_(~choice.allowed(strip), -torch.inf)
        log_total = scores.logsumexp(-1)
        if call.sinks is not None:
            log_total = torch.logaddexp(log_total, call.sinks[strip.heads].to(log_total.dtype)[:, None])
        top = scores.topk(k).values if scores.shape[-1] > k else scores
        share = (top.logsumexp(-1) - log_total).exp().nan_to_num(0) * real[strip.samples, None, strip.queries]
        total[strip.heads] += share.double().sum((0, 2))
    return total


def tiles(
    model: LoadedModel | nn.Module,
    batches: Batch | Iterable[Batch],
    kinds: Sequence[str] = ("tile-64x64-mean", "tile-64x64-quest", "skip-8"),
    k: int | Sequence[int] = 256,
    batch_size: int = 8,
) -> pd.DataFrame:
    """Ask, of a model that runs as it is, what engines' choices of blocks for tiles of queries keep.

    Args:
        model: any module, or what :func:`semdiag.load` returns.
        batches: its inputs, as of :func:`semdiag.measure`.
        kinds: ``tile-64x64-mean`` (also quest, antidiagonal, last, or ``module:function``, which is imported),
            ``skip-8`` (a threshold of 8 nats), ``skip-8-128x64``.
        k: keys that each query keeps, one number or several; thresholds take none.
        batch_size: samples at a time.

    Returns:
        One row per kind, k, layer and head: see ``semdiag.measuring.calls.tile_weights.TILES``. An unknown kind, a
        tile that is larger than the text, and an estimate that returns something else are an InputError.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=8, blocks=1))
        >>> found = tiles(encoder, torch.ones(2, 8, dtype=torch.int64), ["tile-4x4-mean"], k=8)
        >>> found[["k", "layer", "head", "keys", "weight"]].to_numpy().round(6).tolist()
        [[8.0, 0.0, 0.0, 1.0, 1.0]]
    """
    loaded = unnamed(model)
    sums = TileWeights(kinds, [k] if isinstance(k, int) else k)
    with running(loaded, sums.add) as run:
        for batch in each(batches, batch_size):
            run(batch)
    return sums.table(loaded.path)
