"""Make texts from a model's own tokenizer, and let the model read them with and without masks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.inputs import TextOptions, tokeniser_of
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.sparsify import sparsify
from semdiag.measuring.calls.running import in_evaluation, no_room, running
from semdiag.measuring.calls.tile_weights import TILES, TileWeights
from semdiag.measuring.probe import Probe, Subject
from semdiag.measuring.table import Table
from semdiag.questions.k_sweep.budgets import OF_ENGINES, masks_of
from semdiag.questions.k_sweep.rerun import NO_MASK
from semdiag.questions.retrieval import RetrievalPlan
from semdiag_models import InputError

RETRIEVAL = Table(
    "retrieval",
    "One row per task, length, text and mask (none: the model as it is). distance: tokens from the answer back to "
    "where it was told. tokens: of the answer, of which hits were the likeliest after those before them; loss: "
    "their cross-entropy. text_loss: that of the other text_tokens (nats, sums).",
    {
        "model": "str",
        "task": "str",
        **dict.fromkeys(("length", "distance", "sample"), "int32"),
        "mask": "str",
        **dict.fromkeys(("k", "tokens", "hits", "text_tokens"), "int64"),
        **dict.fromkeys(("loss", "text_loss"), "float64"),
    },
)
_TOKENS = 4096  # in a forward pass
_ROWS = 256  # positions whose logits are compared at a time
_SEGMENT = 24  # random tokens that stand twice in a text of induction, the last four of them the answer
_WHO = "farmer", "teacher", "captain", "baker", "doctor", "painter", "driver", "singer", "judge", "pilot"
_DID = "saw", "found", "carried", "repaired", "sold", "painted", "forgot", "cleaned", "described", "bought"
_WHAT = "bridge", "lamp", "garden", "boat", "letter", "clock", "window", "basket", "piano", "table", "horse", "map"
_WHEN = (
    "in spring",
    "at night",
    "near the river",
    "on Monday",
    "before lunch",
    "after the storm",
    "in the old town",
)
_DOORS = "red", "blue", "green", "white"


@dataclass(frozen=True, eq=False)
class Told:
    """A text, and where its answer stands."""

    ids: Tensor  # (L,) int64
    answer: int  # number of its last tokens that are the answer
    distance: int  # tokens from the answer back to where it was told


class Maker:
    """Makes texts of one length after another from a tokenizer."""

    def __init__(self, model: LoadedModel) -> None:
        if not model.external:
            raise InputError(
                f"{model.path} is an encoder, without a language head: retrieval asks for the next token."
            )
        self._tokenizer = tokeniser_of(Path(model.path), model, TextOptions())._tokenizer
        self._name = model.path
        one = self._tokenizer("a")["input_ids"]
        begin = self._tokenizer.bos_token_id
        self._begin = [begin] if begin is not None and one[:1] == [begin] else []
        special = set(self._tokenizer.all_special_ids)
        self._words = [n for n in range(min(len(self._tokenizer), 50_000)) if n not in special]

    def text(self, task: str, length: int, depth: float, seed: int) -> Told:
        """Return a text of a task."""
        draws = torch.Generator().manual_seed(seed)
        if task == "induction":
            return self._induction(length, depth, draws)
        told, question, answer = getattr(self, f"_{task}")(draws)
        start = [*self._begin, *self._ids("Remember what this text says.\n")]
        room = length - len(start) - sum(map(len, told)) - len(question) - len(answer)
        if room < 0:
            raise InputError(
                f"A text of {task} takes {length - room} tokens of {self._name}. Got --lengths {length}."
            )
        filler = self._filler(room, draws)
        # The first thing is told at its depth, the others at equal distances behind it.
        cuts = [round(room * (depth + (1 - depth) * n / len(told))) for n in range(len(told))]
        parts, last = [*start], 0
        for cut, each in zip(cuts, told, strict=True):
            parts += filler[last:cut]
            parts += each
            last = cut
        ids = torch.tensor([*parts, *filler[last:], *question, *answer])
        return Told(ids, len(answer), length - len(answer) - len(start) - cuts[0])

    def _passkey(self, draws: torch.Generator) -> tuple[list[list[int]], list[int], list[int]]:
        answer = self._number(draws)
        told = [*self._ids(" The pass key is"), *answer, *self._ids(". Remember it:"), *answer, *self._ids(".")]
        return [told], self._ids(" What is the pass key? The pass key is"), answer

    def _keys(self, draws: torch.Generator) -> tuple[list[list[int]], list[int], list[int]]:
        numbers = [self._number(draws) for _ in _DOORS]
        told = [
            [*self._ids(f" The key of the {door} door is"), *number, *self._ids(".")]
            for door, number in zip(_DOORS, numbers, strict=True)
        ]
        asked = int(torch.randint(len(told), (), generator=draws))
        order = [asked, *(n for n in range(len(told)) if n != asked)]
        question = self._ids(f" Which key opens the {_DOORS[asked]} door? The key of the {_DOORS[asked]} door is")
        return [told[n] for n in order], question, numbers[asked]

    def _variables(self, draws: torch.Generator) -> tuple[list[list[int]], list[int], list[int]]:
        answer = self._number(draws)
        told = [[*self._ids(" VAR X ="), *answer, *self._ids(".")], self._ids(" VAR Y = VAR X.")]
        return told, self._ids(" The value of VAR Y is the value of VAR X. VAR Y ="), answer

    def _induction(self, length: int, depth: float, draws: torch.Generator) -> Told:
        room = length - 2 * _SEGMENT - len(self._begin)
        if room < 0:
            raise InputError(f"A text of induction takes at least {length - room} tokens. Got --lengths {length}.")
        places = torch.randint(len(self._words), (room + _SEGMENT,), generator=draws).tolist()
        words, cut = [self._words[place] for place in places], round(room * depth)
        text = [*self._begin, *words, *words[cut : cut + _SEGMENT]]
        return Told(torch.tensor(text), 4, room - cut + _SEGMENT)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _number(self, draws: torch.Generator) -> list[int]:
        text = f" {int(torch.randint(10_000, 100_000, (), generator=draws))}"
        ids = self._ids(text)
        known = [n for n in ids if n not in (self._tokenizer.unk_token_id, *self._tokenizer.all_special_ids)]
        if not known:
            raise InputError(
                f"The tokenizer of {self._name} makes nothing of the pass key{text}: take --tasks induction."
            )
        return ids

    def _filler(self, tokens: int, draws: torch.Generator) -> list[int]:
        ids: list[int] = []
        while len(ids) < tokens:
            who, did, what, when = (
                part[int(torch.randint(len(part), (), generator=draws))] for part in (_WHO, _DID, _WHAT, _WHEN)
            )
            more = self._ids(f" The {who} {did} the {what} {when}.")
            if not more:
                raise InputError(f"The tokenizer of {self._name} makes no token of filler text.")
            ids += more
        return ids[:tokens]


def first_text(model: LoadedModel, plan: RetrievalPlan, seed: int) -> Tensor:
    """Return the first of the texts, (1, L), whose attention is measured."""
    return Maker(model).text(plan.tasks[0], plan.lengths[0], plan.depths[0], seed).ids[None]


def retrieval(subject: Subject, plan: RetrievalPlan, prepared: Any = None) -> Mapping[str, pd.DataFrame]:
    """Let a model read texts as it is, and with each mask."""
    maker, rows = Maker(subject.model), list[dict[str, Any]]()
    texts = [
        (task, length, maker.text(task, length, depth, subject.seed + 7919 * sample + round(1000 * depth)), sample)
        for length in plan.lengths
        for task in plan.tasks
        for depth in plan.depths
        for sample in range(plan.samples)
    ]
    masks = [(NO_MASK, 0, None), *masks_of(plan.ks, subject.seed, plan.kinds, plan.kinds)]
    with in_evaluation(subject.model, subject.device, subject.dtype) as (module, device, _):
        for group in _batches(texts):
            ids = torch.stack([told.ids for _, _, told, _ in group]).to(device)
            for mask, k, keep in masks:
                with nullcontext() if keep is None else sparsify(module, keep):
                    logits = _logits(subject.model, module, ids)
                for (task, length, told, sample), row in zip(group, logits, strict=True):
                    place = {"task": task, "length": length, "distance": told.distance, "sample": sample}
                    rows.append({"model": subject.model.path, **place, "mask": mask, "k": k, **_read(row, told)})
                subject.after_point(len(group))
    tables = [TILES.empty()]
    for length in plan.lengths if (tiled := [kind for kind in plan.kinds if kind.startswith(OF_ENGINES)]) else ():
        weights = TileWeights(tiled, plan.ks)
        with running(subject.model, weights.add, subject.device, subject.dtype) as run:
            run({"input_ids": maker.text(plan.tasks[0], length, plan.depths[0], subject.seed).ids[None]})
        tables.append(weights.table(subject.model.path, length))
    shown = maker.text(plan.tasks[0], plan.lengths[0], plan.depths[0], subject.seed)
    words = maker._tokenizer.decode(shown.ids[-60:].tolist())
    subject.remark(f"the first text ends: {' '.join(words.split())}", "retrieval-text")
    return {"retrieval": RETRIEVAL.of_rows(rows), "tiles": TILES.of_parts(tables)}


Text = tuple[str, int, Told, int]


def _batches(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Yield texts of equal length, as many as fit in a forward pass."""
    start = 0
    while start < len(texts):
        length = texts[start][1]
        most = max(1, _TOKENS // length)
        stop = start + 1
        while stop < len(texts) and stop < start + most and texts[stop][1] == length:
            stop += 1
        yield list(texts[start:stop])
        start = stop


def _logits(model: LoadedModel, module: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of the next token at every position, (B, L, V)."""
    try:
        output = batching.call(module, {"input_ids": ids})
    except InputError:
        raise
    except Exception as error:  # models raise anything
        full = no_room(model.path, {"input_ids": ids}, error)
        reason = " ".join(str(error).split())[:200]
        raise full or InputError(
            f"{model.path} cannot read texts of {ids.shape[1]:,} tokens ({type(error).__name__}: {reason})."
        ) from error
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or logits.shape[2] <= int(ids.max()):
        raise InputError(
            f"{model.path} has no language head: its output is no distribution over tokens at each position. Take "
            "a causal language model, with its head."
        )
    return logits


def _read(logits: Tensor, told: Told) -> dict[str, Any]:
    """Return hits and losses of one text from its logits, (L, V)."""
    targets, hits, losses = told.ids[1:].to(logits.device), list[Tensor](), list[Tensor]()
    for start in range(0, len(targets), _ROWS):
        part, wanted = (
            logits[start : start + _ROWS][: len(targets) - start].float(),
            targets[start : start + _ROWS],
        )
        hits.append(part.argmax(-1) == wanted)
        losses.append(F.cross_entropy(part, wanted, reduction="none"))
    right, loss = torch.cat(hits).cpu(), torch.cat(losses).double().cpu()
    own, rest = loss[-told.answer :].sum(), loss[: -told.answer].sum()
    return {
        "tokens": told.answer,
        "hits": int(right[-told.answer :].sum()),
        "loss": float(own) if own.isfinite() else math.inf,
        "text_loss": float(rest) if rest.isfinite() else math.inf,
        "text_tokens": len(loss) - told.answer,
    }


def _provenance(plan: RetrievalPlan, samples: int, few: int) -> dict[str, Any]:
    return {"retrieval_samples": plan.samples, "retrieval_depths": list(plan.depths)}


PROBE = Probe("retrieval", RetrievalPlan, (RETRIEVAL, TILES), retrieval, provenance=_provenance)
