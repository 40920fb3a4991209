"""Make texts from a model's own tokenizer, and let the model read them with and without masks."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.inputs import TextOptions, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.pretrained import first_line
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.running import in_evaluation, no_room, running
from semdiag.measuring.calls.tile_weights import TILES, TileWeights
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.k_sweep.budgets import OF_ENGINES, masks_of
from semdiag.questions.k_sweep.rerun import NO_MASK
from semdiag.questions.retrieval import RetrievalPlan
from semdiag_files import InputError

RETRIEVAL = Table(
    "retrieval",
    "One row per task, length, text and mask (none: the model as it is). distance: tokens from the answer back to "
    "where it was told. tokens: of the answer, of which hits were the likeliest after those before them; loss: "
    "their cross-entropy. text_loss: that of the other text_tokens (nats, sums).",
    columns_of(
        "model task str; length distance sample int32; mask str; k tokens hits text_tokens int64; loss text_loss "
        "float64"
    ),
)
# What is told, piece by piece, with # in place of the answer; and the question.
_TEXTS = {
    "passkey": ([" The pass key is#. Remember it:#."], " What is the pass key? The pass key is"),
    "variables": ([" VAR X =#.", " VAR Y = VAR X."], " VAR Y is equal to VAR X. VAR Y ="),
}
_TOKENS = 4096  # in a forward pass
_ROWS = 256  # positions whose logits are compared at a time
_SEGMENT, _ANSWER = 24, 4  # random tokens that stand twice in a text of induction; the last of them are the answer
_DOORS = "red", "blue", "green", "white"
_FILLER = (
    ("farmer", "teacher", "captain", "baker", "doctor", "painter", "driver", "singer", "judge", "pilot"),
    ("saw", "found", "carried", "repaired", "sold", "painted", "forgot", "cleaned", "described", "bought"),
    ("bridge", "lamp", "garden", "boat", "letter", "clock", "window", "basket", "piano", "table", "horse", "map"),
    ("in spring", "at night", "near the river", "on Monday", "before lunch", "after the storm", "in the old town"),
)


class Told(NamedTuple):
    """A text, and where its answer stands."""

    ids: Tensor  # (L,) int64
    answer: int  # number of its last tokens that are the answer
    distance: int  # tokens from the answer back to where it was told


class Maker:
    """Makes texts from a tokenizer."""

    def __init__(self, model: LoadedModel) -> None:
        if not model.external:
            raise NotAvailableError(f"{model.path} is an encoder, without a language head")
        options = TextOptions(tokenizer=next(iter(model.tokenizers), None))
        tokenise = tokeniser_of(Path(model.path), model, options)
        self._path, self._takes, self.tokenizer = model.path, tokenise.takes, tokenise._tokenizer
        first = self.tokenizer("a")["input_ids"][:1]
        self._begin = first if first == [self.tokenizer.bos_token_id] else []
        special = {self.tokenizer.unk_token_id, *self.tokenizer.all_special_ids}
        self._known = [n for n in range(len(self.tokenizer)) if n not in special]

    def text(self, task: str, length: int, depth: float, seed: int) -> Told:
        """Return a text of a task: what is told first stands at the depth, the rest evenly behind it."""
        draws = torch.Generator().manual_seed(seed)
        told, question, answer = self._told(task, draws)
        room = length - len(self._begin) - sum(map(len, told)) - len(question) - len(answer)
        if room < 0:
            raise InputError(f"A text of {task} takes {length - room} tokens of {self._path}. Got {length}.")
        if self._takes is not None and length > self._takes:
            raise InputError(f"{self._path} takes texts of up to {self._takes:,} tokens. Got --lengths {length}.")
        filler, parts, last = self._filler(task, room, draws), [*self._begin], 0
        cuts = [round(room * (depth + (1 - depth) * n / len(told))) for n in range(len(told))]
        for cut, each in zip(cuts, told, strict=True):
            parts += filler[last:cut] + each
            last = cut
        ids = torch.tensor([*parts, *filler[last:], *question, *answer])
        return Told(ids, len(answer), length - len(answer) - len(self._begin) - cuts[0])

    def _told(self, task: str, draws: torch.Generator) -> tuple[list[list[int]], list[int], list[int]]:
        if task == "induction":
            segment = self._drawn(_SEGMENT, draws)
            return [segment], segment[:-_ANSWER], segment[-_ANSWER:]
        drawn = torch.randint(10_000, 100_000, (len(_DOORS),), generator=draws).tolist()
        answer, *others = [self._ids(f" {number}") for number in drawn]
        if not {*answer} & {*self._known}:
            raise InputError(f"{self._path}: its tokenizer makes nothing of the pass key. Take --tasks induction.")
        if task in _TEXTS:
            told, question = _TEXTS[task]
            return [self._ids(text, answer) for text in told], self._ids(question), answer
        doors = [_DOORS[n] for n in torch.randperm(len(_DOORS), generator=draws).tolist()]
        keys = [f" The key of the {door} door is" for door in doors]
        every = [self._ids(f"{key}#.", number) for key, number in zip(keys, [answer, *others], strict=True)]
        return every, self._ids(f" Which key opens the {doors[0]} door?#", self._ids(keys[0])), answer

    def _ids(self, text: str, between: Sequence[int] = ()) -> list[int]:
        """Return the tokens of a text, with others in place of each #."""
        first, *rest = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split("#")]
        return [*first, *(token for part in rest for token in (*between, *part))]

    def _drawn(self, tokens: int, draws: torch.Generator) -> list[int]:
        return [self._known[n] for n in torch.randint(len(self._known), (tokens,), generator=draws).tolist()]

    def _filler(self, task: str, tokens: int, draws: torch.Generator) -> list[int]:
        if task == "induction":
            return self._drawn(tokens, draws)
        ids: list[int] = []
        while len(ids) < tokens:
            words = [part[int(torch.randint(len(part), (), generator=draws))] for part in _FILLER]
            ids += self._ids(" The {} {} the {} {}.".format(*words)) or self._known[:1]
        return ids[:tokens]


def first_text(model: LoadedModel, plan: RetrievalPlan, seed: int) -> Tensor:
    """Return the first of the texts, (1, L); refuse a length that does not suit the model or a task."""
    maker = Maker(model)
    texts = [maker.text(task, n, plan.depths[0], seed) for n, task in product(plan.lengths, plan.tasks)]
    return texts[0].ids[None]


def retrieval(subject: Subject, plan: RetrievalPlan, prepared: Any = None) -> Mapping[str, pd.DataFrame]:
    """Let a model read texts as it is, and with each mask."""
    model, maker = subject.model, Maker(subject.model)
    rows, tables = list[dict[str, Any]](), [TILES.empty()]
    masks = [(NO_MASK, 0, None), *masks_of(plan.ks, subject.seed, plan.kinds, plan.kinds)]
    tiled = [kind for kind in plan.kinds if kind.startswith(OF_ENGINES)]
    for length in plan.lengths:
        texts = [
            ({"task": task, "length": length, "sample": sample}, maker.text(task, length, depth, seed))
            for task, depth, sample in product(plan.tasks, plan.depths, range(plan.samples))
            for seed in [subject.seed + 7919 * sample + round(1000 * depth)]
        ]
        if tiled:
            weights = TileWeights(tiled, plan.ks)
            with running(model, weights.add, subject.device, subject.dtype) as run:
                run({"input_ids": texts[0][1].ids[None]})
            tables.append(weights.table(model.path))
        at_once = max(1, _TOKENS // length)
        with in_evaluation(model, subject.device, subject.dtype) as (module, device, _):
            for start in range(0, len(texts), at_once):
                part = texts[start : start + at_once]
                ids = torch.stack([told.ids for _, told in part]).to(device)
                for mask, k, keep in masks:
                    with nullcontext() if keep is None else sparsify(module, keep):
                        logits = _logits(model.path, module, ids)
                    for (place, told), row in zip(part, logits, strict=True):
                        rows.append({"model": model.path, **place, "mask": mask, "k": k, **_read(row, told)})
                    subject.after_point(len(part))
    end = maker.tokenizer.decode(first_text(model, plan, subject.seed)[0, -60:].tolist())
    subject.remark(f"the first text ends: {' '.join(end.split())}", "retrieval-text")
    return {"retrieval": RETRIEVAL.of_rows(rows), "tiles": TILES.of_parts(tables)}


def _logits(path: str, module: nn.Module, ids: Tensor) -> Tensor:
    try:
        output = batching.call(module, {"input_ids": ids})
    except InputError:
        raise
    except Exception as error:  # models raise anything
        full = no_room(path, {"input_ids": ids}, error)
        raise full or InputError(f"{path} cannot read {ids.shape[1]:,} tokens ({first_line(error)}).") from error
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or logits.shape[2] <= int(ids.max()):
        raise InputError(f"{path} has no language head that scores each token: take a causal language model.")
    return logits


def _read(logits: Tensor, told: Told) -> dict[str, Any]:
    targets, hits, losses = told.ids[1:].to(logits.device), list[Tensor](), list[Tensor]()
    for wanted, given in zip(torch.split(targets, _ROWS), torch.split(logits[:-1], _ROWS), strict=True):
        part = given.float()
        hits.append(part.argmax(-1) == wanted)
        losses.append(F.cross_entropy(part, wanted, reduction="none"))
    right, loss = torch.cat(hits).cpu(), torch.cat(losses).double().cpu()
    loss = loss.where(loss.isfinite(), math.inf)
    own, rest = loss[-told.answer :], loss[: -told.answer]
    counts = {"tokens": told.answer, "hits": int(right[-told.answer :].sum()), "text_tokens": len(rest)}
    return {"distance": told.distance, **counts, "loss": float(own.sum()), "text_loss": float(rest.sum())}


PROBE = Probe(
    "retrieval",
    RetrievalPlan,
    (RETRIEVAL, TILES),
    retrieval,
    provenance=lambda plan, samples, few: {
        "retrieval_samples": plan.samples,
        "retrieval_depths": list(plan.depths),
    },
)
