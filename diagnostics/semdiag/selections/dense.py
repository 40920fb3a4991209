"""What do a model's indexers keep of dense attention? Their selection is lifted, their choice joined with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.batches import Batch
from semdiag.capturing.loading import LoadedModel, in_evaluation_mode
from semdiag.mathematics.score_strips import as_mask
from semdiag.measuring.calls.running import placed
from semdiag.selections.capture import Selected, tokens_of, watch_selections
from semdiag_files import InputError

_K = "index_topk"  # attribute of an indexer
_LOW = torch.finfo(torch.float16).min / 2  # scores below are a mask's


@dataclass(frozen=True, eq=False)
class DenseAttention:
    """What indexers keep of dense attention; weights are shares of all allowed keys, a sink included."""

    heads: pd.DataFrame  # a row for each layer and head, described at :func:`kept_of_dense`
    donors: (
        pd.DataFrame
    )  # module, donor, kept, overlap: of each layer with the choice of an indexer that ran before
    left_out: dict[str, str]  # layers without numbers, and why


@torch.no_grad()
def kept_of_dense(model: nn.Module, batches: Sequence[Batch]) -> DenseAttention:
    """Run a model with every indexer's k lifted to all keys, and return how much weight its choices keep.

    Formula: for query t of head h, with dense weights p and the choice S of k keys: kept = Σ_{j∈S} p_j; oracle is
    that of the k largest p, window of the k newest keys; top1: S holds the largest p; recall |S ∩ top-k| / k.
    Only queries with more than k allowed keys count, padding never.

    Source: not in the paper. Deviation: none.

    Args:
        model: with indexers of transformers that choose keys (``index_topk``), in evaluation mode.
        batches: inputs.

    Returns:
        By layer and head: module, indexer (whose choice the layer uses), head, k, rows, the means kept, oracle,
        window, top1 and recall, and the 5th percentiles kept_p5 and oracle_p5. By layer and earlier indexer: the
        weight kept with its choice, and its overlap with the layer's own.

    Raises:
        InputError: if the model has no such indexer, or none of them had more than k keys to choose from.
    """
    indexers = {name: module for name, module in model.named_modules() if _chooses_keys(module)}
    if not indexers:
        raise InputError("This model has no indexer that chooses keys (index_topk), whose choice could be lifted.")
    join = _Join({name: int(getattr(module, _K)) for name, module in indexers.items()})
    for batch in batches:
        join.start(model, batch)
        with (
            _lifted(indexers),
            watch_attention(model, join.take_attention),
            watch_selections(model, join.take_choice),
        ):
            batching.call(model, batch)
    if not join.rows:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(join.left_out.items())[:2])
        raise InputError(f"No layer has queries with more than k keys to choose from. {why}".strip())
    return DenseAttention(_by_head(join.rows), _by_donor(join.donors), join.left_out)


def kept_by_loaded(
    loaded: LoadedModel, batches: Sequence[Batch], device: torch.device, dtype: torch.dtype
) -> DenseAttention | None:
    """Return what a model's indexers keep; None if it has none, or if they choose every key."""
    model = placed(in_evaluation_mode(loaded.module), device, dtype)
    if not any(_chooses_keys(module) for module in model.modules()):
        return None
    try:
        return kept_of_dense(model, [batching.moved(batch, device, dtype) for batch in batches])
    except InputError:  # no query has more than k keys
        return None


def _chooses_keys(module: nn.Module) -> bool:
    blocks = any(hasattr(module, name) for name in ("compress_rate", "index_kpool", "block_size"))
    return "index" in type(module).__name__.lower() and type(getattr(module, _K, None)) is int and not blocks


@contextmanager
def _lifted(indexers: dict[str, nn.Module]) -> Iterator[None]:
    """Let indexers choose every key."""
    before = {name: getattr(module, _K) for name, module in indexers.items()}
    try:
        for module in indexers.values():
            setattr(module, _K, 2**31)
        yield
    finally:
        for name, module in indexers.items():
            setattr(module, _K, before[name])


@dataclass
class _Join:
    """Joins each layer's attention with the choices of the indexers that ran before."""

    k: dict[str, int]  # by indexer
    rows: list[pd.DataFrame] = field(default_factory=list)
    donors: list[pd.DataFrame] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)  # of this batch, (B, T, T), in the order of running
    real: Tensor | None = None
    model: nn.Module | None = None

    def start(self, model: nn.Module, batch: Batch) -> None:
        """Forget the batch before."""
        self.scores = {}
        self.model = model
        tokens = tokens_of(model, batch)
        self.real = next((mask.cpu() for mask in tokens.real.values()), None)

    def take_choice(self, name: str, module: nn.Module, selected: list[Selected]) -> None:
        """Take the scores of an indexer."""
        if name in self.k and selected[-1].scores.ndim == 3:
            self.scores[name] = selected[-1].scores.detach().float().cpu()

    def take_attention(self, call: AttentionCall) -> None:
        """Take a layer's attention, if it uses the choice of an indexer."""
        assert self.model is not None
        layer = self.model.get_submodule(call.module)
        if not hasattr(layer, "indexer") or not self.scores:
            return
        inner = f"{call.module}.indexer" if call.module else "indexer"
        indexer = (
            inner if inner in self.scores else next(reversed(self.scores))
        )  # a shared layer uses the last one
        scores = self.scores[indexer]
        if scores.shape != (call.q.shape[0], call.q.shape[2], call.k.shape[2]):
            self.left_out[call.module] = "its queries and keys are not those of its indexer"
            return
        for sample in range(len(scores)):
            self._join(call, indexer, sample)

    def _join(self, call: AttentionCall, indexer: str, sample: int) -> None:
        part = call.part(slice(sample, sample + 1))
        size = part.q.shape[2], part.k.shape[2]
        allowed = (
            torch.ones(size, dtype=torch.bool)
            if part.allowed is None
            else part.allowed[0].cpu().expand(-1, *size).all(0)
        )
        by_indexer = self.scores[indexer][sample] > _LOW
        real = torch.ones(size[0], dtype=torch.bool) if self.real is None else self.real[sample]
        if not torch.equal(allowed[real], by_indexer[real]):
            self.left_out[call.module] = "its attention is not dense where its indexer chooses every key"
            return
        rows = (real & (allowed.sum(1) > self.k[indexer])).nonzero().squeeze(1)
        if not len(rows):
            return
        weights = row_weights(part, rows, allowed)
        k = self.k[indexer]
        choice = _top(self.scores[indexer][sample][rows], k)
        self.rows.append(
            kept_in_rows(weights, choice, allowed[rows], k).assign(module=call.module, indexer=indexer, k=k)
        )
        for donor, scores in self.scores.items():
            shared = _top(scores[sample][rows], k)
            kept_weight = weights.mul(shared).sum(-1).mean(0)
            overlap = (shared & choice).sum(1).double() / k
            self.donors.append(
                pd.DataFrame(
                    {
                        "module": call.module,
                        "donor": donor,
                        "kept": kept_weight.numpy(),
                        "overlap": overlap.numpy(),
                    }
                )
            )


def row_weights(part: AttentionCall, rows: Tensor, allowed: Tensor) -> Tensor:
    """Return the weights (H, rows, Lk) of one sample in float64; a sink takes its share."""
    scores = part.part(queries=rows.to(part.q.device)).scores(torch.float64)[0].cpu()
    scores = scores.masked_fill(~allowed[rows], -torch.inf)
    if part.sinks is None:
        return scores.softmax(-1)
    sink = part.sinks.double().cpu()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def _top(scores: Tensor, k: int) -> Tensor:
    """Return the k largest scores of each row as a mask."""
    return as_mask(scores.topk(k, -1).indices, scores.shape[-1])


def kept_in_rows(weights: Tensor, choice: Tensor, allowed: Tensor, k: int) -> pd.DataFrame:
    """Return what a choice keeps, a row for each head and query."""
    best = _top(weights, k)
    newest = _top(torch.arange(allowed.shape[1]).masked_fill(~allowed, -1), k)
    columns = {
        "kept": (weights * choice).sum(-1),
        "oracle": (weights * best).sum(-1),
        "window": (weights * newest).sum(-1),
        "top1": choice.expand_as(weights).gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1).double(),
        "recall": (best & choice).sum(-1).double() / k,
    }
    heads = torch.arange(len(weights))[:, None].expand(weights.shape[:2])
    return pd.DataFrame({"head": heads.flatten().numpy()} | {n: v.flatten().numpy() for n, v in columns.items()})


def _by_head(rows: list[pd.DataFrame]) -> pd.DataFrame:
    groups = pd.concat(rows, ignore_index=True).groupby(["module", "indexer", "k", "head"], sort=False)
    means = groups[["kept", "oracle", "window", "top1", "recall"]].mean()
    means.insert(0, "rows", groups.size())
    means.insert(2, "kept_p5", groups["kept"].quantile(0.05))
    means.insert(4, "oracle_p5", groups["oracle"].quantile(0.05))
    return means.reset_index()


def _by_donor(donors: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(donors, ignore_index=True).groupby(["module", "donor"], sort=False).mean().reset_index()
