"""Where does an indexer go wrong? Known mistakes are tried in turn: which one chooses as the suspect does?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semdiag.mathematics.block_formats import SCALED
from semdiag.mathematics.indexers import IndexerForm, IndexerInputs, allowed_by, index_scores
from semdiag.mathematics.score_strips import as_mask
from semdiag.mathematics.selections import without_repeats

STAGES = (
    "projection", "norm", "rotary", "head weights", "sum over heads", "mask", "k", "indices", "sharing",
    "staleness", "degenerate", "precision",
)  # fmt: skip
_EXPLAINED = 0.99  # share of rows that a mistake must explain
_ALIKE = 2e-6  # of Σ |w| |q| max |k|: what sums in float32 may differ by
_PROJECTED = 1e-3  # of the largest number: what projections in float32 or TF32 may differ by
_ROWS = 512  # that are looked at
_FEWEST = 8  # rows that decide


@dataclass(frozen=True, eq=False)
class Indexer:
    """One indexer: what it computed of each sequence, and its form."""

    module: str
    sequences: Sequence[IndexerInputs]  # in the order of the rows of its selection
    form: IndexerForm
    k: int


@dataclass(frozen=True, eq=False)
class Suspect:
    """What another implementation chose for the same rows; None: unknown."""

    indices: Tensor  # int64 (rows, k), keys of each sequence from 0, -1 for none
    scores: Tensor | None = None  # (rows, n), -inf for keys that it forbids
    queries: Tensor | None = None  # (rows, H, D), projected
    keys: Tensor | None = None  # (rows, D), projected
    head_weights: Tensor | None = None  # (rows, H)


@dataclass(frozen=True)
class Located:
    """The stage at which a suspect differs, and the mistake that reproduces it."""

    module: str
    stage: str  # one of STAGES; empty: none of the mistakes that are tried
    mistakes: tuple[str, ...]  # that explain most rows alike; empty: none does
    explained: float  # share of the rows that they explain; of the best one if none is named
    by_reference: float  # share that the reference itself explains
    rows: int  # that decide, and were looked at
    nearest: str = ""  # stage and mistake that explain most, where none is named

    @property
    def differs(self) -> bool:
        """Return whether the suspect is not the reference, up to rounding."""
        return bool(self.stage or self.nearest)


def localise(indexer: Indexer, suspect: Suspect, donors: dict[str, Tensor] | None = None) -> Located:
    """Return the first stage at which a suspect differs from an indexer.

    Each mistake is an indexer with one property changed, computed in float64 from the reference's projections. It
    explains a row if the suspect's choice is its top-k, or, where the suspect's scores are known, if these are its
    scores. Only rows count that have more than k keys to choose from, up to 512 of them, drawn with a fixed seed.
    A mistake is named if it explains at least 99% of them, and more than the reference does.

    Args:
        indexer: the reference.
        suspect: what another implementation chose; its scores and projections where they are known.
        donors: (rows, n) scores of other modules of the reference, by name, from which a choice may be shared.
    """
    rows = _Rows(indexer, suspect)
    if len(rows.numbers) < _FEWEST:
        return Located(indexer.module, "", (), 1.0, 1.0, len(rows.numbers))
    if mistake := rows.differing_projection():
        return Located(indexer.module, "projection", (mistake,), 1.0, 0.0, len(rows.numbers))
    by_scores = suspect.scores is not None
    reference = rows.share_of_form(indexer.form, by_scores)
    chosen = rows.share_of_form(indexer.form, by_scores=False)
    if min(reference, chosen) >= 1 - 1e-9:
        return Located(indexer.module, "", (), 1.0, 1.0, len(rows.numbers))
    tried = list(_of_choices(rows, donors or {}))
    if reference < _EXPLAINED or not by_scores:
        tried += [(stage, words, rows.share_of_form(form, by_scores)) for stage, words, form in _forms(rows)]
        if by_scores:
            tried.append(("head weights", "all scores times a constant", rows.share_of_scale()))
    return _best(indexer.module, tried, min(reference, chosen), len(rows.numbers))


def _best(module: str, tried: list[tuple[str, str, float]], reference: float, rows: int) -> Located:
    """Return the mistakes that explain most, if they explain nearly all; of several stages the first."""
    most = max(share for *_, share in tried)
    best = [(stage, words) for stage, words, share in tried if share >= most - 1e-9]
    if most < _EXPLAINED or most <= reference:
        return Located(module, "", (), most, reference, rows, nearest=": ".join(best[0]))
    stage = min((stage for stage, _ in best), key=STAGES.index)
    return Located(
        module, stage, tuple(words for of_stage, words in best if of_stage == stage), most, reference, rows
    )


class _Rows:
    """The rows that decide, and what the suspect chose for them."""

    def __init__(self, indexer: Indexer, suspect: Suspect) -> None:
        self.indexer = indexer
        self.suspect = suspect
        self.sequences = [sequence.double() for sequence in indexer.sequences]
        lengths = torch.tensor([len(sequence.keys) for sequence in self.sequences])
        self.starts = lengths.cumsum(0) - lengths  # first row of each sequence
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self.place = torch.arange(int(lengths.sum())) - self.starts[self.sequence]  # of a row in its sequence
        self.width = int(lengths.max())
        allowed = torch.cat(
            [
                allowed_by(indexer.form, sequence.positions, torch.arange(len(sequence.keys))).sum(1)
                for sequence in self.sequences
            ]
        )
        deciding = (allowed > indexer.k).nonzero().squeeze(1)
        order = torch.randperm(len(deciding), generator=torch.Generator().manual_seed(0))
        self.numbers = deciding[order[:_ROWS]].sort().values
        self.sets = without_repeats(suspect.indices)

    def differing_projection(self) -> str:
        """Return which projection of the suspect is another one; empty: none, or unknown."""
        for name in ("queries", "keys", "head_weights"):
            numbers = getattr(self.suspect, name)
            if numbers is None:
                continue
            right = torch.cat([getattr(sequence, name) for sequence in self.sequences])
            size = float(right.abs().amax())
            if numbers.shape != right.shape or float((numbers.double() - right).abs().amax()) > _PROJECTED * size:
                return f"{name.replace('_', ' ')} already differ after the projection: other inputs or weights"
        return ""

    def right_scores(self, numbers: Tensor) -> Tensor:
        """Return the reference's scores of some rows, (rows, n)."""
        return self.scores_of(self.indexer.form, numbers)

    def scores_of(self, form: IndexerForm, numbers: Tensor) -> Tensor:
        """Return the scores of some rows under a form, -inf beyond their sequence."""
        scores = torch.full((len(numbers), self.width), -torch.inf, dtype=torch.float64)
        for at, sequence in enumerate(self.sequences):
            of_sequence = (self.sequence[numbers] == at).nonzero().squeeze(1)
            if len(of_sequence):
                scores[of_sequence, : len(sequence.keys)] = index_scores(
                    sequence, form, self.place[numbers[of_sequence]]
                )
        return scores

    def share_of_form(self, form: IndexerForm, by_scores: bool) -> float:
        """Return the share of rows that a form explains."""
        scores = self.scores_of(form, self.numbers)
        return (
            self.share_of_scores(scores)
            if by_scores
            else self.share(scores, self.sets[self.numbers], self.numbers)
        )

    def share_of_scores(self, scores: Tensor) -> float:
        """Return the share of rows whose scores are the suspect's."""
        assert self.suspect.scores is not None
        numbers = _filled(self.suspect.scores[self.numbers].double(), self.width)
        allowed = scores > -torch.inf
        alike = ((numbers - scores).abs() <= self.tolerance(self.numbers)) | ~allowed
        return float((alike & (allowed == _is_allowed(numbers))).all(1).double().mean())

    def share_of_scale(self) -> float:
        """Return the share of rows whose scores are the reference's times one constant."""
        assert self.suspect.scores is not None
        right = self.right_scores(self.numbers)
        numbers = _filled(self.suspect.scores[self.numbers].double(), self.width)
        both = (right > -torch.inf) & _is_allowed(numbers) & (right != 0)
        return self.share_of_scores(right * (numbers[both] / right[both]).median()) if bool(both.any()) else 0.0

    def tolerance(self, numbers: Tensor) -> Tensor:
        """Return by how much the scores of some rows may differ, (rows, 1)."""
        sizes = torch.empty(len(numbers), 1, dtype=torch.float64)
        for at, sequence in enumerate(self.sequences):
            of_sequence = (self.sequence[numbers] == at).nonzero().squeeze(1)
            rows = self.place[numbers[of_sequence]]
            queries = (sequence.queries[rows].norm(dim=-1) * sequence.head_weights[rows].abs()).sum(
                1, keepdim=True
            )
            width = len(sequence.norm_weight)
            widest = sequence.norm_weight.abs().amax() * width**0.5 + sequence.norm_bias.norm()
            sizes[of_sequence] = queries * widest
        return _ALIKE * sizes

    def share(self, scores: Tensor, sets: Tensor, numbers: Tensor, k: int | None = None) -> float:
        """Return the share of these rows whose sets are the top-k of scores, ties and rounding aside.

        Rows show nothing in which more than k keys tie with the last one, or in which fewer are allowed and the
        rest is filled with others; they must be less than half.
        """
        number = self.indexer.k if k is None else k
        allowed = scores > -torch.inf
        need = allowed.sum(1).clamp(max=number)
        tolerance = self.tolerance(numbers)
        chosen = as_mask(sets.masked_fill(sets >= self.width, -1), self.width)
        worst = scores.masked_fill(~(chosen & allowed), torch.inf).amin(1, keepdim=True)
        left = scores.masked_fill(chosen, -torch.inf).amax(1, keepdim=True)
        strays = (chosen & ~allowed).any(1) | (sets >= self.width).any(1)
        complete = (chosen & allowed).sum(1) == need
        right = (worst >= left - tolerance).squeeze(1) & complete & ~strays
        last = scores.topk(min(number, self.width), 1).values[:, -1:]
        ties = ((scores - last).abs() <= tolerance).sum(1)
        shows = (ties <= number) & ~(strays & complete & (need < number))
        return float(right[shows].double().mean()) if int(shows.sum()) * 2 > len(shows) else 0.0


def _filled(scores: Tensor, width: int) -> Tensor:
    """Return scores as wide as the longest sequence."""
    return torch.nn.functional.pad(scores[:, :width], (0, max(0, width - scores.shape[1])), value=-torch.inf)


def _is_allowed(scores: Tensor) -> Tensor:
    return scores > torch.finfo(torch.float16).min / 2


def _of_choices(rows: _Rows, donors: dict[str, Tensor]) -> Iterator[tuple[str, str, float]]:
    """Yield mistakes behind the scores, with the share of rows that each explains."""
    at = rows.numbers
    right = rows.right_scores(at)
    sets = rows.sets[at]
    k = rows.indexer.k
    chosen = int((sets >= 0).sum(1).median())
    if chosen != k:
        yield "k", f"k = {chosen} instead of {k}", rows.share(right, sets, at, chosen)
    for shift in (1, -1):
        shifted = (sets - shift).masked_fill(sets < 0, -1)
        yield "indices", f"indices are counted from {shift}", rows.share(right, shifted, at)
    for name, scores in donors.items():
        yield "sharing", f"the choice of {name}", rows.share(_filled(scores[at].double(), rows.width), sets, at)
    for late in (1, 2, 3, 4):
        before = at - late
        usable = rows.place[at] > late + k
        if int(usable.sum()) >= _FEWEST:
            words = "the choice of the query before" if late == 1 else f"the choice of {late} queries before"
            yield "staleness", words, rows.share(rows.right_scores(before[usable]), sets[usable], at[usable])
    yield from _of_other_sequences(rows)
    yield from _degenerate(rows)


def _of_other_sequences(rows: _Rows) -> Iterator[tuple[str, str, float]]:
    """Yield the choices of the same positions of other sequences."""
    at = rows.numbers
    lengths = torch.tensor([len(sequence.keys) for sequence in rows.sequences])
    for words, donor in (
        ("the choice of the sequence before", rows.sequence[at] - 1),
        ("the choice of the first sequence", torch.zeros_like(at)),
    ):
        usable = (donor >= 0) & (donor < rows.sequence[at]) & (rows.place[at] < lengths[donor.clamp(min=0)])
        if int(usable.sum()) >= _FEWEST:
            source = rows.starts[donor[usable]] + rows.place[at[usable]]
            yield "staleness", words, rows.share(rows.right_scores(source), rows.sets[at[usable]], at[usable])


def _degenerate(rows: _Rows) -> Iterator[tuple[str, str, float]]:
    """Yield choices that do not depend on the scores."""
    at = rows.numbers
    place = rows.place[at, None]
    keys = torch.arange(rows.width).expand(len(at), -1)
    later = keys > place
    for words, scores in (
        ("the newest keys", keys.double()),
        ("the first keys", -keys.double()),
        ("the lowest scores", -rows.right_scores(at)),
    ):
        yield "degenerate", words, rows.share(scores.masked_fill(later, -torch.inf), rows.sets[at], at)
    indices = rows.suspect.indices[at]
    yield "degenerate", "zeros", float((indices == 0).all(1).double().mean())
    same = rows.sets[at].sort(1).values
    yield "degenerate", "one choice for all queries", float((same == same[:1]).all(1).double().mean())


def _forms(rows: _Rows) -> Iterator[tuple[str, str, IndexerForm]]:
    """Yield mistakes in the computation of scores."""
    form = rows.indexer.form
    for eps in (1e-3, 1e-5, 1e-6, 1e-8, 0.0):
        yield "norm", f"eps = {eps:g}", replace(form, eps=eps)
    yield "norm", "RMS norm instead of layer norm", replace(form, norm="rms")
    yield "norm", "no norm", replace(form, norm="none")
    yield "norm", "no weight and bias of the norm", replace(form, affine=False)
    yield from _rotations(rows, form)
    yield "head weights", "equal for all heads", replace(form, heads="equal")
    yield "head weights", "softmax over heads", replace(form, heads="softmax")
    yield "head weights", "heads in reverse order", replace(form, heads="reversed")
    yield "sum over heads", "no ReLU", replace(form, relu="none")
    yield "sum over heads", "ReLU of the sum", replace(form, relu="sum")
    yield "sum over heads", "largest head instead of the sum", replace(form, total="max")
    for offset in (1, -1, 2, -2):
        words = f"{offset} later" if offset > 0 else f"{-offset} earlier"
        yield "mask", f"last allowed key {words}", replace(form, ahead=form.ahead + offset)
    yield "mask", "no causal mask", replace(form, causal=False)
    chunk = 2
    while chunk < rows.width:
        yield "mask", f"keys of the query's chunk of {chunk} alone", replace(form, chunk=chunk)
        chunk *= 2
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", *SCALED):
        yield "precision", f"queries and keys in {name}", replace(form, operands=name)
    for name in ("bfloat16", "float16"):
        yield "precision", f"scores in {name}", replace(form, scores=name)


def _rotations(rows: _Rows, form: IndexerForm) -> Iterator[tuple[str, str, IndexerForm]]:
    words = {"halves": "as if the two halves were rotated", "interleaved": "as if pairs were interleaved"}
    for rotary, meaning in words.items():
        if rotary != form.rotary:
            yield "rotary", meaning, replace(form, rotary=rotary)
    yield "rotary", "not applied", replace(form, rotary="none")
    yield "rotary", "applied to the other end of each head", replace(form, at_end=not form.at_end)
    yield "rotary", "turned the other way", replace(form, direction=-1)
    for shift in (1, -1):
        yield "rotary", f"positions of keys {shift:+d}", replace(form, key_shift=shift)
        yield "rotary", f"positions of queries {shift:+d}", replace(form, query_shift=shift)
    for base in (1e4, 5e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e7):
        yield "rotary", f"base {base:g}", replace(form, base=base)
