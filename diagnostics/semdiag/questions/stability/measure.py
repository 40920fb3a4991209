"""What input noise does to the softmax rows of a model: secants, response, changed sets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from semdiag.capturing.attention_call import FIXED_MASKS, HEAVY_HITTERS
from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.batches import Batch, first_samples, longest, moved, repeated, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.mask_stability import same_set_stability, weight_change_bound
from semdiag.mathematics.paper_stability import paper_fixed_mask_stability, paper_heavy_hitter_stability
from semdiag.mathematics.softmax_stability import (
    fixed_mask_row_stability,
    fixed_mask_stability,
    heavy_hitter_row_stability,
    heavy_hitter_stability,
    local_stability_of_weight,
    log_odds_of_largest,
    score_change,
    score_range_change,
    weight_change,
)
from semdiag.measuring.calls.capture import longest_call
from semdiag.measuring.calls.collector import NotAvailableError, ScoredRows, check_rows, scored_rows
from semdiag.measuring.calls.running import running, unnamed
from semdiag.measuring.embedding_noise import Reach, noisy_embeddings
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.measuring.words import counted
from semdiag.questions.stability import NOISE, SAMPLES, SecantsPlan
from semdiag.questions.stability.gains import QUERIES, measure_gains, spaced
from semdiag_models import Encoder
from semdiag_models.train import with_float64


def with_bounds(secants: pd.DataFrame, attention: str) -> pd.DataFrame:
    """Add secants and the logarithms of every form of ξ to the table ``secants`` of one model."""
    with np.errstate(invalid="ignore", divide="ignore"):
        secant = secants["weight_change"] / secants["score_change"].where(secants["score_change"] > 0)
    defined = np.isfinite(secants["dispersion"]) & secants["separation"].notna()
    usable = secants[defined]
    delta, gap, key_count = (
        torch.tensor(usable[name].to_numpy(np.float64)) for name in ("dispersion", "separation", "kept")
    )
    fixed = np.isposinf(secants["separation"]) | (attention in FIXED_MASKS)
    columns: dict[str, Any] = {"secant": secant, "fixed_set": fixed}
    for name, values in _constants(attention, delta, gap, key_count).items():
        column = np.full(len(secants), np.nan)
        column[defined.to_numpy()] = values.numpy()
        columns[name] = pd.Series(column, index=secants.index)
    columns["ln_pair"], columns["ln_row"] = _of_pairs(secants, columns["ln_sound"], columns["ln_row"])
    return secants.assign(**columns)


def _of_pairs(secants: pd.DataFrame, ln_sound: pd.Series, ln_row: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Return both constants of each pair: from the change of scores if the set is the same, else of all rows."""
    same = secants["same_set"].to_numpy(bool) & np.isfinite(secants["dispersion"].to_numpy(np.float64))
    spread, odds, largest = (
        torch.tensor(secants[name].to_numpy(np.float64))
        for name in ("score_change_range", "log_odds", "score_change_max")
    )
    xi = same_set_stability(odds, spread).log_value.numpy()
    row = torch.where(largest > 0, torch.log(weight_change_bound(spread) / largest), 0.0).numpy()
    return ln_sound.where(~same, xi), ln_row.where(~same, row)


def _constants(attention: str, delta: Tensor, gap: Tensor, key_count: Tensor) -> dict[str, Tensor]:
    names = ("ln_sound", "ln_paper", "ln_row")
    if attention in FIXED_MASKS:
        forms = (fixed_mask_stability, paper_fixed_mask_stability, fixed_mask_row_stability)
        return {name: form(delta, key_count).log_value for name, form in zip(names, forms, strict=True)}
    if attention in HEAVY_HITTERS:
        gapped = (heavy_hitter_stability, paper_heavy_hitter_stability, heavy_hitter_row_stability)
        return {name: form(delta, gap, key_count).log_value for name, form in zip(names, gapped, strict=True)}
    return dict.fromkeys(names, torch.full_like(delta, torch.nan))


def query_stability(queries: pd.DataFrame) -> "pd.Series[float]":
    """Return the local ξ_loc of each query, from its largest attention weight."""
    if "largest_weight" not in queries:
        return pd.Series(np.nan, index=queries.index)
    largest = torch.tensor(queries["largest_weight"].to_numpy(np.float64))
    return pd.Series(local_stability_of_weight(largest).numpy(), index=queries.index)


def noisy_changes(clean: ScoredRows, noisy: ScoredRows) -> dict[str, Tensor]:
    """Compare each clean row with its noisy one."""
    # Rows that do not count have no softmax: they get a key, and are dropped afterwards.
    kept_clean, kept_noisy = (rows.selected | ~rows.counted[..., None] for rows in (clean, noisy))
    pair = clean.scores, noisy.scores, kept_clean, kept_noisy
    return {
        "kept": clean.kept,
        "weight_change": weight_change(*pair),
        "score_change": score_change(*pair),
        "score_change_max": score_change(*pair, order=float("inf")),
        "score_change_range": score_range_change(*pair),
        "log_odds": (log_odds_of_largest(clean.scores, kept_clean) + log_odds_of_largest(noisy.scores, kept_noisy))
        / 2,
        "same_set": (clean.selected == noisy.selected).all(-1),
        "dispersion": clean.dispersion.maximum(noisy.dispersion),
        "separation": clean.separation.minimum(noisy.separation),
    }


SECANTS = Table(
    "secants",
    "One row per query, noise level and clean-noisy pair; score_change is in the 1-norm, score_change_max the "
    "largest, score_change_range largest minus smallest; log_odds: of the largest weight, mean of both rows.",
    columns_of(
        "model str; sample layer head query int32; level float64; kept int32; weight_change score_change "
        "score_change_max score_change_range log_odds float64; same_set bool; dispersion separation float64"
    ),
)

_SCORES = 2**22  # scores of one forward pass, at most (or one sample's)
_HEADS = 16  # assumed for external models, for the size of a pass
_PAIRS = 2**21
_FEWEST = 4  # queries × keys of a head beyond which fewer samples run; samples at least


def measure_secants(
    model: LoadedModel | Encoder,
    batches: Iterable[Batch],
    *,
    levels: Sequence[float] = (NOISE,),
    samples: int = SAMPLES,
    seed: int = 0,
    device: torch.device | str = "cpu",
    min_keys: int = 1,
    note: Callable[[str, str, str], None] = lambda name, why, where: None,
    remark: Callable[[str, str], None] = lambda text, code: None,
) -> pd.DataFrame:
    """Compare every softmax row of clean inputs with that of noisy copies; noise enters behind the embedding."""
    loaded = unnamed(model)
    device = with_float64(device)
    parts: list[dict[str, Any]] = []
    reach = Reach()
    level = 0.0
    done = 0
    size = 0
    # One for each place where noise enters, so that the noise does not depend on the size of batches.
    generators: dict[int, torch.Generator] = {}

    def add(call: AttentionCall) -> None:
        columns = _compared(call, size, min_keys, spaced(call.q.shape[2]) if loaded.external else None)
        parts.append({**columns, "sample": columns["sample"] + done, "level": level})
        reach.look(call, size)

    def add_noise(copies: Tensor, place: int = 0) -> None:
        generator = generators.setdefault(place, torch.Generator().manual_seed(seed + place))
        noise = noise_of_samples(copies.shape, generator, copies.dtype).to(copies.device)
        copies += level * token_size(copies) * noise

    first_batches = list(first_samples(batches, samples))
    length, keys = longest_call(loaded, first_batches, device, torch.float64)
    most = max(_FEWEST, _PAIRS // (min(length, QUERIES) * keys))
    if loaded.external and (length > QUERIES or most < sum(map(samples_of, first_batches))):
        first_batches = list(first_samples(first_batches, most))
        taken = counted(sum(map(samples_of, first_batches)), "sample")
        remark(f"noise: {taken}, and at most {QUERIES} evenly spaced queries of each", "noise-thinned")
    heads = _HEADS if loaded.external else loaded.encoder.config.heads
    at_once = pairs_at_once(length, keys, heads)
    with running(loaded, add, device, torch.float64) as run:
        for noise in levels:
            level = noise
            done = 0
            generators.clear()
            for part in (part for batch in first_batches for part in small_parts(batch, at_once)):
                size = samples_of(part)
                copies = moved(repeated(part, 2), run.device, run.dtype)
                if loaded.external:
                    noisy = noisy_embeddings(run.module, copies, size, add_noise)
                else:
                    noisy = noisy_copies(cast(Encoder, run.module).blocks[0], size, add_noise)
                with noisy:
                    run(copies)
                run.alike()
                done += size
    secants = SECANTS.of_parts(pd.DataFrame({"model": loaded.path, **columns}) for columns in parts)
    return secants[~secants["layer"].isin(reach.left_out(SecantsPlan.name, note))].reset_index(drop=True)


def pairs_at_once(length: int, keys: int, heads: int = _HEADS) -> int:
    """Return of how many samples the clean and the noisy copy run together."""
    return max(1, _SCORES // (2 * heads * length * keys))


def small_parts(batch: Batch, at_once: int) -> list[Batch]:
    """Return a batch in parts of ``at_once`` samples; a tuple of arguments is not split."""
    return [batch] if isinstance(batch, tuple | list) else split(batch, at_once)


@contextmanager
def noisy_copies(place: nn.Module, samples: int, add_noise: Callable[[Tensor], None]) -> Iterator[None]:
    """Make the copies in each batch of [clean samples; copies of them] noisy, where they enter a module."""

    def perturb(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        noisy = inputs[0].clone()  # the original may be needed elsewhere
        add_noise(noisy[samples:])
        return noisy, *inputs[1:]

    handle = place.register_forward_pre_hook(perturb)
    try:
        yield
    finally:
        handle.remove()


def noise_of_samples(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers sample by sample, so that batching does not change them."""
    return torch.stack([torch.randn(shape[1:], generator=generator, dtype=dtype) for _ in range(shape[0])])


def token_size(tokens: Tensor) -> Tensor:
    """Return the root mean square of each token's vector: (..., d) -> (..., 1)."""
    return tokens.square().mean(-1, keepdim=True).sqrt()


def _compared(call: AttentionCall, samples: int, min_keys: int, taken: Tensor | None) -> dict[str, np.ndarray]:
    """Reduce a call over [clean; noisy] to columns of numbers; None: of all queries."""
    check_rows(call, 2 * samples)
    clean, noisy = scored_rows(call if taken is None else call.part(queries=taken)).halves()
    counted = clean.counted & ((clean.scores > -torch.inf).sum(-1) >= min_keys)
    sample, head, query = (where.to(torch.int32) for where in counted.nonzero(as_tuple=True))
    query = query if taken is None else taken.to(query)[query.long()]
    columns = {"sample": sample, "layer": torch.full_like(sample, call.layer), "head": head, "query": query}
    columns |= {name: values[counted] for name, values in noisy_changes(clean, noisy).items()}
    return {name: column.cpu().numpy() for name, column in columns.items()}


def measure_stability(subject: Subject, plan: SecantsPlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    length = max(map(longest, subject.batches))
    if subject.model.external and plan.most_tokens is not None and length > plan.most_tokens:
        raise NotAvailableError(
            f"it takes minutes for texts of {length:,} tokens, and a report leaves it out above "
            f"{plan.most_tokens:,}: --thorough measures it, as does semdiag stability"
        )
    secants = measure_secants(
        subject.model,
        subject.batches,
        levels=plan.levels,
        seed=subject.seed,
        device=subject.device,
        min_keys=subject.min_keys,
        note=subject.note,
        remark=subject.remark,
    )
    gains = measure_gains(
        subject.model,
        subject.batches,
        seed=subject.seed,
        device=subject.device,
        note=subject.note,
        remark=subject.remark,
    )
    return {"secants": secants, "gains": gains}
