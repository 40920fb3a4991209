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
from semdiag.capturing.pretrained import PREFIX, find_folder
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.memory import demand, fitting_batch, halving
from semdiag.measuring.calls.running import placed
from semdiag.measuring.measure import DTYPES, Conditions, measure
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.progress import SurveyProgress
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import REMARKS
from semdiag.measuring.words import counted
from semdiag_files import InputError
from semdiag_models import Encoder
from semdiag_models.train import find_device, with_float64

if TYPE_CHECKING:
    from semdiag_files.workers import Workers


class Inputs(NamedTuple):
    """Inputs on which models are measured."""

    batches: list[Batch]  # batches of samples
    labels: Tensor | None  # (N,) classes; None if unknown
    source: str  # origin in words
    model: LoadedModel  # model to which the inputs belong


def survey(
    models: Sequence[Path | LoadedModel],
    conditions: Conditions,
    progress: SurveyProgress | None = None,
    *,
    may_move_models: bool = False,
    inputs: Inputs | None = None,
) -> Measurements:
    """Load and measure several models in this process.

    may_move_models: whether loaded models may be moved to the device in place, rather than copied.
    inputs: on which all are measured; None: each on its own, or on those of the conditions.
    """
    progress = SurveyProgress() if progress is None else progress
    # All are loaded before the first is measured: a wrong path should not cost minutes.
    loaded = load_all(models, conditions.config, conditions.head)
    device, conditions = _decided(loaded, conditions)
    every_input = [inputs or Inputs(*inputs_of(model, conditions), model) for model in loaded]
    parts = []
    for model, source, model_inputs in zip(loaded, models, every_input, strict=True):
        may_move = may_move_models or not isinstance(source, LoadedModel)
        parts.append(_surveyed(model, model_inputs, conditions, device, may_move, progress))
    return _joined(parts, loaded, conditions)


def survey_elsewhere(
    models: Sequence[Path | LoadedModel],
    conditions: Conditions,
    measure_paths: Callable[[list[str], Conditions], list[Measurements]],
) -> Measurements:
    """Measure several models by a function that does it in other processes, and join their measurements."""
    loaded = load_all(models, conditions.config, conditions.head)
    _, conditions = _decided(loaded, conditions)
    return _joined(measure_paths([model.path for model in loaded], conditions), loaded, conditions)


def _joined(parts: Sequence[Measurements], loaded: Sequence[LoadedModel], conditions: Conditions) -> Measurements:
    """Join the measurements of models, with what the plans record."""
    joined = Measurements.concat(parts)
    samples = int(joined.models["samples"].max())
    joined.provenance.update(seed=conditions.seed, samples=samples)
    probe_samples = min(conditions.probe_samples or samples, samples)
    encoders = any(not model.external for model in loaded)
    for plan in conditions.plans:  # external models may have measured something else
        if encoders or len(joined[plan.tables()[0]]):
            joined.provenance.update(plan.provenance(samples, probe_samples))
    return joined


def _decided(loaded: Sequence[LoadedModel], conditions: Conditions) -> tuple[torch.device, Conditions]:
    """Return device and conditions for all models; encoders draw their keys by the seed from now on."""
    device = find_device(conditions.device)
    conditions = conditions.decided(loaded, device)
    for model in loaded if conditions.encoders_only else ():
        _ = model.encoder  # refuses any other model
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
    may_move: bool,
    progress: SurveyProgress,
) -> Measurements:
    """Measure one model, in batches that fit in memory."""
    if model.external and may_move:
        placed(model.module, device, DTYPES[conditions.dtype])  # in place: it may be large
    batches = inputs.batches
    size = conditions.batch_size
    memory = demand(model, batches, device, DTYPES[conditions.dtype])
    if memory is not None:
        masks = max((getattr(plan, "masks", 0) for plan in conditions.plans), default=0)
        largest_k = max((getattr(plan, "largest_k", 0) for plan in conditions.plans), default=0)
        k = largest_k or max(conditions.k, default=1)
        fitting, text = fitting_batch(memory, model.path, batches, device, k, masks, conditions.plans)
        progress.say(f"{model.path}: {text}.")
        if fitting < max(map(samples_of, batches)):
            size = fitting
            batches = [part for batch in batches for part in each(batch, size)]

    def run(cut: list[Batch], batch_size: int) -> Measurements:
        of_size = replace(conditions, batch_size=batch_size)
        return _measured(model, inputs._replace(batches=cut), of_size, device, progress)

    return halving(run, batches, size, lambda text: progress.say(f"{model.path}: {text}."))


def _measured(
    model: LoadedModel, inputs: Inputs, conditions: Conditions, device: torch.device, progress: SurveyProgress
) -> Measurements:
    """Measure one model in batches that may be too large."""
    dtype = DTYPES[conditions.dtype]
    subject = Subject(
        model,
        inputs.batches,
        inputs.labels,
        conditions.seed,
        conditions.batch_size,
        device,
        dtype,
        queries=conditions.queries,
        probe_samples=conditions.probe_samples,
        min_keys=conditions.min_keys,
        progress=progress,
        unfinished=conditions.unfinished,
    )
    for plan in conditions.plans:
        plan.before_statistics(subject)
    progress.announce(model.path, sum(map(samples_of, inputs.batches)))
    for plan in conditions.plans:
        subject.watch(plan)
    part = measure(
        model,
        inputs.batches,
        labels=inputs.labels,
        inputs=inputs.source,
        k=_counterfactual(model, inputs.batches, conditions),
        device=device,
        dtype=dtype,
        queries=conditions.queries,
        seed=conditions.seed,
        min_keys=conditions.min_keys,
        max_queries=conditions.max_queries,
        after_batch=progress.advance,
        watchers=[*subject.watchers.values()],
    )
    tables = _planned(subject, conditions, has_diverged(part))
    texts_cut = _cut_texts(model, inputs.batches, conditions) if model is inputs.model else []
    further = [*texts_cut, *remarks_on(model, inputs.batches, subject.seed)]
    rows = REMARKS.of_rows({"model": model.path, **remark.to_dict(), "times": 1} for remark in further)
    remarks = pd.concat([part.remarks, subject.remarks, rows], ignore_index=True)
    return part.replace(**tables, remarks=remarks)


def _planned(subject: Subject, conditions: Conditions, diverged: bool) -> dict[str, pd.DataFrame]:
    """Return the tables of all plans; what cannot be measured is noted with the subject."""
    tables: dict[str, pd.DataFrame] = {}
    for plan in conditions.plans:
        if diverged:
            subject.note(plan.name, "its attention scores are not finite")
            continue
        if conditions.queries is not None and not plan.takes_drawn_queries:
            subject.note(plan.name, "it needs every query, but --queries drew only some")
            continue
        steps = 0 if subject.model.external else plan.steps()
        subject.progress.announce(f"{subject.model.path}: {plan.name}", steps)
        try:
            tables |= plan.measure(subject)
        except NotAvailableError as reason:
            subject.note(plan.name, str(reason))
    return tables


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
    path = conditions.inputs
    size = conditions.batch_size
    if path is not None and model.external:
        return _cut(read_batches(path, model, size, conditions.texts), conditions.first, f"{path} (given)")
    if conditions.texts != AS_THEY_ARE:
        raise InputError(
            "--max-length, --tokenizer and --labels are for texts of external models. Of other inputs, "
            "semdiag.k_sweep(…, labels=…) takes labels, in Python."
        )
    if path is not None and path.suffix == ".txt":
        tokens, labels, source = model.text_inputs(path, conditions.samples, conditions.seed)
        return split(tokens, size), labels, source
    if path is not None:
        return _cut(split(read_inputs(path), size), conditions.first, f"{path} (given)")
    if model.batches is not None:
        if _counted(model.batches):
            return _cut(split(model.batches, size), conditions.first, "came with the model")
        first = list(first_samples(each(model.batches, size), conditions.samples))  # they may be endless
        return first, None, f"came with the model, the first {counted(sum(map(samples_of, first)), 'sample')}"
    if model.external:
        raise _no_inputs(model.path, model.source)
    tokens, labels, source = model.default_inputs(conditions.samples, conditions.seed)
    return split(tokens, size), labels, source


def check_inputs(paths: Sequence[Path], conditions: Conditions) -> None:
    """Refuse inputs that do not exist or that nobody named, before models are loaded."""
    if conditions.inputs is not None and not conditions.inputs.exists():
        raise InputError(f"{conditions.inputs} does not exist.")
    for path in map(str, paths):
        if conditions.inputs is None and path.startswith(PREFIX):
            find_folder(path)  # refuses one that is no model
            raise _no_inputs(path, "hugging face")


def _no_inputs(path: str, source: str) -> InputError:
    texts = "texts, one a line (.txt), " if source == "hugging face" else ""
    returned = ", or return model and inputs from the function" if source == "factory" else ""
    return InputError(
        f"Name inputs for {path} with --inputs FILE: {texts}token ids (.npy, .npz, .pt), or a .pt with a "
        f"dictionary of the model's arguments{returned}."
    )


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


_SHORT = 8  # factor by which short texts are shorter than the model's limit


def _cut_texts(model: LoadedModel, batches: Sequence[Batch], conditions: Conditions) -> list[Remark]:
    """Return remarks on texts that were cut, and on texts that are all short for the model."""
    path = conditions.inputs
    if path is None or path.suffix not in SUFFIXES or not model.external:
        return []
    samples = sum(map(samples_of, batches))
    remarks = []
    cut, most = cut_texts(path, model, samples, conditions.texts)
    if cut:
        why = "by --max-length" if most == conditions.texts.max_length else "the model's limit"
        remarks.append(Remark("", f"texts were cut to {most} tokens, {why}: {cut} of {samples}", "texts-cut"))
    takes = tokeniser_of(path, model, conditions.texts).takes
    longest_text = max(map(longest, batches))
    if takes is not None and longest_text * _SHORT <= takes:
        text = f"the texts have at most {longest_text:,} of the {counted(takes, 'token')} that the model takes"
        remarks.append(Remark("", f"{text}: they say nothing about long ones", "short-texts"))
    return remarks


def remarks_on(model: LoadedModel, batches: Sequence[Batch], seed: int) -> list[Remark]:
    """Return remarks on a model and its inputs that matter whatever is measured."""
    remarks = []
    if isinstance(model.module, Encoder):
        config = model.module.config
        lengths = sorted({longest(batch) for batch in batches})
        usual = config.length if model.training is None or config.pad_as_token else model.training.length
        text = f"the inputs are {', '.join(map(str, lengths))} tokens long, but the model was trained on {usual}"
        if lengths != [usual]:
            remarks.append((text, "input-length"))
    if places := model.contradicted_by:
        remarks.append((f"the weights are not those recorded in {' and '.join(places)}", "weights-differ"))
    if model.not_loaded:
        remarks.append((f"{model.not_loaded}: they keep their random values", "weights-not-loaded"))
    if not model.external and model.encoder.config.attention == "redrawn":
        text = f"draws new random keys in every forward pass; measured with those of seed {seed}"
        remarks.append((text, "redrawn-keys"))
    return [Remark("", *each) for each in remarks]


def run_order(order: tuple[str, Conditions]) -> Measurements | str:
    """Measure the model at a path on one CPU thread, in a process of its own; everything here can be pickled."""
    path, conditions = order
    torch.set_num_threads(1)
    try:
        (model,) = load_all([path], conditions.config, conditions.head)
        device, conditions = _decided([model], conditions)
        inputs = Inputs(*inputs_of(model, conditions), model)
        return _surveyed(model, inputs, conditions, device, may_move=True, progress=SurveyProgress())
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

    waiting = deque(enumerate(orders))
    results = dict[int, Any]()
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
