"""Tags of tensors below Python: whether they come from a product, a softmax, or parameters alone; their axes."""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from semdiag.capturing.provenance.positions import Extent, Side, extent_of
from semdiag.capturing.provenance.score_history import ScoreHistory, lowest
from semdiag.capturing.recording import is_plain

MAY_BE_SWAPPED = "its {} may be swapped: which axes of its scores they are could not be told"
OWN_KEYS = "each query has keys of its own: it counts as the only query, 0, of a sample of its own"


class AxisPiece(NamedTuple):
    """A part of an axis that comes from one axis of an earlier tensor."""

    origin: int  # number of that tensor; -1 for copies (broadcast) and entries from elsewhere
    axis: int  # number of its axis
    size: int  # number of entries
    step: int  # stride along that axis between neighbouring entries; 0 if entries were selected or reordered


Axis = tuple[AxisPiece, ...]  # the slowest first
Axes = tuple[Axis, ...]  # pieces of each axis of a tensor
InputShapes = Sequence[tuple[int, ...]]  # shapes of the first inputs of the running modules, the innermost last


class AxisRoles(NamedTuple):
    """The roles of the axes of scores."""

    lead: tuple[int, ...]  # axes before the queries: samples, then, if there are two or more, heads
    query: int | None  # axis of the queries; None if there is none

    @property
    def in_order(self) -> bool:
        """Whether the axes of samples and heads stand in the order of the scores' axes."""
        return [*self.lead] == sorted(self.lead)

    @property
    def order(self) -> list[int]:
        """The axes of samples and heads, then that of the queries, if there is one."""
        return [*self.lead] if self.query is None else [*self.lead, self.query]


def _candidates(ndim: int, key: int, queries: set[int]) -> Iterator[AxisRoles]:
    """Yield possible roles, the most usual first: queries last, heads before them."""
    swapped = []
    for query in (*sorted(queries, reverse=True),) or (None,):
        lead = [d for d in range(ndim) if d not in (key, query)]
        yield AxisRoles(tuple(lead), query)
        swapped += [AxisRoles((*(d for d in lead if d != head), head), query) for head in lead[-2::-1]]
    yield from swapped


def read_axes(
    shape: torch.Size, key: int, rows: set[int], inputs: InputShapes, q: Tensor | None, product: Axes | None
) -> tuple[AxisRoles, str | None]:
    """Assign roles to the axes of scores: samples times queries must match the running module's input."""
    ones = _single_axes(shape, key)
    candidates = [*_candidates(len(shape), key, rows | ones)]
    fitting = _fitting(candidates, shape, inputs)
    pool = fitting or [r for r in candidates if r.in_order and (r.query in rows or not rows)]
    pool = _likeliest(pool, shape, key, q if fitting else None)
    roles = pool[0]
    if not rows and len(roles.lead) > 2:
        return min(pool, key=lambda r: shape[r.lead[-1]]), OWN_KEYS
    if _differ_in_queries(pool, ones) or (not fitting and _is_unusual(roles, candidates[0], shape, key)):
        return roles, MAY_BE_SWAPPED.format("queries and heads")
    if not _is_only_lead(roles, fitting) and _heads_first(roles.lead, shape, inputs, q, product):
        return roles, MAY_BE_SWAPPED.format("samples and heads")
    return roles, None


def _likeliest(pool: list[AxisRoles], shape: torch.Size, key: int, q: Tensor | None) -> list[AxisRoles]:
    """Return the possible roles with as many queries as keys, if any; of those, by q, the ones like a split."""
    square = [r for r in pool if _is_square(r, shape, key)] or pool
    return square if q is None else _split_from_features(square, q)


def _single_axes(shape: torch.Size, key: int) -> set[int]:
    """Return the axes of length 1 that may be the queries'."""
    first = 1 if len(shape) > 3 else 0
    return {d for d in range(first, len(shape)) if shape[d] == 1 and d != key}


def _differ_in_queries(pool: list[AxisRoles], ones: set[int]) -> bool:
    """Return whether possible roles have different queries; those on axes of length 1 are the same."""
    return len({min(ones) if r.query in ones else r.query for r in pool}) > 1


def _is_only_lead(roles: AxisRoles, fitting: list[AxisRoles]) -> bool:
    """Return whether roles fit the running modules' inputs, and no others with these queries do."""
    return bool(fitting) and all(r.lead == roles.lead for r in fitting if r.query == roles.query)


def _is_unusual(roles: AxisRoles, usual: AxisRoles, shape: torch.Size, key: int) -> bool:
    """Return whether queries may be heads: each has keys of its own, or an unusual place and another number."""
    if roles.query is None and len(roles.lead) == 2:
        return True
    return roles.query != usual.query and not _is_square(roles, shape, key)


def _is_square(roles: AxisRoles, shape: torch.Size, key: int) -> bool:
    """Return whether there are as many queries as keys."""
    return roles.query is not None and shape[roles.query] == shape[key]


def _heads_first(
    lead: tuple[int, ...], shape: torch.Size, inputs: InputShapes, q: Tensor | None, product: Axes | None
) -> bool:
    """Return whether there are two axes before the queries, and the first may be the heads'."""
    if len(lead) != 2:
        return False
    samples = max(1, inputs[0][0]) if inputs and inputs[0] else 1
    first, second = (shape[d] % samples for d in lead)
    return (first != 0 and second == 0) or _crossed(product, q, lead)


def read_leading(q: Tensor, keys: int, inputs: InputShapes) -> tuple[tuple[int, ...], str | None]:
    """Assign roles to the axes of queries (…, Lq, D) before the last two."""
    shape = torch.Size((*q.shape[:-1], keys))
    candidates = [*_candidates(len(shape), len(shape) - 1, {len(shape) - 2})]
    fitting = _split_from_features(_fitting(candidates, shape, inputs), q)
    remark = None if len(fitting) == 1 else MAY_BE_SWAPPED.format("samples and heads")
    return (fitting or candidates)[0].lead, remark


def _fitting(candidates: list[AxisRoles], shape: torch.Size, inputs: InputShapes) -> list[AxisRoles]:
    """Return the candidates that fit the input of the innermost module that any of them fits."""
    return next((fits for x in reversed(inputs) if (fits := [r for r in candidates if _fits(r, shape, x)])), [])


def _fits(roles: AxisRoles, shape: torch.Size, module_input: tuple[int, ...]) -> bool:
    """Return whether samples × queries match (B, L), (B, L, D), (B, …, D), (B, H, L, D) or (B, L, H, D)."""
    if len(module_input) < 2:
        return False
    positions = {module_input[0] * module_input[1]}
    if len(module_input) > 2:
        positions.add(math.prod(module_input[:-1]))
    if len(module_input) == 4:
        positions.add(module_input[0] * module_input[2])
    samples = roles.lead[:-1] if len(roles.lead) > 1 else roles.lead
    rows = math.prod(shape[d] for d in samples) * (1 if roles.query is None else shape[roles.query])
    return rows in positions and (roles.in_order or shape[roles.lead[0]] == module_input[0])


def _split_from_features(candidates: list[AxisRoles], q: Tensor) -> list[AxisRoles]:
    """Return the candidates whose heads are adjacent in memory, if any; all with fewer than five axes."""
    step = q.shape[-1] * q.stride(-1)
    if len(candidates) < 2 or len(candidates[0].lead) < 3 or q.ndim < len(candidates[0].lead) + 2:
        return candidates
    return [r for r in candidates if q.shape[r.lead[-1]] > 1 and q.stride(r.lead[-1]) == step] or candidates


def _crossed(product: Axes | None, q: Tensor | None, lead: tuple[int, ...]) -> bool:
    """Return whether heads vary more slowly than samples, unlike heads that are split from features."""
    if product:
        far, near = ([p.step for p in product[d] if p.axis == 0 <= p.origin] for d in lead)
        if far and near and max(far) < max(near):
            return True
    if q is None or q.ndim != 4:
        return False
    first, second = q.shape[:2]
    first_step, second_step = q.stride()[:2]
    return first > 1 < second and first_step < second_step


def own_axes(shape: Sequence[int], origin: int) -> Axes:
    """Return the axes of a tensor that is an origin itself; axes of length 1 have no pieces."""
    return tuple((AxisPiece(origin, i, size, 1),) if size != 1 else () for i, size in enumerate(shape))


def regrouped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the axes after a view to another shape; None if the view splits a piece unevenly."""
    left = [piece for pieces in axes for piece in pieces]
    groups = []
    for size in shape:
        taken: list[AxisPiece] = []
        while size > 1 and left:
            piece = left.pop(0)
            if size % piece.size == 0:
                taken.append(piece)
                size //= piece.size
            elif piece.size % size == 0:
                inner = piece.size // size
                taken.append(piece._replace(size=size, step=piece.step * inner))
                left.insert(0, piece._replace(size=inner))
                size = 1
            else:
                return None
        if size > 1:
            return None
        groups.append(tuple(taken))
    return None if left else tuple(groups)


def join_pieces(pieces: Sequence[AxisPiece]) -> tuple[AxisPiece, ...]:
    """Join neighbouring pieces of one axis where they are contiguous."""
    joined: list[AxisPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last[:2] == piece[:2] and last.step == piece.step * piece.size:
            joined[-1] = piece._replace(size=last.size * piece.size)
        else:
            joined.append(piece)
    return tuple(joined)


def broadcast_axes(axes: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """Return the axes after broadcasting to ``result``; None if ``shape`` cannot be broadcast to it."""
    more = len(result) - len(shape)
    sizes = [*zip((1,) * more + tuple(shape), result, strict=False)]
    if more < 0 or any(size not in (1, new) for size, new in sizes):
        return None
    every = enumerate(zip(((),) * more + axes, sizes, strict=True))
    return tuple((AxisPiece(-1, i, new, 1),) if size != new else x for i, (x, (size, new)) in every)


def selected(axes: Axes, shape: Sequence[int], result: Sequence[int]) -> Axes | None:
    """Return the axes after indexing or padding: an axis with another length is no longer whole."""
    if len(shape) != len(result):
        return None
    return tuple(
        pieces if size == new else tuple(AxisPiece(p.origin, p.axis, new, 0) for p in pieces[:1])
        for pieces, size, new in zip(axes, shape, result, strict=True)
    )


History = tuple[ScoreHistory, Callable[[], bool]]


class ScoresTag(NamedTuple):
    """Tag of a tensor that came from a product (N, M, D) x (N, D, K), with the places of the product's axes."""

    number: int  # number that identifies the product
    sizes: tuple[int, int]  # M and K
    fixed: tuple[bool, bool]  # whether each factor is computed from parameters alone
    constant: bool  # whether a factor is made of constants alone
    axes: Axes
    factors: tuple[Side, Side]  # what M and K run over
    summed: Extent  # D

    def whole_in(self, axes: Axes) -> bool:
        """Return whether axes still contain both sides of the product, where longer than 1."""
        there = {p.axis for pieces in axes for p in pieces if p.origin == self.number}
        return all(axis in there or size == 1 for axis, size in enumerate(self.sizes, start=1))

    def sides(self, axis: int) -> list[int]:
        """Return the sides of the product that an axis comes from, 0 for M and 1 for K."""
        return [p.axis - 1 for p in self.axes[axis] if p.origin == self.number and p.axis > 0]

    def keys_fixed(self, axis: int) -> bool | None:
        """Return whether the keys on an axis come from parameters alone; None if it is no side of the product."""
        if not (sides := self.sides(axis)):
            return all(self.fixed) if not self.axes[axis] else None
        return self.fixed[sides[0]]

    def whole(self, axis: int, size: int) -> bool:
        """Return whether an axis of this size is a whole side of the product, with no column added or removed."""
        sides = self.sides(axis)
        return bool(sides) and self.sizes[sides[0]] == size

    def extents(self, axis: int) -> Side:
        """Return what the pieces of an axis run over."""
        return tuple(
            extent_of(self.factors[p.axis - 1], p.size, p.step)
            if p.origin == self.number and p.axis > 0
            else Extent(p.size, None)
            for p in self.axes[axis]
        )

    def rows(self, key: int) -> set[int]:
        """Return the axes of the factor without the keys: queries, and heads that share the keys."""
        return {d for d in range(len(self.axes)) if d != key and self.sides(d)}


@dataclass(eq=False)
class Softmax:
    """A softmax, from its input to the product with values."""

    number: int  # number that identifies it as the origin of axes
    scores: Tensor  # its input
    axis: int | None  # axis that it normalises
    tag: ScoresTag | None  # product of queries and keys behind its input; None if there is none
    history: History | None  # operations from that product to its input, if they were seen in Python
    heads: int | None  # number of heads, where the surrounding function knows it and the tensors do not
    module: str  # name of the running module
    outside: bool  # whether no module of the model was running
    masked: bool = False  # whether its input got a mask as if it were attention
    reason: str | None = None  # reason why it is not captured although it met values; None otherwise
    done: bool = False  # whether it is captured
    unit: float = 1.0  # factor on its input: the logarithm of the base, where it is written out

    @property
    def of_a_product(self) -> bool:
        """Whether its input is a product of two tensors that depend on the model's input."""
        return self.tag is not None and not any(self.tag.fixed)

    @property
    def suspect(self) -> bool:
        """Whether it is attention if it meets values; one that is written out must come from a product."""
        return self.axis is not None or self.of_a_product

    @property
    def one_key(self) -> bool:
        """Whether its rows have a single entry, and its input is a product as in :attr:`of_a_product`."""
        return self.axis is not None and self.scores.shape[self.axis] == 1 and self.of_a_product

    def scores_over(self, axis: int) -> Tensor:
        """Return its input to base e; scaling by ``unit`` shifts each row along ``axis``, to keep precision."""
        if self.unit == 1:
            return self.scores
        wide = torch.float32 if self.scores.device.type == "mps" else torch.float64
        scores = self.scores.to(wide) * self.unit
        top = scores.amax(axis, keepdim=True)
        usual = top.isfinite() & (top > lowest(self.scores.dtype))
        scores = scores - top.where(usual, 0.0)
        return scores.to(torch.promote_types(self.scores.dtype, torch.float32))

    def valid_history(self) -> ScoreHistory | None:
        """Return the operations behind its input, if they were seen and nothing was overwritten since."""
        if self.history is None:
            return None
        history, is_valid = self.history
        return history if is_valid() else None

    def refuse(self, reason: str) -> None:
        """Note why it is not captured; keep the first reason."""
        self.reason = self.reason or reason

    def keys_fixed(self, axis: int | None) -> bool | None:
        """Return whether its keys come from parameters alone; None if no product made its scores there."""
        return None if self.tag is None or axis is None else self.tag.keys_fixed(axis)

    def keys_in(self, axes: Axes) -> bool:
        """Return whether the normalised axis is still among ``axes``, or has length 1."""
        there = {p.axis for pieces in axes for p in pieces if p.origin == self.number}
        return bool(there) if self.axis is None else self.axis in there or self.scores.shape[self.axis] == 1


class WeightsTag(NamedTuple):
    """Tag of a tensor that came from a softmax."""

    softmax: Softmax
    axes: Axes | None  # places of the softmax's axes in the tensor; None if unknown
    exact: bool = True  # whether its entries are still the softmax's
    dropout: float = 0.0  # probability with which entries were dropped
    spread: bool = False  # whether the softmax's entries were multiplied with a tensor that has more axes
    logarithm: bool = False  # whether the entries are log-probabilities
    added_up: bool = False  # whether the entries were summed or averaged over an axis other than the keys'
    sampled: bool = False  # whether the entries were multiplied with values interpolated between positions


class _Store:
    """Tags of one storage. They belong to tensors in it, identified by their geometry."""

    def __init__(self, tensor: Tensor) -> None:
        self.ref: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # also prevents reuse of its address
        self.scores: dict[Any, ScoresTag] = {}
        self.weights: dict[Any, WeightsTag] = {}
        self.fixed = False
        self.marks: dict[str, Any] = {}  # modules, or of noise the probability that it keeps an entry


class Tags:
    """Tags of all tensors that one thread has seen."""

    def __init__(self, parameters: set[int], constants: Container[int]) -> None:
        self.marks: set[str] = set()
        self._parameters = parameters
        self._constants = constants
        self._stores: dict[int, _Store] = {}
        self._limit = 256
        self._writes: Counter[int] = Counter()
        self._moving: set[int] = set()  # storages of parameters and buffers that hold something else now
        self.number = count(1).__next__  # returns a new number for a product or a softmax

    def of(self, tensor: Tensor) -> tuple[ScoresTag | None, WeightsTag | None]:
        """Return the tags of a tensor: as scores, and as weights."""
        store = self._stores.get(address(tensor))
        if store is None or not (store.scores or store.weights):
            return None, None
        return store.scores.get(key := _geometry(tensor)), store.weights.get(key)

    def scores(self, tensor: Tensor) -> ScoresTag | None:
        """Return a tensor's tag as scores; None if it came from no product."""
        return self.of(tensor)[0]

    def weights(self, tensor: Tensor) -> WeightsTag | None:
        """Return a tensor's tag as weights; None if it came from no softmax."""
        return self.of(tensor)[1]

    def fixed(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from parameters alone, without products."""
        if not is_plain(tensor):
            return isinstance(tensor, torch.nn.Parameter)
        storage = address(tensor)
        if self.in_model(tensor):
            return storage not in self._moving
        store = self._stores.get(storage)
        return store is not None and store.fixed

    def constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor has whole numbers, or is made of constants alone."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return True
        if is_plain(tensor) and _place(tensor) in self._constants:
            return address(tensor) not in self._moving
        return self.marked(tensor, "constant") is not None

    def in_model(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor lies in a parameter or a buffer of the model."""
        return _place(tensor) in self._parameters

    def tag_scores(self, tensor: Tensor, tag: ScoresTag, derived: bool = False) -> None:
        """Tag a tensor as scores; one derived from scores may have a better tag already."""
        store = self._store(tensor)
        key = _geometry(tensor)
        present = store.scores.get(key) if derived else None
        if present is None or (any(present.fixed) and not any(tag.fixed)):
            store.scores[key] = tag

    def tag_weights(self, tensor: Tensor, tag: WeightsTag) -> None:
        """Tag a tensor as weights."""
        self._store(tensor).weights[_geometry(tensor)] = tag

    def tag_noise(self, tensor: Tensor, keep_probability: float) -> None:
        """Tag a tensor as pure noise, with the probability that an entry is kept."""
        store = self._store(tensor)
        key = _geometry(tensor)
        store.marks["noise"] = keep_probability
        store.scores.pop(key, None)
        store.weights.pop(key, None)

    def marked(self, tensor: Tensor, kind: str) -> Any:
        """Return the value of a mark of this kind on the tensor's storage; None if there is none."""
        store = self._stores.get(address(tensor))
        return None if store is None else store.marks.get(kind)

    def mark(self, tensor: Tensor, kind: str, module: str = "") -> None:
        """Mark a tensor's storage, whatever its geometry: its entries are of this kind or derived from such."""
        if address(tensor) != -1:
            self._store(tensor).marks.setdefault(kind, module)
            self.marks.add(kind)

    def tag_fixed(self, tensor: Tensor) -> None:
        """Tag a tensor as computed from parameters alone."""
        if not self.in_model(tensor):
            self._store(tensor).fixed = True

    def writes(self, tensor: Tensor) -> int:
        """Return the number of operations that have written to a tensor's storage so far."""
        return self._writes[address(tensor)]

    def written(self, tensor: Tensor, noise: bool, fixed: bool, constant: bool) -> bool:
        """Note a write of noise, parameters (or a step of training), or constants to a tensor's whole storage."""
        storage = address(tensor)
        self._writes[storage] += 1
        if not fixed and is_plain(tensor) and self.in_model(tensor):
            self._moving.add(storage)
        store = self._stores.get(storage)
        if store is None:
            return False
        store.fixed = store.fixed and fixed
        if not constant:
            store.marks.pop("constant", None)
        if not noise:
            store.weights = {key: tag._replace(exact=False) for key, tag in store.weights.items()}
        return True

    def forget(self) -> None:
        """Forget everything except the tensors computed from parameters alone."""
        self.marks.clear()
        self._stores = {
            key: store for key, store in self._stores.items() if store.fixed and not store.ref.expired()
        }
        for store in self._stores.values():
            store.marks.clear()

    def _store(self, tensor: Tensor) -> _Store:
        storage = address(tensor)
        store = self._stores.get(storage)
        if store is None:
            if len(self._stores) >= self._limit:
                self._stores = {key: s for key, s in self._stores.items() if not s.ref.expired()}
                self._limit = max(256, 2 * len(self._stores))
            store = self._stores[storage] = _Store(tensor)
        return store


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def _place(tensor: Tensor) -> int:
    """Return where a tensor's storage begins; 0 if it has none, under a transform."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def address(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, valid while it lives; -1 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, for example, have none
        return -1


def _geometry(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
