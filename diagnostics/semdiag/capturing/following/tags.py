"""What is known of tensors below Python: which come from a product, from a softmax, or from parameters alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from semdiag.capturing.following.axes import Axes
from semdiag.capturing.following.score_history import ScoreHistory
from semdiag.capturing.recording import is_plain
from semdiag.capturing.score_masks import lowest

History = tuple[ScoreHistory, Callable[[], bool]]


class Product(NamedTuple):
    """A product (N, M, D) x (N, D, K): M and K, and which of its factors are made of parameters alone."""

    number: int
    sizes: tuple[int, int]
    fixed: tuple[bool, bool]

    def whole_in(self, axes: Axes) -> bool:
        """Whether both sides are still there, where they have more than one entry."""
        there = {p.place for pieces in axes for p in pieces if p.origin == self.number}
        return all(place in there or size == 1 for place, size in enumerate(self.sizes, start=1))


class Scores(NamedTuple):
    """A tensor that came from a product, and where the product's axes are in it."""

    product: Product
    axes: Axes

    def keys_fixed(self, place: int) -> bool | None:
        """Whether the keys along an axis are made of parameters alone; None if the product has no such axis."""
        sides = [p.place for p in self.axes[place] if p.origin == self.product.number and p.place > 0]
        if not sides:
            return all(self.product.fixed) if not self.axes[place] else None
        return self.product.fixed[sides[0] - 1]

    def whole(self, place: int, size: int) -> bool:
        """Whether an axis of a size is one side of the product, without a column that was added or left out."""
        sides = [p.place for p in self.axes[place] if p.origin == self.product.number and p.place > 0]
        return bool(sides) and self.product.sizes[sides[0] - 1] == size

    def rows(self, key: int) -> set[int]:
        """The axes that the factor without the keys has alone: queries, and heads that share the keys."""
        number, axes = self.product.number, enumerate(self.axes)
        return {d for d, pieces in axes if d != key and any(p.origin == number and p.place > 0 for p in pieces)}


@dataclass(eq=False)
class Softmax:
    """A softmax, from its input to the values that its result is multiplied with.

    Attributes:
        number: names it, and its axes.
        scores: its input, as it was.
        place: the axis it runs over; None where it is written out with exp, and not known before it is used.
        tag: the product of queries and keys that the input came from; None if it came from none.
        history: how the input came from the product, if that was seen in Python.
        heads: number of heads where the surrounding function says it and the tensors do not.
        module: where it ran.
        outside: whether no module of the model was running.
        masked: whether a mask was put into it, as into attention.
        reason: why it is not captured, once it has met values; None before.
        done: whether it is captured.
        unit: what its input is to be multiplied with: the logarithm of the base, where it is written out with
            exponentials of another base than e.
    """

    number: int
    scores: Tensor
    place: int | None
    tag: Scores | None
    history: History | None
    heads: int | None
    module: str
    outside: bool
    masked: bool = False
    reason: str | None = None
    done: bool = False
    unit: float = 1.0

    @property
    def of_a_product(self) -> bool:
        """Whether its input came from a product of two tensors that are made of the model's input."""
        return self.tag is not None and not any(self.tag.product.fixed)

    @property
    def suspect(self) -> bool:
        """Whether it is attention if it meets values: one that is written out is not, but of a product."""
        return self.place is not None or self.of_a_product

    @property
    def one_key(self) -> bool:
        """Whether its rows have one entry, of a product of two tensors that are made of the model's input."""
        return self.place is not None and self.scores.shape[self.place] == 1 and self.of_a_product

    def scores_over(self, place: int) -> Tensor:
        """Its input to the base e, up to a constant in each row along an axis: there it keeps its precision."""
        if self.unit == 1:
            return self.scores
        wide = torch.float32 if self.scores.device.type == "mps" else torch.float64
        scores = self.scores.to(wide) * self.unit
        top = scores.amax(place, keepdim=True)
        usual = top.isfinite() & (top > lowest(self.scores.dtype))
        scores = scores - top.where(usual, 0.0)
        return scores.to(torch.promote_types(self.scores.dtype, torch.float32))

    def refuse(self, reason: str) -> None:
        """Note why it is not captured; the first reason counts."""
        self.reason = self.reason or reason

    def keys_fixed(self, place: int | None) -> bool | None:
        """Whether its keys are made of parameters alone; None if no product made its scores over that axis."""
        if self.tag is None or place is None:
            return None
        return self.tag.keys_fixed(place)

    def keys_in(self, axes: Axes) -> bool:
        """Whether the axis that it runs over is still there, if it has more than one entry."""
        there = {p.place for pieces in axes for p in pieces if p.origin == self.number}
        return bool(there) if self.place is None else self.place in there or self.scores.shape[self.place] == 1


class Weights(NamedTuple):
    """A tensor that came from a softmax.

    Attributes:
        softmax: which.
        axes: where the softmax's axes are in it; None if they cannot be told any more.
        exact: whether its entries are still the softmax's.
        dropout: probability with which they were dropped.
        spread: whether they have been multiplied with a tensor that has more axes.
        logarithm: whether they are the logarithms of a softmax's.
        added_up: whether they were summed or averaged over another axis than that of the keys.
        sampled: whether they have been multiplied with values that were sampled between places.
    """

    softmax: Softmax
    axes: Axes | None
    exact: bool = True
    dropout: float = 0.0
    spread: bool = False
    logarithm: bool = False
    added_up: bool = False
    sampled: bool = False


class _Store:
    """What is known of a storage. Tags belong to tensors in it, by their geometry."""

    __slots__ = ("fixed", "marks", "noise", "ref", "scores", "weights")

    def __init__(self, tensor: Tensor) -> None:
        self.ref: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # also keeps its address from being used again
        self.scores: dict[Any, Scores] = {}
        self.weights: dict[Any, Weights] = {}
        self.fixed = False
        self.noise: float | None = None
        self.marks: dict[str, str] = {}


class Tags:
    """What is known of the tensors of one thread.

    Args:
        parameters: addresses of the storages of the model's parameters and buffers.

    Attributes:
        marks: kinds of marks that some tensor has; "one key" where some softmax has one.
    """

    def __init__(self, parameters: set[int]) -> None:
        self.marks: set[str] = set()
        self._parameters = parameters
        self._stores: dict[int, _Store] = {}
        self._limit = 256
        self._writes: Counter[int] = Counter()
        self._numbers = 0

    def number(self) -> int:
        """A new number, for a product or a softmax."""
        self._numbers += 1
        return self._numbers

    def of(self, tensor: Tensor) -> tuple[Scores | None, Weights | None]:
        """What is known of where a tensor came from."""
        store = self._stores.get(address(tensor))
        if store is None or not (store.scores or store.weights):
            return None, None
        key = _geometry(tensor)
        return store.scores.get(key), store.weights.get(key)

    def scores(self, tensor: Tensor) -> Scores | None:
        """The product that a tensor came from; None if it came from none."""
        return self.of(tensor)[0]

    def weights(self, tensor: Tensor) -> Weights | None:
        """The softmax that a tensor came from; None if it came from none."""
        return self.of(tensor)[1]

    def noise(self, tensor: Tensor) -> float | None:
        """The probability with which entries of a tensor of noise are kept; None if it is none."""
        store = self._stores.get(address(tensor))
        return None if store is None else store.noise

    def fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of parameters alone, by operations that are no products."""
        if not is_plain(tensor):
            return isinstance(tensor, torch.nn.Parameter)
        storage = tensor.untyped_storage()
        place = storage._cdata
        if storage.data_ptr() in self._parameters:
            return not self._writes[place]
        store = self._stores.get(place)
        return store is not None and store.fixed

    def tag_scores(self, tensor: Tensor, tag: Scores) -> None:
        """Note that a tensor came from a product."""
        self._store(tensor).scores[_geometry(tensor)] = tag

    def carry_scores(self, tensor: Tensor, tag: Scores) -> None:
        """Note that a tensor is made of one that came from a product, unless it is made of a better one.

        A product of two factors that are made of the model's input is better than one of which one is not.
        """
        store, key = self._store(tensor), _geometry(tensor)
        known = store.scores.get(key)
        if known is None or (any(known.product.fixed) and not any(tag.product.fixed)):
            store.scores[key] = tag

    def tag_weights(self, tensor: Tensor, tag: Weights) -> None:
        """Note that a tensor came from a softmax."""
        self._store(tensor).weights[_geometry(tensor)] = tag

    def tag_noise(self, tensor: Tensor, kept: float) -> None:
        """Note that a tensor is noise and nothing else, and with which probability its entries are kept."""
        store, key = self._store(tensor), _geometry(tensor)
        store.noise, store.fixed = kept, False
        store.scores.pop(key, None)
        store.weights.pop(key, None)

    def marked(self, tensor: Tensor, kind: str) -> str | None:
        """The module that a mark of a kind names, if a tensor's storage has one."""
        store = self._stores.get(address(tensor))
        return None if store is None else store.marks.get(kind)

    def mark(self, tensor: Tensor, kind: str, module: str = "") -> None:
        """Mark a tensor's storage, whatever its geometry: its entries are what the kind says, or are made of it.

        Args:
            tensor: that is marked.
            kind: "sampled" between the places of another, "sums" of exponentials of scores, "output" of attention.
            module: that made it.
        """
        if address(tensor) != -1:
            self._store(tensor).marks.setdefault(kind, module)
            self.marks.add(kind)

    def tag_fixed(self, tensor: Tensor) -> None:
        """Note that a tensor is made of parameters alone."""
        if tensor.untyped_storage().data_ptr() not in self._parameters:
            self._store(tensor).fixed = True

    def writes(self, tensor: Tensor) -> int:
        """How many operations have written to a tensor's storage so far."""
        return self._writes[address(tensor)]

    def written(self, tensor: Tensor, noise: bool) -> bool:
        """An operation writes to a tensor: the entries of all that share its storage may change.

        Args:
            tensor: that is written to.
            noise: whether it is multiplied with noise, which is known as dropout.

        Returns:
            Whether something is known of its storage.
        """
        place = address(tensor)
        self._writes[place] += 1
        store = self._stores.get(place)
        if store is None:
            return False
        store.fixed = False
        if not noise:
            store.weights = {key: tag._replace(exact=False) for key, tag in store.weights.items()}
        return True

    def forget(self) -> None:
        """Forget all but which tensors are made of parameters alone."""
        self.marks.clear()
        self._stores = {
            key: store for key, store in self._stores.items() if store.fixed and not store.ref.expired()
        }
        for store in self._stores.values():
            store.marks.clear()

    def _store(self, tensor: Tensor) -> _Store:
        place = address(tensor)
        store = self._stores.get(place)
        if store is None:
            if len(self._stores) >= self._limit:
                self._stores = {key: s for key, s in self._stores.items() if not s.ref.expired()}
                self._limit = max(256, 2 * len(self._stores))
            store = self._stores[place] = _Store(tensor)
        return store


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))


def address(tensor: Tensor) -> int:
    """Names a tensor's storage while it lives; -1 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and their like have none
        return -1


def _geometry(tensor: Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
