"""Make texts from a model's own tokenizer, and let the model read them with and without masks."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.inputs import TextOptions, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.pretrained import first_line
from semdiag.capturing.rules import Keep
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.calls.running import in_evaluation, no_room, running
from semdiag.measuring.calls.tile_weights import TILES, TileWeights
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.k_sweep.budgets import OF_ENGINES, masks_of
from semdiag.questions.k_sweep.rerun import NO_MASK
from semdiag.questions.retrieval import TASKS, RetrievalPlan
from semdiag_files import InputError

RETRIEVAL = Table(
    "retrieval",
    "One row per task, length, depth, text (sample) and mask (none: the model as it is). distance: tokens from "
    "the first of the answer back to the first of the same answer where it was told. chance: that the answer is "
    "right if one of those that were told is drawn. tokens: of the answer, of which hits were the likeliest after "
    "those before them; loss: their cross-entropy. text_loss: that of the other text_tokens (nats, sums).",
    columns_of(
        "model task str; length distance sample int32; depth chance float64; mask str; k tokens hits text_tokens "
        "int64; loss text_loss float64"
    ),
)
_CANDIDATES = 4  # numbers that are told, one of which is asked for
# Who has a number; how it is told, with # in place of the number; what is told later; and the question.
_TEXTS = {
    "passkey": (
        ("pass key", "phone number", "room number", "bus number"), " The {} is#.", "",
        " What is the {}? The {} is",
    ),
    "keys": (
        ("red", "blue", "green", "white"), " The key of the {} door is#.", "",
        " Which key opens the {} door? The key of the {} door is",
    ),
    "variables": (
        ("VAR A", "VAR B", "VAR C", "VAR D"), " {} =#.", " {other} = {}.", " What number is {other}? It is",
    ),
}  # fmt: skip
_OTHERS = "VAR W", "VAR X", "VAR Y", "VAR Z"  # what the later statements are about
_TOKENS = 4096  # in a forward pass
_ROWS = 256  # positions whose logits are compared at a time
_SEGMENT = 24
_ANSWER = 4  # random tokens that stand twice in a text of induction; the last of them are the answer
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
    distance: int  # tokens from the first of the answer back to the first of the same answer where it was told
    chance: float  # that the answer is right if one of those that were told is drawn


class _Statements(NamedTuple):
    """What a text tells, in tokens."""

    fact: list[int]  # what is asked for
    answer_at: int  # place of the answer in it
    before: list[list[int]]  # distractors in front of it
    after: list[list[int]]  # and behind it
    room: tuple[int, int]  # the most tokens of distractors that may stand in front of it and behind it
    question: list[int]
    answer: list[int]


class Maker:
    """Makes texts from a tokenizer."""

    def __init__(self, model: LoadedModel) -> None:
        if not model.external:
            raise NotAvailableError(f"{model.path} is an encoder, without a language head")
        options = TextOptions(tokenizer=next(iter(model.tokenizers), None))
        tokenise = tokeniser_of(Path(model.path), model, options)
        self._path = model.path
        self._takes = tokenise.takes
        self.tokenizer = tokenise._tokenizer
        first = self.tokenizer("a")["input_ids"][:1]
        self._begin = first if first == [self.tokenizer.bos_token_id] else []
        special = {self.tokenizer.unk_token_id, *self.tokenizer.all_special_ids}
        self._known = [n for n in range(len(self.tokenizer)) if n not in special]

    def text(self, task: str, length: int, depth: float, seed: int, sample: int = 0) -> Told:
        """Return a text of a task: the fact that is asked for stands at the depth, distractors around it.

        How many distractors stand in front of it is drawn, whatever the depth: no rule that goes by the order of
        what is told is right more often than by chance.
        """
        # Texts of two lengths share nothing.
        place = [seed, TASKS.index(task), length, round(1000 * depth), sample]
        draws = torch.Generator().manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        statements = self._induction(draws) if task == "induction" else self._told(task, draws)
        ends = len(self._begin) + len(statements.question) + len(statements.answer)
        space = (
            length - ends - len(statements.fact) - sum(statements.room)
        )  # in which the fact moves with the depth
        if space < 0:
            raise InputError(f"A text of {task} takes {length - space} tokens of {self._path}. Got {length}.")
        if self._takes is not None and length > self._takes:
            raise InputError(f"{self._path} takes texts of up to {self._takes:,} tokens. Got --lengths {length}.")
        start = statements.room[0] + round(depth * space)
        behind = length - ends - len(statements.fact) - start
        body = self._filled(task, statements.before, start, draws) + statements.fact
        body += self._filled(task, statements.after, behind, draws)
        ids = torch.tensor([*self._begin, *body, *statements.question, *statements.answer])
        distance = length - len(statements.answer) - len(self._begin) - start - statements.answer_at
        chance = len(self._known) ** -len(statements.answer) if task == "induction" else 1 / _CANDIDATES
        return Told(ids, len(statements.answer), distance, chance)

    def _told(self, task: str, draws: torch.Generator) -> _Statements:
        names, telling, later, question = _TEXTS[task]
        first = 0 if task == "passkey" else int(torch.randint(_CANDIDATES, (), generator=draws))
        other_names = [n for n in torch.randperm(_CANDIDATES, generator=draws).tolist() if n != first]
        numbers = self._numbers(draws)
        stated = {n: self._ids(telling.format(names[n]), numbers[n]) for n in (first, *other_names)}
        follows = torch.randperm(_CANDIDATES, generator=draws).tolist() if later else []
        links = [self._ids(later.format(names[n], other=_OTHERS[n])) for n in follows]
        rank = int(torch.randint(_CANDIDATES, (), generator=draws))
        around = sum(len(stated[n]) for n in other_names)
        question_ids = question.replace("{}", names[first]).format(other=_OTHERS[first])
        start = telling.format(names[first]).split("#")[0]
        return _Statements(
            stated[first],
            len(self._ids(start)),
            [stated[n] for n in other_names[:rank]],
            [*(stated[n] for n in other_names[rank:]), *links],
            (around, around + sum(map(len, links))),
            self._ids(question_ids),
            numbers[first],
        )

    def _numbers(self, draws: torch.Generator) -> list[list[int]]:
        """Return numbers of five digits, no two of which begin with the same: their first tokens differ."""
        firsts = torch.randperm(9, generator=draws)[:_CANDIDATES] + 1
        rest = torch.randint(10_000, (_CANDIDATES,), generator=draws)
        numbers = [self._ids(f" {number}") for number in (10_000 * firsts + rest).tolist()]
        if not {*numbers[0]} & {*self._known}:
            raise InputError(f"{self._path}: its tokenizer makes nothing of the pass key. Take --tasks induction.")
        return numbers

    def _induction(self, draws: torch.Generator) -> _Statements:
        segment = self._drawn(_SEGMENT, draws)
        question_ids = segment[:-_ANSWER]
        return _Statements(segment, len(question_ids), [], [], (0, 0), question_ids, segment[-_ANSWER:])

    def _filled(self, task: str, parts: list[list[int]], tokens: int, draws: torch.Generator) -> list[int]:
        """Return so many tokens: statements at random places of filler."""
        room = tokens - sum(map(len, parts))
        filler = self._filler(task, room, draws)
        cuts = sorted(torch.randint(room + 1, (len(parts),), generator=draws).tolist())
        ids: list[int] = []
        for first, end, part in zip([0, *cuts], [*cuts, room], [*parts, []], strict=True):
            ids += filler[first:end] + part
        return ids

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


def retrieval(subject: Subject, plan: RetrievalPlan) -> Mapping[str, pd.DataFrame]:
    """Let a model read texts as it is, and with each mask."""
    model = subject.model
    maker = Maker(model)
    subject.progress.expect(plan.forwards)
    rows = list[dict[str, Any]]()
    tables = [TILES.empty()]
    restricting = _masks(subject, plan)
    masks = [(NO_MASK, 0, None), *restricting]
    tiled = [
        kind for kind in plan.kinds if kind.startswith(OF_ENGINES) and kind in {mask[0] for mask in restricting}
    ]
    for length in plan.lengths:
        if tiled:
            weights = TileWeights(tiled, plan.ks)
            first = maker.text(plan.tasks[0], length, plan.depths[0], subject.seed)
            with running(model, weights.add, subject.device, subject.dtype) as run:
                run({"input_ids": first.ids[None]})
            tables.append(weights.table(model.path))
        places = product(plan.tasks, plan.depths, range(plan.samples))
        with in_evaluation(model, subject.device, subject.dtype) as (module, device, _):
            while some := list(islice(places, max(1, _TOKENS // length))):
                part = [
                    (
                        {"task": task, "length": length, "depth": depth, "sample": sample},
                        maker.text(task, length, depth, subject.seed, sample),
                    )
                    for task, depth, sample in some
                ]
                ids = torch.stack([text.ids for _, text in part]).to(device)
                for mask, k, keep in masks:
                    with nullcontext() if keep is None else sparsify(module, keep):
                        logits = _logits(model.path, module, ids)
                    for (place, text), row in zip(part, logits, strict=True):
                        rows.append({"model": model.path, **place, "mask": mask, "k": k, **_read(row, text)})
                    subject.progress.advance(len(part))
    end = maker.tokenizer.decode(first_text(model, plan, subject.seed)[0, -60:].tolist())
    subject.remark(f"the first text ends: {' '.join(end.split())}", "retrieval-text")
    return {"retrieval": RETRIEVAL.of_rows(rows), "tiles": TILES.of_parts(tables)}


def _masks(subject: Subject, plan: RetrievalPlan) -> list[tuple[str, int, Keep]]:
    """Return the masks; kinds that have none for so few keys are left out, and that is said."""
    left_out: list[str] = []

    def leave_out(text: str, code: str) -> None:
        left_out.append(text)
        subject.remark(text, code)
        subject.progress.say(f"{text}.")

    masks = masks_of(plan.ks, subject.seed, plan.kinds, plan.kinds, leave_out)
    if not masks:
        raise InputError(f"No mask is left to read with: {'; '.join(left_out)}.")
    return masks


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


def _read(logits: Tensor, text: Told) -> dict[str, Any]:
    targets = text.ids[1:].to(logits.device)
    hits = list[Tensor]()
    losses = list[Tensor]()
    for tokens, scores in zip(torch.split(targets, _ROWS), torch.split(logits[:-1], _ROWS), strict=True):
        part = scores.float()
        hits.append(part.argmax(-1) == tokens)
        losses.append(F.cross_entropy(part, tokens, reduction="none"))
    right = torch.cat(hits).cpu()
    loss = torch.cat(losses).double().cpu()
    loss = loss.where(loss.isfinite(), math.inf)
    answer_loss = loss[-text.answer :]
    rest = loss[: -text.answer]
    counts: dict[str, Any] = {
        "tokens": text.answer,
        "hits": int(right[-text.answer :].sum()),
        "text_tokens": len(rest),
    }
    counts |= {"distance": text.distance, "chance": text.chance}
    return {**counts, "loss": float(answer_loss.sum()), "text_loss": float(rest.sum())}
