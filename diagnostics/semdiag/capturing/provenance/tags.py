"""What is known of tensors below Python: which come from a product, a softmax, or parameters alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from semdiag.capturing.provenance.axes import Axes
from semdiag.capturing.provenance.score_history import ScoreHistory
from semdiag.capturing.recording import is_plain
from semdiag.capturing.score_masks import lowest

History = tuple[ScoreHistory, Callable[[], bool]]


class Product(NamedTuple):
    """A product (N, M, D) x (N, D, K)."""

    number: int  # identifies it
    sizes: tuple[int, int]  # M and K
    fixed: tuple[bool, bool]  # for each factor, whether it is computed from parameters alone

    def whole_in(self, axes: Axes) -> bool:
        """Return whether the axes still contain both sides of the product that are longer than 1."""
        there = {p.axis for pieces in axes for p in pieces if p.origin == self.number}
        return all(axis in there or size == 1 for axis, size in enumerate(self.sizes, start=1))


class Scores(NamedTuple):
    """A tensor that came from a product, and where the product's axes are in it."""

    product: Product
    axes: Axes

    def keys_fixed(self, axis: int) -> bool | None:
        """Return whether the keys on an axis come from parameters alone; None if it is no side of the product."""
        sides = [p.axis for p in self.axes[axis] if p.origin == self.product.number and p.axis > 0]
        if not sides:
            return all(self.product.fixed) if not self.axes[axis] else None
        return self.product.fixed[sides[0] - 1]

    def whole(self, axis: int, size: int) -> bool:
        """Return whether an axis of this size is a whole side of the product, with no column added or removed."""
        sides = [p.axis for p in self.axes[axis] if p.origin == self.product.number and p.axis > 0]
        return bool(sides) and self.product.sizes[sides[0] - 1] == size

    def rows(self, key: int) -> set[int]:
        """Return the axes that belong to the factor without the keys: queries, and heads that share the keys."""
        number, axes = self.product.number, enumerate(self.axes)
        return {d for d, pieces in axes if d != key and any(p.origin == number and p.axis > 0 for p in pieces)}


@dataclass(eq=False)
class Softmax:
    """A softmax, from its input to the product with values."""

    number: int  # identifies it as the origin of axes
    scores: Tensor  # its input
    axis: int | None  # the axis that it normalises
    tag: Scores | None  # the product of queries and keys that made its input; None if there is none
    history: History | None  # how its input came from that product, if this was seen in Python
    heads: int | None  # number of heads, where the surrounding function knows it and the tensors do not
    module: str  # where it ran
    outside: bool  # whether no module of the model was running
    masked: bool = False  # whether a mask was applied to its input as if it were attention
    reason: str | None = None  # why it is not captured although it met values; None otherwise
    done: bool = False  # whether it is captured
    # factor on its input: the logarithm of the base, where it is written out with a base other than e
    unit: float = 1.0

    @property
    def of_a_product(self) -> bool:
        """Whether its input is a product of two tensors that depend on the model's input."""
        return self.tag is not None and not any(self.tag.product.fixed)

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

    def refuse(self, reason: str) -> None:
        """Note why it is not captured; the first reason stays."""
        self.reason = self.reason or reason

    def keys_fixed(self, axis: int | None) -> bool | None:
        """Return whether its keys come from parameters alone; None if no product made its scores there."""
        if self.tag is None or axis is None:
            return None
        return self.tag.keys_fixed(axis)

    def keys_in(self, axes: Axes) -> bool:
        """Return whether the normalised axis is still among ``axes``, or has length 1."""
        there = {p.axis for pieces in axes for p in pieces if p.origin == self.number}
        return bool(there) if self.axis is None else self.axis in there or self.scores.shape[self.axis] == 1


class Weights(NamedTuple):
    """A tensor that came from a softmax."""

    softmax: Softmax  # the softmax
    axes: Axes | None  # where the softmax's axes are in it; None if unknown
    exact: bool = True  # whether its entries are still the softmax's
    dropout: float = 0.0  # probability with which they were dropped
    spread: bool = False  # whether they were multiplied with a tensor that has more axes
    logarithm: bool = False  # whether they are log-probabilities
    added_up: bool = False  # whether they were summed or averaged over an axis other than the keys'
    sampled: bool = False  # whether they were multiplied with values interpolated between positions


class _Store:
    """What is known of one storage. Tags belong to tensors in it, identified by their geometry."""

    __slots__ = ("fixed", "marks", "noise", "ref", "scores", "weights")

    def __init__(self, tensor: Tensor) -> None:
        self.ref: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # also prevents reuse of its address
        self.scores: dict[Any, Scores] = {}
        self.weights: dict[Any, Weights] = {}
        self.fixed = False
        self.noise: float | None = None
        self.marks: dict[str, str] = {}


class Tags:
    """What one thread knows of tensors."""

    def __init__(self, parameters: set[int]) -> None:
        self.marks: set[str] = set()
        self._parameters = parameters
        self._stores: dict[int, _Store] = {}
        self._limit = 256
        self._writes: Counter[int] = Counter()
        self._numbers = 0

    def number(self) -> int:
        """Return a new number for a product or a softmax."""
        self._numbers += 1
        return self._numbers

    def of(self, tensor: Tensor) -> tuple[Scores | None, Weights | None]:
        """Return the tags of a tensor: as scores, and as weights."""
        store = self._stores.get(address(tensor))
        if store is None or not (store.scores or store.weights):
            return None, None
        key = _geometry(tensor)
        return store.scores.get(key), store.weights.get(key)

    def scores(self, tensor: Tensor) -> Scores | None:
        """Return a tensor's tag as scores; None if it came from no product."""
        return self.of(tensor)[0]

    def weights(self, tensor: Tensor) -> Weights | None:
        """Return a tensor's tag as weights; None if it came from no softmax."""
        return self.of(tensor)[1]

    def noise(self, tensor: Tensor) -> float | None:
        """Return the probability with which a noise tensor keeps entries; None if it is no noise."""
        store = self._stores.get(address(tensor))
        return None if store is None else store.noise

    def fixed(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from parameters alone, without products."""
        if not is_plain(tensor):
            return isinstance(tensor, torch.nn.Parameter)
        memory = tensor.untyped_storage()
        storage = memory._cdata
        if memory.data_ptr() in self._parameters:
            return not self._writes[storage]
        store = self._stores.get(storage)
        return store is not None and store.fixed

    def tag_scores(self, tensor: Tensor, tag: Scores) -> None:
        """Tag a tensor as scores."""
        self._store(tensor).scores[_geometry(tensor)] = tag

    def derive_scores(self, tensor: Tensor, tag: Scores) -> None:
        """Tag a tensor as derived from scores, unless it already has a better tag."""
        store, key = self._store(tensor), _geometry(tensor)
        known = store.scores.get(key)
        if known is None or (any(known.product.fixed) and not any(tag.product.fixed)):
            store.scores[key] = tag

    def tag_weights(self, tensor: Tensor, tag: Weights) -> None:
        """Tag a tensor as weights."""
        self._store(tensor).weights[_geometry(tensor)] = tag

    def tag_noise(self, tensor: Tensor, kept: float) -> None:
        """Tag a tensor as pure noise, with the probability that an entry is kept."""
        store, key = self._store(tensor), _geometry(tensor)
        store.noise, store.fixed = kept, False
        store.scores.pop(key, None)
        store.weights.pop(key, None)

    def marked(self, tensor: Tensor, kind: str) -> str | None:
        """Return the module that a mark names, if the tensor's storage has a mark of this kind."""
        store = self._stores.get(address(tensor))
        return None if store is None else store.marks.get(kind)

    def mark(self, tensor: Tensor, kind: str, module: str = "") -> None:
        """Mark a tensor's storage, whatever its geometry: its entries are of this kind or derived from such."""
        if address(tensor) != -1:
            self._store(tensor).marks.setdefault(kind, module)
            self.marks.add(kind)

    def tag_fixed(self, tensor: Tensor) -> None:
        """Tag a tensor as computed from parameters alone."""
        if tensor.untyped_storage().data_ptr() not in self._parameters:
            self._store(tensor).fixed = True

    def writes(self, tensor: Tensor) -> int:
        """Return how many operations have written to a tensor's storage so far."""
        return self._writes[address(tensor)]

    def written(self, tensor: Tensor, noise: bool) -> bool:
        """Note a write to a tensor: the entries of all tensors that share its storage may change."""
        storage = address(tensor)
        self._writes[storage] += 1
        store = self._stores.get(storage)
        if store is None:
            return False
        store.fixed = False
        if not noise:
            store.weights = {key: tag._replace(exact=False) for key, tag in store.weights.items()}
        return True

    def forget(self) -> None:
        """Forget everything except which tensors are computed from parameters alone."""
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


def address(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, valid while it lives; -1 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, for one, have none
        return -1


def _geometry(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
