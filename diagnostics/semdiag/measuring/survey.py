"""Measure several models under the same conditions."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from semdiag.capturing.audit import Remark
from semdiag.capturing.batches import Batch, each, first_samples, longest, samples_of, split
from semdiag.capturing.inputs import AS_THEY_ARE, SUFFIXES, cut_texts, read_batches, read_inputs, tokeniser_of
from semdiag.capturing.loading import LoadedModel, load_all
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.memory import demand, fitting_batch, halving
from semdiag.measuring.calls.running import placed
from semdiag.measuring.measure import DTYPES, Conditions, measure
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.probe import probes as all_probes
from semdiag.measuring.table import REMARKS
from semdiag.measuring.words import counted
from semdiag_files import InputError
from semdiag_models import Encoder
from semdiag_models.training import find_device, with_float64

if TYPE_CHECKING:
    from semdiag_files.workers import Workers


Asked = tuple[Probe, Any, Any]  # a probe, its plan, and what it prepared


class Inputs(NamedTuple):
    """Inputs on which models are measured."""

    batches: list[Batch]  # batches of samples
    labels: Tensor | None  # (N,) classes; None if unknown
    source: str  # origin in words
    model: LoadedModel  # model to which the inputs belong


class Progress(NamedTuple):
    """Callbacks that report the progress of a survey."""

    announce: Callable[[str, int], None] = lambda model, samples: None
    after_batch: Callable[[int], None] = lambda samples: None  # called with the number of finished steps
    expect: Callable[[int], None] = lambda steps: None  # with the steps of a stage that become known later
    say: Callable[[str], None] = lambda text: None  # called with what a long run will take


def survey(
    models: Sequence[Path | LoadedModel],
    conditions: Conditions,
    announce: Callable[[str, int], None] = lambda model, samples: None,
    after_batch: Callable[[int], None] = lambda samples: None,
    *,
    own: bool = False,
    expect: Callable[[int], None] = lambda steps: None,
    say: Callable[[str], None] = lambda text: None,
    given: Inputs | None = None,
    elsewhere: Callable[[list[str], Conditions], list[Measurements]] | None = None,
) -> Measurements:
    """Load and measure several models."""
    # All are loaded before the first is measured: a wrong path should not cost minutes.
    loaded = load_all(models, conditions.config, conditions.head)
    device, conditions = _decided(loaded, conditions)
    for model in loaded if conditions.encoders_only else ():
        _ = model.encoder  # refuses any other model
    inputs = [given or Inputs(*inputs_of(x, conditions), x) for x in loaded] if elsewhere is None else []
    asked = _prepared(conditions)
    for model in loaded:
        for probe, plan, known in asked:
            probe.check(model, plan, known)
    progress = Progress(announce, after_batch, expect, say)
    if elsewhere is not None:
        parts = elsewhere([model.path for model in loaded], conditions)
    else:
        parts = []
        for model, named, known in zip(loaded, models, inputs, strict=True):
            ours = own or not isinstance(named, LoadedModel)
            parts.append(_surveyed(model, known, conditions, device, asked, ours, progress))
    joined = Measurements.concat(parts)
    largest = int(joined.models["samples"].max())
    joined.provenance.update(seed=conditions.seed, samples=largest)
    few = min(conditions.probe_samples or largest, largest)
    for probe, plan, _ in asked:  # external models may have measured something else
        if any(not model.external for model in loaded) or len(getattr(joined, probe.tables[0].name)):
            joined.provenance.update(probe.provenance(plan, largest, few))
    return joined


def _prepared(conditions: Conditions) -> list[Asked]:
    probes = [(all_probes()[type(plan)], plan) for plan in conditions.plans]
    return [(probe, plan, probe.prepare(plan, conditions)) for probe, plan in probes]


def _decided(loaded: Sequence[LoadedModel], conditions: Conditions) -> tuple[torch.device, Conditions]:
    """Return device and conditions for all models; encoders draw their keys by the seed from now on."""
    device = find_device(conditions.device)
    conditions = conditions.decided(loaded, device)
    if conditions.dtype == "float64":
        device = with_float64(device)
    for model in loaded:
        if isinstance(model.module, Encoder):
            model.module.with_draws(conditions.seed)
    return device, conditions


def _surveyed(
    model: LoadedModel,
    inputs: Inputs,
    conditions: Conditions,
    device: torch.device,
    asked: Sequence[Asked],
    ours: bool,
    progress: Progress,
) -> Measurements:
    """Measure one model, in batches that fit in memory."""
    if model.external and ours:
        placed(model.module, device, DTYPES[conditions.dtype])  # in place: it may be large
    batches, size = inputs.batches, conditions.batch_size
    if (wanted := demand(model, batches, device, DTYPES[conditions.dtype])) is not None:
        masks = max((getattr(plan, "masks", 0) for plan in conditions.plans), default=0)
        most = max((getattr(plan, "largest_k", 0) for plan in conditions.plans), default=0)
        fits, text = fitting_batch(
            wanted, model.path, batches, device, most or max(conditions.k, default=1), masks
        )
        progress.say(f"{model.path}: {text}.")
        if fits < max(map(samples_of, batches)):
            batches, size = [part for batch in batches for part in each(batch, fits)], fits

    def run(cut: list[Batch], at_once: int) -> Measurements:
        now = replace(conditions, batch_size=at_once)
        return _measured(model, inputs._replace(batches=cut), now, device, asked, progress)

    return halving(run, batches, size, lambda text: progress.say(f"{model.path}: {text}."))


def _measured(
    model: LoadedModel,
    inputs: Inputs,
    conditions: Conditions,
    device: torch.device,
    asked: Sequence[Asked],
    progress: Progress,
) -> Measurements:
    """Measure one model in batches that may be too large."""
    batches, labels, source, whose = inputs
    progress.announce(model.path, sum(map(samples_of, batches)))
    subject = Subject(
        model, batches, labels, conditions.seed, conditions.batch_size, device, DTYPES[conditions.dtype],
        conditions.queries, conditions.probe_samples, progress.after_batch, progress.expect,
    )  # fmt: skip
    for probe, plan, known in asked:
        subject.watch(probe, plan, known)
    part = measure(
        model,
        batches,
        labels=labels,
        inputs=source,
        k=_counterfactual(model, batches, conditions),
        device=device,
        dtype=DTYPES[conditions.dtype],
        queries=conditions.queries,
        seed=conditions.seed,
        min_keys=conditions.min_keys,
        max_queries=conditions.max_queries,
        after_batch=progress.after_batch,
        watchers=[*subject.watchers.values()],
    )
    tables: dict[str, pd.DataFrame] = {}
    diverged = has_diverged(part)
    for probe, plan, known in asked:
        if diverged:
            subject.note(probe.name, "its attention scores are not finite")
            continue
        if conditions.queries is not None and not probe.draws:
            subject.note(probe.name, "it needs every query, but --queries drew only some")
            continue
        progress.announce(f"{model.path}: {probe.name}", 0 if model.external else probe.steps(plan))
        try:
            tables |= probe.measure(subject, plan, known)
        except NotAvailableError as reason:
            subject.note(probe.name, str(reason))
    more = _cut_texts(model, batches, conditions) if model is whose else []
    more += remarks_on(model, batches, subject.seed)
    rows = REMARKS.of_rows({"model": model.path, **remark.to_dict(), "times": 1} for remark in more)
    remarks = pd.concat([part.remarks, subject.remarks, rows], ignore_index=True)
    return part.replace(**tables, remarks=remarks)


def has_diverged(part: Measurements) -> bool:
    """Return whether a model's scores or their ranges are not finite, which makes probes meaningless."""
    queries = part.queries[part.queries["kept"] > 0]  # a query that keeps no key has no dispersion
    return len(part.non_finite) > 0 or not np.isfinite(queries["dispersion"]).all()


def _counterfactual(model: LoadedModel, batches: Sequence[Batch], conditions: Conditions) -> tuple[int, ...]:
    """Return the k to measure: none if the model drops keys itself; defaults are limited to the length."""
    if model.external:
        return conditions.k
    if model.encoder.config.attention != "full":
        return ()
    length = max(map(longest, batches)) if conditions.k_lowers else max(conditions.k, default=1)
    return tuple(dict.fromkeys(min(k, length) for k in conditions.k))


def inputs_of(model: LoadedModel, conditions: Conditions) -> tuple[list[Batch], Tensor | None, str]:
    """Return the inputs to measure a model on."""
    given, size = conditions.inputs, conditions.batch_size
    if given is not None and model.external:
        return _cut(read_batches(given, model, size, conditions.texts), conditions.first, f"{given} (given)")
    if conditions.texts != AS_THEY_ARE:
        raise InputError(
            "--max-length, --tokenizer and --labels are for texts of external models. Of other inputs, "
            "semdiag.k_sweep(…, labels=…) takes labels, in Python."
        )
    if given is not None and given.suffix == ".txt":
        tokens, labels, source = model.text_inputs(given, conditions.samples, conditions.seed)
        return split(tokens, size), labels, source
    if given is not None:
        return _cut(split(read_inputs(given), size), conditions.first, f"{given} (given)")
    if model.batches is not None:
        if _counted(model.batches):
            return _cut(split(model.batches, size), conditions.first, "came with the model")
        first = list(first_samples(each(model.batches, size), conditions.samples))  # they may be endless
        return first, None, f"came with the model, the first {counted(sum(map(samples_of, first)), 'sample')}"
    if model.external:
        raise InputError(
            f"Name inputs for {model.path} with --inputs FILE: {_TEXTS if model.source == 'hugging face' else ''}"
            "token ids (.npy, .npz, .pt), or a .pt with a dictionary of the model's arguments"
            f"{', or return model and inputs from the function' if model.source == 'factory' else ''}."
        )
    tokens, labels, source = model.default_inputs(conditions.samples, conditions.seed)
    return split(tokens, size), labels, source


def _cut(batches: list[Batch], first: int | None, source: str) -> tuple[list[Batch], None, str]:
    held = sum(map(samples_of, batches))
    if first is None or first == held:
        return batches, None, source
    if first > held:
        raise InputError(f"The inputs hold only {counted(held, 'sample')} ({source}). Got samples={first}.")
    return list(first_samples(batches, first)), None, f"{source}, the first {first} of {held}"


def _counted(batches: Any) -> bool:
    """Return whether the batches know their number, unlike a generator or a loader of a stream."""
    try:
        return len(batches) >= 0
    except TypeError:
        return False


_TEXTS = "texts, one a line (.txt), "
_SHORT = 8  # factor by which short texts are shorter than the model's limit


def _cut_texts(model: LoadedModel, batches: Sequence[Batch], conditions: Conditions) -> list[Remark]:
    """Return remarks on texts that were cut, and on texts that are all short for the model."""
    given = conditions.inputs
    if given is None or given.suffix not in SUFFIXES or not model.external:
        return []
    samples, remarks = sum(map(samples_of, batches)), []
    cut, most = cut_texts(given, model, samples, conditions.texts)
    if cut:
        why = "by --max-length" if most == conditions.texts.max_length else "the model's limit"
        remarks.append(Remark("", f"texts were cut to {most} tokens, {why}: {cut} of {samples}", "texts-cut"))
    takes, longest_text = tokeniser_of(given, model, conditions.texts).takes, max(map(longest, batches))
    if takes is not None and longest_text * _SHORT <= takes:
        text = f"the texts have at most {longest_text:,} of the {counted(takes, 'token')} that the model takes"
        remarks.append(Remark("", f"{text}: they say nothing about long ones", "short-texts"))
    return remarks


def remarks_on(model: LoadedModel, batches: Sequence[Batch], seed: int) -> list[Remark]:
    """Return remarks on a model and its inputs that matter whatever is measured."""
    said = []
    if isinstance(model.module, Encoder):
        config, lengths = model.module.config, sorted({longest(batch) for batch in batches})
        usual = config.length if model.training is None or config.pad_as_token else model.training.length
        text = f"the inputs are {', '.join(map(str, lengths))} tokens long, but the model was trained on {usual}"
        said += [(text, "input-length")] * (lengths != [usual])
    if places := model.contradicted_by:
        said.append((f"the weights are not those recorded in {' and '.join(places)}", "weights-differ"))
    if model.not_loaded:
        said.append((f"{model.not_loaded}: they keep their random values", "weights-not-loaded"))
    if not model.external and model.encoder.config.attention == "redrawn":
        text = f"draws new random keys in every forward pass; measured with those of seed {seed}"
        said.append((text, "redrawn-keys"))
    return [Remark("", *each) for each in said]


def run_order(order: tuple[str, Conditions]) -> Measurements | str:
    """Measure the model at a path on one CPU thread, in a process of its own; everything here can be pickled."""
    path, conditions = order
    torch.set_num_threads(1)
    try:
        (model,) = load_all([path], conditions.config, conditions.head)
        device, conditions = _decided([model], conditions)
        inputs = Inputs(*inputs_of(model, conditions), model)
        return _surveyed(model, inputs, conditions, device, _prepared(conditions), True, Progress())
    except InputError as error:
        return str(error)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread in the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_in_parallel(
    orders: Sequence[tuple[str, Any]], workers: "Workers", ended: Callable[[str], None] = lambda path: None
) -> list[Any]:
    """Run several orders at once; the results do not depend on which worker runs which."""
    from semdiag_files.workers import TICK

    waiting, results = deque(enumerate(orders)), dict[int, Any]()
    running: dict[Any, tuple[int, str]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers.capacity:
                place, (path, order) = waiting.popleft()
                running[workers.submit(order)] = place, path
            for handle in workers.wait(list(running), TICK):
                number, path = running.pop(handle)
                outcome = workers.outcomes(handle)
                if outcome is None:
                    raise InputError(
                        f"{path}: its process was killed, perhaps for lack of memory. Try fewer --jobs."
                    )
                if isinstance(outcome, str):
                    raise InputError(outcome)
                results[number] = outcome
                ended(path)
    finally:
        workers.close()
    return [results[number] for number in range(len(orders))]
