"""Fit indexers to a model's attention on some of the texts, and price them on the others."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semdiag.capturing import batches as batching
from semdiag.capturing.batches import Batch, longest
from semdiag.capturing.inputs import SUFFIXES
from semdiag.capturing.loading import in_evaluation_mode, load
from semdiag.capturing.pretrained import first_line
from semdiag.measuring.calls.running import no_room, placed
from semdiag.measuring.measure import DTYPES, Conditions
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.survey import check_inputs, inputs_of
from semdiag.measuring.words import duration
from semdiag.selections.learned import FitOptions, IndexerFit, digest_of
from semdiag.selections.price import IndexerPrice, check_model, divergence_of, price_of_indexers
from semdiag_files import InputError, counted
from semdiag_models import weights_sha256
from semdiag_models.train import find_device

_HELD_OUT = 4  # one of so many texts is held out
_LENGTH = 4  # texts are cut to so many times k tokens, unless the user says otherwise
_SAVE_EVERY = 30.0  # seconds


@dataclass(frozen=True)
class FitPlace:
    """Where fitted indexers are kept."""

    path: Path | None = None
    fits: bool = True  # whether they are fitted, and not taken as they are


@dataclass(frozen=True, eq=False)
class DividedTexts:
    """The texts of a fit, and those on which it is tried; all have more than k tokens, and none is there twice."""

    fitted: Sequence[Batch]
    held_out: Sequence[Batch]
    short: int  # number left out for their length
    repeated: int  # number left out because they were there already


@dataclass(frozen=True, eq=False)
class PricedFit:
    """A fit, and what its indexers cost."""

    fit: IndexerFit
    price: IndexerPrice
    texts: DividedTexts
    model: str
    k: int
    provenance: dict[str, Any]


def fitted_price(
    path: str, conditions: Conditions, k: int, options: FitOptions, place: FitPlace, progress: SurveyProgress
) -> PricedFit:
    """Load a model, fit an indexer to each of its layers, or read those of a file, and price them."""
    conditions = _with_length(conditions, k)
    check_inputs([Path(path)], conditions)
    fit = _fit_of(place, options)
    progress.announce("loading", 0)
    loaded = load(path, head=conditions.head)
    if not loaded.external:
        raise InputError(f"{path} is an encoder of semdiag's: take a causal language model, like hf:PATH.")
    device = find_device(conditions.device)
    dtype = conditions.decided([loaded], device).dtype
    batches, _, source = inputs_of(loaded, conditions)
    model_digest = loaded.sha256 or weights_sha256(loaded.module.state_dict())
    if fit.texts and fit.model != model_digest:
        raise InputError(f"{place.path} was fitted to another model, or to other weights of {path}.")
    fit.model = model_digest
    model = placed(in_evaluation_mode(loaded.module), device, DTYPES[dtype])
    texts = _divided(batches, k, fit, place, conditions.seed)
    prepared = replace(
        texts,
        fitted=[batching.moved(batch, device, DTYPES[dtype]) for batch in texts.fitted],
        held_out=[batching.moved(batch, device, DTYPES[dtype]) for batch in texts.held_out],
    )
    seconds = _checked_seconds(path, model, max(prepared.held_out, key=longest), k)
    if place.fits:
        _save(fit, place.path)  # refuses a file that cannot be written
        try:
            _fit(fit, model, prepared, place.path, k, seconds, progress)
        except KeyboardInterrupt:
            if place.path is not None:
                progress.say(f"the fit so far is kept in {place.path}: the same command goes on")
            raise
    progress.announce("trying masks", len(texts.held_out))
    price = price_of_indexers(
        model, fit.indexers, prepared.held_out, k, conditions.seed, lambda: progress.advance(1)
    )
    if place.fits:
        fit.held_out = [*fit.held_out[:1], price.divergence]
        _save(fit, place.path)
    provenance = {
        "semdiag": version("semdiag"), "torch": str(torch.__version__), "inputs": source, "dtype": dtype,
        "device": device.type, "seed": conditions.seed, "command": ["semdiag", *sys.argv[1:]],
    }  # fmt: skip
    return PricedFit(fit, price, texts, path, k, provenance)


def _with_length(conditions: Conditions, k: int) -> Conditions:
    """Return conditions under which long texts are cut, so that a fit takes minutes."""
    inputs = conditions.inputs
    if inputs is None or inputs.suffix not in SUFFIXES:
        return conditions
    most = conditions.texts.max_length
    if most is None:
        return replace(conditions, texts=replace(conditions.texts, max_length=_LENGTH * k))
    if most <= k:
        raise InputError(f"Texts of --max-length {most} leave nothing to choose: take more than k = {k} tokens.")
    return conditions


def _fit_of(place: FitPlace, options: FitOptions) -> IndexerFit:
    """Return a new fit, an interrupted one, or that of a file."""
    if place.path is None:
        return IndexerFit(options)
    if not place.fits:
        fit = IndexerFit.load(place.path)
        if not fit.indexers:
            raise InputError(f"{place.path} holds no indexer.")
        return fit
    if not place.path.exists():
        return IndexerFit(options)
    return IndexerFit.load(place.path, options)


def _divided(batches: Sequence[Batch], k: int, fit: IndexerFit, place: FitPlace, seed: int) -> DividedTexts:
    """Divide texts by the seed into those of the fit and the others; try a fit that has ended on all others."""
    by_digest = {digest_of(batch): batch for batch in batches}
    usable = {digest: batch for digest, batch in by_digest.items() if longest(batch) > k}
    short = len(by_digest) - len(usable)
    repeated = len(batches) - len(by_digest)
    if not usable:
        most = max(map(longest, batches), default=0)
        raise InputError(
            f"No text has more than k = {k} tokens, the longest {most}: take longer ones or fewer keys."
        )
    if not place.fits:
        unread = [batch for digest, batch in usable.items() if digest not in fit.digests]
        if not unread:
            raise InputError(f"{place.path} was fitted to all these texts: name others with --inputs.")
        return DividedTexts([], unread, short, repeated)
    if len(usable) < 2:
        raise InputError(
            f"A fit takes two texts of more than k = {k} tokens: one to learn, one to try it on. Got 1."
        )
    draws = torch.Generator().manual_seed(seed)
    digests = list(usable)
    order = [digests[number] for number in torch.randperm(len(digests), generator=draws).tolist()]
    held_out = max(1, len(order) // _HELD_OUT)
    learnt = order[held_out:]
    if fit.digests != learnt[: fit.texts]:
        raise InputError(
            f"{place.path} was fitted to other texts than these, with this k and seed. --load takes it as it is; "
            "or name another file with --save."
        )
    return DividedTexts(
        [usable[each] for each in learnt], [usable[each] for each in order[:held_out]], short, repeated
    )


def _checked_seconds(path: str, model: nn.Module, batch: Batch, k: int) -> float:
    """Refuse a model that has no price, and return the seconds of a run."""
    try:
        return check_model(model, batch, k)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # models raise anything
        full = no_room(path, batch, error)
        raise full or InputError(f"{path} cannot read these inputs ({first_line(error)}).") from error


def _fit(
    fit: IndexerFit,
    model: nn.Module,
    texts: DividedTexts,
    path: Path | None,
    k: int,
    seconds: float,
    progress: SurveyProgress,
) -> None:
    """Fit to the texts that are left; half way, note the divergence on the held-out ones."""
    total = len(texts.fitted)
    first = fit.texts
    progress.announce("fitting", total)
    progress.advance(first)
    if first:
        progress.say(f"{path} holds a fit to {counted(first, 'text')} of {total}, which goes on")
    saved_at = begun = time.monotonic()
    while fit.texts < total:
        if fit.texts == total // 2 and fit.texts and not fit.held_out:
            fit.held_out = [divergence_of(model, fit.indexers, texts.held_out, k)]
        fit.add(model, texts.fitted[fit.texts])
        progress.advance(1)
        now = time.monotonic()
        if fit.texts == first + 1 and fit.texts < total:
            left = (now - begun) * (total - fit.texts) + 8 * seconds * len(texts.held_out)
            tried = len(texts.held_out)
            progress.say(f"measuring takes about {duration(left)}: {total} texts to fit, {tried} to try")
        if now - saved_at > _SAVE_EVERY or fit.texts == total:
            _save(fit, path)
            saved_at = time.monotonic()


def _save(fit: IndexerFit, path: Path | None) -> None:
    if path is not None:
        fit.save(path)
