"""Which runs with masks a k-sweep makes, in which order, what they will take, and which are finished already."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import pandas as pd
from torch import Tensor

from semdiag.capturing.batches import Batch, each, first_samples, longest, only_token_ids, samples_of
from semdiag.capturing.rules import Keep
from semdiag.measuring.outputs import masked_language
from semdiag.measuring.subject import Subject
from semdiag.measuring.words import counted, duration
from semdiag.questions.k_sweep import KSweepPlan
from semdiag.questions.k_sweep.budgets import EXTERNAL_KINDS, OWN_KINDS, masks_of
from semdiag.questions.k_sweep.finished import (
    PAGE,
    FinishedRuns,
    code_digests,
    model_folder,
    structure_digest,
    texts_digest,
    versions,
    weights_digest,
)
from semdiag.questions.k_sweep.rerun import (
    LENGTHS_TABLE,
    NO_MASK,
    RERUN_FAILED,
    RERUN_TABLE,
    chunk_of,
    few_ks,
    rerun,
    rerun_ks,
    timed,
)
from semdiag.questions.k_sweep.top_scores import TopScores
from semdiag_files import InputError

Mask = tuple[str, int, Keep]  # name, k and rule
_AT_ONCE = 2048  # tokens of an external model's batch on a CPU: more are no faster, and a kill loses less
_WORTH_SAYING = 30.0  # seconds
_LONG_ENOUGH = 1024  # tokens of all inputs from which on an estimate is worth the passes that it takes
_UNEVEN = 1.5  # ratio of the lengths of texts from which on the shortest is timed, too


@dataclass(frozen=True, eq=False)
class RunSet:
    """Inputs, or pieces of them of one length, and the masks with which they run."""

    length: int  # tokens of a piece; 0: the inputs as they are
    batches: Sequence[Batch]
    masks: Sequence[Mask]
    steps: int = 1  # what a sample takes, in samples of the inputs

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return number_of_samples(self.batches)

    @property
    def runs(self) -> int:
        """Return the number of runs: of a batch with a mask, or without one."""
        return len(self.batches) * (1 + len(self.masks))

    def work(self) -> int:
        """Return what all runs take, in samples of the inputs."""
        return (1 + len(self.masks)) * self.steps * self.samples

    def places(self) -> Iterator[tuple[tuple[int, int, int], Batch]]:
        """Yield every batch with length of the pieces, first sample and number of samples."""
        first = 0
        for batch in self.batches:
            yield (self.length, first, samples_of(batch)), batch
            first += samples_of(batch)

    def first(self, number: int) -> "RunSet":
        """Return the first samples."""
        return replace(self, batches=list(first_samples(self.batches, max(1, number))))


def number_of_samples(batches: Iterable[Batch]) -> int:
    """Return the number of samples in batches."""
    return sum(map(samples_of, batches))


def run_with_masks(
    subject: Subject,
    scores: TopScores,
    most_keys: int,
    plan: KSweepPlan,
    extra_pass_samples: int = 0,
    statistics_seconds: float = 0.0,
) -> dict[str, pd.DataFrame]:
    """Run the model with masks, on its inputs and on pieces of them.

    scores: what is known of the inputs; most_keys: of a query.
    """
    labels = subject.labels
    inputs, pieces, uncut = _sets(subject, scores, most_keys, plan)
    tokens = max(map(longest, inputs.batches))
    runs = _Runs(subject, plan, statistics_seconds, _finished(subject, scores.batches, [inputs, *pieces]))
    samples = runs.fitting([inputs, *pieces], labels)
    if samples < inputs.samples:  # as much of the pieces
        inputs = inputs.first(samples)
        pieces = [each.first(samples * tokens // each.length) for each in pieces]
        labels = None if labels is None else labels[: inputs.samples]
    subject.progress.expect(extra_pass_samples + sum(each.work() for each in (inputs, *pieces)))
    with_masks = runs.of_inputs(inputs, labels)
    by_length = [with_masks.assign(length=tokens)] if uncut else []
    by_length += [runs.of(each).assign(length=each.length) for each in pieces]
    runs.finished.write_page()
    return {"rerun": with_masks, "rerun_lengths": LENGTHS_TABLE.of_parts(by_length)}


def _sets(
    subject: Subject, scores: TopScores, most_keys: int, plan: KSweepPlan
) -> tuple[RunSet, list[RunSet], bool]:
    """Return the inputs and the pieces of them, with their masks, and whether some pieces are the inputs."""
    kinds = plan.kinds or (EXTERNAL_KINDS if subject.model.external else OWN_KINDS)
    batches = _cut(subject, scores.batches)
    if subject.labels is None:
        batches = masked_language(subject.model, batches, subject.seed, subject.remark)
    tokens = max(map(longest, batches)) if plan.lengths else 1
    inputs = RunSet(0, batches, _masks(subject, scores, most_keys, plan, kinds))
    pieces = []
    for n, cut in scores.pieces.items():
        masks = masks_of(plan.ks or few_ks(n), subject.seed, kinds)
        pieces.append(RunSet(n, _cut(subject, cut), masks, max(1, round(n / tokens))))
    cut_anew = [each for each in pieces if subject.labels is not None or not _are_inputs(each, inputs, tokens)]
    return inputs, cut_anew, len(cut_anew) < len(pieces)


class _Runs:
    """Makes the runs of a plan on one set after another."""

    def __init__(
        self, subject: Subject, plan: KSweepPlan, statistics_seconds: float, finished: FinishedRuns
    ) -> None:
        self.subject = subject
        self.statistics_seconds = statistics_seconds  # that follow; 0: they went before
        self.plan = plan
        self.finished = finished
        self.optional = () if plan.kinds else EXTERNAL_KINDS[1:]

    def of(self, runs: RunSet, labels: Tensor | None = None) -> pd.DataFrame:
        """Run the model on a set."""
        subject = self.subject
        return rerun(
            subject.model,
            runs.batches,
            labels,
            runs.masks,
            subject.device,
            subject.dtype,
            subject.remark,
            self.optional,
            lambda samples: subject.progress.advance(runs.steps * samples),
            self.plan.jobs,
            runs.length,
            self.finished,
        )

    def of_inputs(self, inputs: RunSet, labels: Tensor | None) -> pd.DataFrame:
        """Run the model on its inputs; a refusal is a remark where the user did not ask for the runs."""
        try:
            with_masks = self.of(inputs, labels)
        except InputError as error:
            if self.plan.asked:
                raise
            self.subject.remark(f"not run with masks: {str(error).removesuffix('.')}", RERUN_FAILED)
            with_masks = RERUN_TABLE.empty()
        if self.plan.lengths and not with_masks["predictions"].sum():
            why = f"of {self.subject.model.path} the outputs are compared"
            raise InputError(f"--lengths is for models that predict tokens, and {why}.")
        return with_masks

    def fitting(self, sets: Sequence[RunSet], labels: Tensor | None) -> int:
        """Say what the runs take, and return how many of the inputs fit into the time that they have."""
        inputs = sets[0]
        tokens = sum(samples_of(batch) * longest(batch) for batch in inputs.batches)
        limit = self.plan.seconds
        if limit is None and (not self.subject.model.external or tokens < _LONG_ENOUGH):
            return inputs.samples
        try:
            seconds = sum(self._seconds(runs, labels if runs is inputs else None) for runs in sets)
        except InputError:  # refused once more when it is run
            return inputs.samples
        if limit is not None and seconds > limit:
            samples = max(1, int(limit / seconds * inputs.samples))
            if samples < inputs.samples:
                self.subject.remark(
                    f"run with masks on the first {samples:,} of {counted(inputs.samples, 'sample')}, as many as "
                    f"fit in about {limit / 60:g} min",
                    "rerun-samples",
                )
            return samples
        self._say(sum(runs.runs for runs in sets), seconds)
        return inputs.samples

    def _say(self, runs: int, seconds: float) -> None:
        if seconds < _WORTH_SAYING:
            return
        text = f"{self.subject.model.path}: {counted(runs, 'run')} with masks"
        if self.finished.runs:
            text += f", of which {len(self.finished.runs):,} are finished,"
        text += f" take about {duration(seconds)}"
        if self.statistics_seconds:
            text += f", then statistics {duration(self.statistics_seconds)}"
        if self.finished.folder is None:
            text += "; with --out DIR an interrupted command can go on"
        else:
            text += f"; if interrupted, the same command goes on; page: {self.finished.folder / PAGE}"
        self.subject.progress.say(f"{text}.")

    def _seconds(self, runs: RunSet, labels: Tensor | None) -> float:
        """Return about how long the unfinished runs of a set take; kinds of which none is finished run once."""
        unfinished = self._unfinished(runs)
        if not unfinished:
            return 0.0
        times = self._times(runs, labels)
        plain = min(times, key=lambda name: times[name][0][1], default=NO_MASK)
        total = 0.0
        for batch, names in unfinished:
            tokens = longest(batch) * samples_of(batch)
            total += tokens * sum(_per_token(times.get(name, []), longest(batch)) for name in [*names, plain])
        return total / self.plan.jobs

    def _unfinished(self, runs: RunSet) -> list[tuple[Batch, list[str]]]:
        """Return the batches with runs that are to be made, and their kinds."""
        batches = []
        for place, batch in runs.places():
            names = [name for name, k, _ in runs.masks if (*place, name, k) not in self.finished.runs]
            if names:
                batches.append((batch, names))
        return batches

    def _times(self, runs: RunSet, labels: Tensor | None) -> dict[str, list[tuple[int, float]]]:
        """Return length and seconds a token of runs of each kind; the first batch is run if there are none."""
        kinds = {name: list(masks) for name, masks in groupby(runs.masks, key=lambda mask: mask[0])}
        middle = {name: masks[len(masks) // 2] for name, masks in kinds.items()}
        times = self._finished_times(runs)
        pilot = [mask for name, mask in middle.items() if name not in times]
        if pilot:
            self._run_once(runs, runs.batches[0], pilot, labels, self.finished)
            times = self._finished_times(runs)
        usual = longest(runs.batches[0])
        uneven = max(runs.batches, key=lambda batch: abs(math.log(longest(batch) / usual)))
        if pilot and not 1 / _UNEVEN < longest(uneven) / usual < _UNEVEN:
            batch = next(each(uneven, 1)) if isinstance(uneven, Tensor | Mapping) else uneven
            seconds = self._run_once(runs, batch, [*middle.values()], None, FinishedRuns())
            for name, value in seconds.items():
                times.setdefault(name, []).append((longest(batch), value / (longest(batch) * samples_of(batch))))
        return times

    def _finished_times(self, runs: RunSet) -> dict[str, list[tuple[int, float]]]:
        """Return length and seconds a token of the finished runs of a set, by kind."""
        times = dict[str, list[tuple[int, float]]]()
        for place, batch in runs.places():
            for name, k, _ in runs.masks:
                run = self.finished.runs.get((*place, name, k))
                if run is not None and run.seconds:
                    length = longest(batch)
                    times.setdefault(name, []).append((length, run.seconds / (length * samples_of(batch))))
        return times

    def _run_once(
        self, runs: RunSet, batch: Batch, masks: Sequence[Mask], labels: Tensor | None, finished: FinishedRuns
    ) -> dict[str, float]:
        subject = self.subject
        labels = None if labels is None else labels[: samples_of(batch)]
        chunk = chunk_of(runs.samples)
        place = subject.device, subject.dtype
        return timed(subject.model, batch, labels, masks, *place, self.optional, chunk, runs.length, finished)


def _per_token(times: Sequence[tuple[int, float]], length: int) -> float:
    """Return the seconds a token at a length, on a line through those at others."""
    if not times:
        return 0.0
    lengths, seconds = np.array(times).T
    if len({*lengths}) == 1:
        return float(seconds.mean())
    slope, start = np.polyfit(lengths, seconds, 1)
    return max(float(start + slope * length), float(seconds.min()) / 2)


def _cut(subject: Subject, batches: Iterable[Batch]) -> list[Batch]:
    """Return batches of as few tokens as a CPU needs at once: a kill loses less."""
    if not subject.model.external or subject.device.type != "cpu":
        return list(batches)
    parts: list[Batch] = []
    for batch in batches:
        if only_token_ids(batch) and isinstance(batch, Tensor | Mapping):
            parts += each(batch, max(1, _AT_ONCE // longest(batch)))
        else:
            parts.append(batch)
    return parts


def _finished(subject: Subject, texts: Iterable[Batch], sets: Sequence[RunSet]) -> FinishedRuns:
    """Return the finished runs of the command on texts; refuse those of another."""
    total = sum(runs.runs for runs in sets)
    if subject.unfinished is None:
        return FinishedRuns(total=total)
    loaded = subject.model
    inputs = sets[0]
    named = {n: " ".join(f"{name}-{k}" for name, k, _ in runs.masks) for n, runs in ((r.length, r) for r in sets)}
    conditions = {
        **versions(),
        **code_digests(loaded.module),
        "structure": structure_digest(loaded.module),
        "weights": loaded.sha256[:12] or weights_digest(loaded.module),
        "texts": texts_digest(texts, subject.labels),
        "number of texts": str(inputs.samples),
        "masks (--kinds, --k)": named[0],
        "--lengths": " ".join(str(length) for length in named if length) or "none",
        "--seed": str(subject.seed),
        "--dtype": str(subject.dtype).removeprefix("torch."),
        "--device": subject.device.type,
    }
    return FinishedRuns.opened(model_folder(subject.unfinished, loaded.path), conditions, total)


def _masks(
    subject: Subject, scores: TopScores, most_keys: int, plan: KSweepPlan, kinds: Sequence[str]
) -> list[Mask]:
    """Return the masks with which the inputs run."""
    if plan.ks:
        return masks_of(plan.ks, subject.seed, kinds, plan.kinds)
    most = max(1, most_keys - 1)
    ks = rerun_ks(min(scores.largest, most)) if scores.every_k else few_ks(most + 1)
    return masks_of(ks, subject.seed, kinds, plan.kinds, subject.remark)


def _are_inputs(pieces: RunSet, inputs: RunSet, tokens: int) -> bool:
    """Return whether pieces are the inputs themselves, and run with the same masks."""
    same_masks = [mask[:2] for mask in pieces.masks] == [mask[:2] for mask in inputs.masks]
    return pieces.length == tokens and same_masks and pieces.samples == inputs.samples
