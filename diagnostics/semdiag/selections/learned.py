"""What would an indexer cost? Small ones are fitted to a frozen model's attention."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from semdiag.capturing import batches as batching
from semdiag.capturing.attention_call import AttentionCall
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.batches import Batch
from semdiag.capturing.call_strips import allowed_mask
from semdiag.selections.arrays import array_names, read_arrays
from semdiag.selections.dense import row_weights
from semdiag.selections.files import require_suffix, write_output
from semdiag_files import InputError
from semdiag_models.selection import Indexer

_APART = "|"  # between the names of a module and of a tensor in a file
_MOMENTS = "exp_avg", "exp_avg_sq"  # of Adam, beside its step
_TEXTS = "fit|texts"
_OPTIONS = "fit|options"
_MODEL = "fit|model"
_HELD_OUT = "fit|held_out"
_KINDS = [(torch.float64, 1), (torch.int64, 1), (torch.uint8, 1), (torch.float64, 1)]  # of these, in a file
_ROWS = 256  # queries whose weights are made at a time
_SHARPNESS = [
    2.0 ** (half / 2) for half in range(-20, 9)
]  # factors of the first scores, of which the best is taken


@dataclass(frozen=True)
class FitOptions:
    """How indexers are fitted; one a layer, whose score is Σ_h w_h · ReLU(q_h · k / √width)."""

    width: int = 64  # of its queries and keys
    heads: int = 16  # of its queries, at most as many as the layer's; the keys have one
    passes: int = 16  # steps of Adam a text and layer
    rows: int = 256  # queries of each step, drawn
    rate: float = 0.0003  # of Adam
    seed: int = 0  # of the drawn queries

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.passes, self.rows) < 1 or not self.rate > 0 or self.seed < 0:
            raise InputError(f"Width, heads, passes, rows and rate are above 0, the seed not below. Got {self}.")


@dataclass
class IndexerFit:
    """Fits an indexer to each layer of a model's attention, text by text.

    The target of query t is its attention, summed over heads and divided by its sum; the loss is
    KL(target ‖ softmax of the indexer's scores over the allowed keys). The model is frozen. Indexers begin with
    :func:`low_rank_start` of the first text.

    Source: the warm-up of DeepSeek-V3.2's indexer. Deviation: it reads the layer's queries and keys (with their
    rotation) instead of hidden states, and begins at their products instead of at random.

    Attributes:
        options: how it fits.
        indexers: by module; of a module that attends several times, by ``module#1``, ``module#2`` … besides.
        digests: of the batches so far.
        losses: mean loss of the last batch by module, nats.
        model: whose attention it is, in words that are kept in the file.
        held_out: mean losses on other texts, noted by the caller as the fit goes on.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> model = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=6, blocks=1, heads=2)).eval()
        >>> fit = IndexerFit(FitOptions(width=4, heads=1))
        >>> fit.add(model, torch.tensor([[0, 1, 1, 0, 1, 0]]))
        >>> list(fit.indexers), fit.texts
        (['blocks.0.attention.core'], 1)
    """

    options: FitOptions = field(default_factory=FitOptions)
    indexers: dict[str, Indexer] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    model: str = ""
    held_out: list[float] = field(default_factory=list)
    _optimisers: dict[str, torch.optim.Adam] = field(default_factory=dict)

    @property
    def texts(self) -> int:
        """Number of batches so far."""
        return len(self.digests)

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Run the model on a batch, and move every layer's indexer towards its attention.

        Raises:
            InputError: if the model has no attention with known queries and keys, or its scores are not finite.
        """
        for number, call in enumerate(calls_of(model, batch)):
            draws = np.random.SeedSequence([self.options.seed, self.texts, number]).generate_state(1)
            with torch.enable_grad():
                self.losses[name_of_call(call)] = self._step(call, int(draws[0]))
        self.digests.append(digest_of(batch))

    def _first_indexer(self, lesson: "_Lesson", draws: torch.Generator) -> Indexer:
        _, heads, _, head_width = lesson.q.shape
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(draws.get_state())
            index_heads = min(heads, self.options.heads)
            indexer = Indexer((heads, head_width), lesson.k.shape[1], self.options.width, index_heads)
        low_rank_start(indexer, lesson.q[0], lesson.k[0])
        _sharpen(indexer, lesson)
        return indexer

    def _take(self, place: str, indexer: Indexer) -> None:
        self.indexers[place] = indexer
        self._optimisers[place] = torch.optim.Adam(indexer.parameters(), self.options.rate)

    def _step(self, call: AttentionCall, seed: int) -> float:
        draws = torch.Generator().manual_seed(seed)
        losses: list[float] = []
        for sample in range(len(call.q)):
            lesson = _lesson_of(call.part(slice(sample, sample + 1)), self.options, draws)
            if lesson is not None:
                losses += self._learn(name_of_call(call), lesson, draws)
        return sum(losses) / max(1, len(losses))

    def _learn(self, place: str, lesson: "_Lesson", draws: torch.Generator) -> list[float]:
        """Make the steps of one sample."""
        if not bool(lesson.target.isfinite().all()):
            raise InputError(f"{place or 'The model'}: its attention scores are not finite.")
        if place not in self.indexers:
            self._take(place, self._first_indexer(lesson, draws))
        indexer = self.indexers[place]
        optimiser = self._optimisers[place]
        losses = []
        for _ in range(self.options.passes):
            some = torch.randperm(len(lesson.target), generator=draws)[: self.options.rows]
            scores = indexer(lesson.q[:, :, some], lesson.k, None)[0]
            loss = divergence(lesson.target[some], scores, lesson.allowed[some])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(float(loss.detach()))
        return losses

    def save(self, path: Path) -> None:
        """Write indexers, and where the fit stands, to a .safetensors file.

        Raises:
            InputError: if the file has another suffix, or cannot be written.
        """
        from safetensors.torch import save

        require_suffix(path, "Indexers", ".safetensors")
        tensors = {
            _TEXTS: torch.tensor(self.digests, dtype=torch.int64),
            _OPTIONS: _numbers(self.options),
            _MODEL: torch.tensor(list(self.model.encode()), dtype=torch.uint8),
            _HELD_OUT: torch.tensor(self.held_out, dtype=torch.float64),
        }
        for module, indexer in self.indexers.items():
            for name, parameter in indexer.named_parameters():
                place = f"{module}{_APART}{name}"
                tensors[place] = parameter.detach()
                state = self._optimisers[module].state[parameter]
                if state:
                    tensors[f"{place}{_APART}step"] = state["step"].reshape(1)
                    tensors |= {f"{place}{_APART}{moment}": state[moment] for moment in _MOMENTS}
        write_output(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    @classmethod
    def load(cls, path: Path, options: FitOptions | None = None) -> "IndexerFit":
        """Read what :meth:`save` wrote; the fit goes on as if it had not been interrupted.

        Args:
            path: the file.
            options: those that the file must have been fitted with; None: whatever they are.

        Raises:
            InputError: if the file holds no such indexers, or others than ``options`` say.
        """
        names = array_names(path)
        arrays = read_arrays(path, names) if _OPTIONS in names else {}
        facts = {name: arrays.get(name, torch.empty(0, 0)) for name in (_OPTIONS, _TEXTS, _MODEL, _HELD_OUT)}
        numbers = facts[_OPTIONS].double()
        kinds = [(tensor.dtype, tensor.ndim) for tensor in facts.values()]
        if kinds != _KINDS or len(numbers) != len(astuple(FitOptions())) or not bool(numbers.isfinite().all()):
            raise InputError(f"{path} holds no fitted indexers. IndexerFit.save and semdiag indexer write them.")
        width, heads, passes, rows, rate, seed = numbers.tolist()
        stored = FitOptions(int(width), int(heads), int(passes), int(rows), rate, int(seed))
        if options is not None and options != stored:
            pairs = {name: (value, getattr(options, name)) for name, value in asdict(stored).items()}
            changed = [f"{name} = {old}, not {new}" for name, (old, new) in pairs.items() if old != new]
            raise InputError(
                f"{path} was fitted with {', '.join(changed)}: take another file, or the same options."
            )
        fit = cls(stored, digests=facts[_TEXTS].tolist(), held_out=facts[_HELD_OUT].tolist())
        fit.model = bytes(facts[_MODEL].tolist()).decode(errors="replace")
        for module in dict.fromkeys(name.partition(_APART)[0] for name in arrays if not name.startswith("fit|")):
            fit._restore(path, module, arrays)
        return fit

    def _restore(self, path: Path, module: str, arrays: Mapping[str, Tensor]) -> None:
        inside = {name.partition(_APART)[2]: tensor for name, tensor in arrays.items() if _of(name, module)}
        try:
            heads, queries = inside["weight.weight"].shape
            width, keys = inside["key.weight"].shape
            indexer = Indexer((queries // keys, keys), 1, width, heads)
            state = {name: inside[name] for name, _ in indexer.named_parameters()}
            indexer.load_state_dict({**state, "steps": torch.zeros(())})
        except (KeyError, ValueError, RuntimeError, ZeroDivisionError) as error:
            reason = str(error).split("\n", 1)[0][:120]
            raise InputError(f"{path} holds no whole indexer of {module} ({reason}).") from None
        if not all(bool(parameter.isfinite().all()) for parameter in indexer.parameters()):
            raise InputError(f"{path}: the indexer of {module} holds numbers that are not finite.")
        self._take(module, indexer)
        for name, parameter in indexer.named_parameters():
            place = f"{name}{_APART}"
            if f"{place}step" not in inside:
                continue
            moments = {moment: inside.get(f"{place}{moment}", torch.empty(0)) for moment in _MOMENTS}
            step = inside[f"{place}step"]
            if step.numel() != 1 or any(moment.shape != parameter.shape for moment in moments.values()):
                raise InputError(f"{path}: the optimiser's state of {module} does not fit its indexer.")
            self._optimisers[module].state[parameter] = {"step": step.reshape(()).float(), **moments}


def _of(name: str, module: str) -> bool:
    return name.startswith(f"{module}{_APART}")


def _numbers(options: FitOptions) -> Tensor:
    return torch.tensor(astuple(options), dtype=torch.float64)


def divergence(target: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the mean over rows of KL(target ‖ softmax of the scores over allowed keys), nats.

    Args:
        target: (R, L) weights, each row's sum 1, zero where forbidden.
        scores: (R, L).
        allowed: (R, L) bool.

    Example:
        >>> even = torch.full((1, 2), 0.5)
        >>> round(float(divergence(even, torch.tensor([[0.0, 3.0]]).log1p(), even > 0)), 4)  # ln (5/4)
        0.2231
    """
    logarithms = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).log_softmax(-1)
    return (target.xlogy(target) - target * logarithms).sum(-1).mean()


@dataclass(frozen=True, eq=False)
class _Lesson:
    """What is learnt from one sample of a layer: R queries, drawn, and the weights of their L keys."""

    q: Tensor  # (1, H, R, D)
    k: Tensor  # (1, Hk, L, D)
    target: Tensor  # (R, L)
    allowed: Tensor  # (R, L) bool


def _lesson_of(part: AttentionCall, options: FitOptions, draws: torch.Generator) -> _Lesson | None:
    """Return what is learnt from a sample; None if no query counts."""
    allowed = allowed_mask(part)[0].any(0).cpu()
    counted = (part.counted[0, 0].cpu() & allowed.any(1)).nonzero().squeeze(1)
    if not len(counted):
        return None
    order = torch.randperm(len(counted), generator=draws)
    rows = counted[order[: options.rows * options.passes]]
    target = torch.cat([attention_target(row_weights(part, some, allowed)) for some in torch.split(rows, _ROWS)])
    return _Lesson(part.q[:, :, rows.to(part.q.device)].cpu().float(), part.k.cpu().float(), target, allowed[rows])


def attention_target(weights: Tensor) -> Tensor:
    """Return the attention of some queries, summed over heads and divided by its sum: (H, R, L) -> (R, L)."""
    total = weights.sum(0)
    return (total / total.sum(-1, keepdim=True)).float()


@torch.no_grad()
def low_rank_start(indexer: Indexer, q: Tensor, k: Tensor) -> None:
    """Let an indexer's products be those of the layer's queries and keys, as well as its width allows.

    Formula: for a key head with mean key k̄, C = E[(k - k̄)(k - k̄)ᵀ] and N = Σ E[q qᵀ] over its query heads, and
    u₁, u₂ … the eigenvectors of C^½ N C^½ by their eigenvalues, Σ_{i≤r} (q · C^½ u_i)(u_i · C^{-½} (k - k̄)) is the
    product of rank r that is nearest to q · (k - k̄) in the mean square over all pairs; no softmax sees q · k̄. The
    width is shared out among key heads by the largest eigenvalues; the heads of a layer are dealt out to those of
    the indexer, which add them up.

    Source: not in the paper. Deviation: none.

    Args:
        indexer: whose weights are replaced.
        q: (H, Lq, D).
        k: (Hk, Lk, D).
    """
    heads, _, head_width = q.shape
    key_heads = len(k)
    group = heads // key_heads
    groups = torch.split(q, group)
    factors = [_factors(queries.flatten(0, 1), keys) for queries, keys in zip(groups, k, strict=True)]
    values = torch.cat([of_head[0] for of_head in factors])
    places = values.argsort(descending=True)[: indexer.width].tolist()
    for parameter in (indexer.query.weight, indexer.query.bias, indexer.key.bias, indexer.weight.weight):
        parameter.zero_()
    indexer.key.weight[: len(places)] = 0.0  # any further ones stay random, unread at first
    indexer.weight.bias.fill_(1.0)
    key_weight = indexer.key.weight.view(indexer.width, key_heads, head_width)
    query_weight = indexer.query.weight.view(-1, indexer.width, heads, head_width)
    index_heads = len(query_weight)
    for rank, place in enumerate(places):
        key_head, column = divmod(place, head_width)
        _, of_query, of_key = factors[key_head]
        key_weight[rank, key_head] = of_key[:, column]
        for head in range(key_head * group, (key_head + 1) * group):
            query_weight[head % index_heads, rank, head] = of_query[:, column]
    indexer.key.bias.sub_(indexer.key.weight @ k.mean(1).flatten())


def _factors(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigenvalues of C^½ N C^½ (D,), and the columns C^½ u and C^{-½} u, (D, D) each."""
    keys = k.double() - k.double().mean(0)
    queries = q.double()
    values, vectors = torch.linalg.eigh(keys.mT @ keys / len(keys))
    roots = values.clamp(min=1e-9 * float(values.max()) + 1e-30).sqrt()
    root = vectors * roots @ vectors.mT
    inverse = vectors / roots @ vectors.mT
    strengths, directions = torch.linalg.eigh(root @ (queries.mT @ queries / len(queries)) @ root)
    return strengths, (root @ directions).float(), (inverse @ directions).float()


@torch.no_grad()
def _sharpen(indexer: Indexer, lesson: _Lesson) -> None:
    """Multiply an indexer's scores by the factor with the smallest divergence."""
    scores = indexer(lesson.q, lesson.k, None)[0]
    losses = [float(divergence(lesson.target, factor * scores, lesson.allowed)) for factor in _SHARPNESS]
    indexer.weight.bias.mul_(_SHARPNESS[int(np.argmin(losses))])


def digest_of(batch: Batch) -> int:
    """Return a number that tells a batch from others, of 63 bits."""
    digest = hashlib.sha256()
    for tensor in batching.tensors_of(batch):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def calls_of(model: nn.Module, batch: Batch) -> list[AttentionCall]:
    """Run a model without gradients, and return its calls of attention whose queries and keys are known."""
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append):
        batching.call(model, batch)
    factored = [call for call in calls if call.factored]
    if not factored:
        raise InputError("An indexer is fitted to attention with queries and keys, and this model shows none.")
    return factored


def name_of_call(call: AttentionCall) -> str:
    """Return the name under which an indexer of a call stands."""
    return f"{call.module}#{call.occurrence}" if call.occurrence else call.module
