"""Records that every checkpoint stores: architecture, data and optimisation; quick to import, without torch."""

import hashlib
import math
import re
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import PurePath
from typing import Any

from semdiag_files import InputError, unknown_name
from semdiag_files.records import Record, limited, option
from semdiag_models.kinds import ATTENTIONS, LOCAL

# Largest size of any part of a model: a checkpoint's numbers are used before the model is built.
LARGEST_SIZE = 100_000
_SIZE = f"[1, {LARGEST_SIZE}]"
_COUNT = "[1, 1000000000]"
_SEED = "[0, 9223372036854775808)"
_LARGEST_RATE = 1e35  # Adam's corrections multiply it by up to 10, still in float32
_LARGEST_DATA = 10**9  # largest number of tokens in a run's samples, 8 GB

ACTIVATIONS = "relu", "gelu", "mish"
HASHES = "shared", "asymmetric"  # buckets of small angles; of large scores, by one more entry of the keys
NORMS = "pre", "post"  # x + mlp(norm(x)), as in the paper's code; norm(x + mlp(x)), as in its equations
SCORE_GRADIENTS = "exact", "straight-through"  # backward in training: as forward, or the softmax over all keys
POOLINGS = "mean", "cls"  # of all tokens that are not PAD; the output of a learnt token in front of the input
OPTIMIZERS = "sgd", "adam", "adamw"  # plain, without momentum, as in the paper; betas 0.9 and 0.999
PRECISIONS = "float32", "tf32", "bf16"  # versions up to 0.10 could also train in the others
FROZEN = ("qk",)  # query and key projections, W_q and W_k, with their biases
_IN_THE_LABEL = {
    "global_tokens": "global-", "hash_rounds": "rounds-", "hash_bits": "bits-", "hashes": "",
    "clusters": "clusters-", "centroid_decay": "decay-", "score_gradient": "", "cls_as_key": "cls-no-key",
    "indexer_width": "width-", "indexer_warm_up": "warm-up-", "chosen_blocks": "blocks-",
}  # fmt: skip


_model = partial(option, "Model")  # the headings of help
_data = partial(option, "Data")
_steps = partial(option, "Optimisation")


@dataclass(frozen=True)
class Recipe:
    """The paper's training of a task: the defaults of ``semdiag train``."""

    length: int  # tokens per sample, before padding
    epochs: int
    blocks: int = 5
    learning_rate: float = 0.1
    learning_rate_decay: float = 0.9995  # factor per epoch
    width: int = 64
    mlp_width: int = 64
    head_width: int = 64
    batch_size: int = 25
    train_samples: int = 5000
    holdout_samples: int = 2000


@dataclass(frozen=True)
class ModelConfig(Record):
    """Architecture of the encoder."""

    vocabulary_size: int = limited(_SIZE)  # number of token ids of inputs, including PAD (the last one)
    classes: int = limited(_SIZE)
    length: int = limited(_SIZE)  # number of tokens of the longest input
    attention: str = _model("full", "Kind of attention; see [bold]semdiag list attentions[/].", common=True)
    k: int | None = _model(
        None,
        "Keys that each query keeps; in lsh of a bucket, in routing of a cluster, in moba of a block.",
        _SIZE,
        common=True,
    )
    blocks: int = _model(5, "Number of transformer blocks.", _SIZE, shown="recipe")
    width: int = _model(64, "Width of the residual stream.", _SIZE, shown="recipe")
    mlp_width: int = _model(64, "Width of the hidden layer of the MLPs.", _SIZE, shown="recipe")
    heads: int = _model(1, "Attention heads per block.", _SIZE)
    head_width: int = _model(64, "Width of each head; in the paper the model's width.", _SIZE, shown="recipe")
    activation: str = _model("relu", "Activation of the MLPs: relu, gelu or mish.", choices=ACTIVATIONS)
    dropout: float = _model(0.01, "Dropout probability.", "[0, 1)")
    inverse_temperature: float = _model(1.0, "Factor on the attention scores.", "(-inf, inf)")
    first_norm_eps: float = limited("[0, inf)", default=1e-5)  # of the first norm; the paper's code has 0
    pad_as_token: bool = _model(False, "Attend to padding, pool it, pad to a multiple of k: as the paper's runs.")
    global_tokens: int = _model(
        0, "For banded and block: learnt tokens that see all and are seen by all.", f"[0, {LARGEST_SIZE}]"
    )
    norm: str = _model(
        "pre", "Normalise pre (as in the paper's code) or post (as in its equations).", choices=NORMS
    )
    pooling: str = _model(
        "mean", "Classify the mean of the tokens, or cls, a learnt first token.", choices=POOLINGS
    )
    cls_as_key: bool = True  # False as in the paper's code under masks: CLS sees all, but no other token sees CLS
    selection_seed: int = limited(_SEED, default=0)  # random seed for random keys, hash functions, first centroids
    hash_rounds: int = _model(1, "For lsh: how many buckets a query is in, each by different hashes.", "[1, 100]")
    hash_bits: int | None = _model(None, "For lsh: sign bits of a hash. Default: by length and k.", "[1, 30]")
    hashes: str = _model("shared", "For lsh: shared (by angles) or asymmetric (by scores).", choices=HASHES)
    clusters: int | None = _model(None, "For routing: number of clusters. Default: one for every k tokens.", _SIZE)
    centroid_decay: float = _model(0.999, "For routing: share of its place a centroid keeps in a step.", "[0, 1]")
    score_gradient: str = _model(
        "exact", "For topk: exact, or straight-through (learn as if all keys were kept).", choices=SCORE_GRADIENTS
    )
    indexer_width: int = _model(16, "For indexer: width of its head.", _SIZE)
    indexer_warm_up: int = _model(
        100, "For indexer: steps with all keys, before it chooses.", f"[0, {LARGEST_SIZE}]"
    )
    chosen_blocks: int = _model(2, "For moba: blocks of a query, its own among them.", _SIZE)

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise unknown_name("attention", self.attention, ATTENTIONS)
        super().__post_init__()
        if self.width % 2 > 0:
            raise InputError(f"width must be even (sine and cosine positions). Got width={self.width}.")
        if 0 < self.dropout < 1e-9:  # gaps between drops must fit 64 bits
            raise InputError(f"dropout must be 0 or at least 1e-9. Got dropout={self.dropout}.")
        self._check_options()
        if "k" in ATTENTIONS[self.attention].options and not self.k:
            raise InputError(f"{self.attention} attention needs k, the number of keys kept per query.")
        if self.k and self.k > self.length:
            raise InputError(f"k must be at most the sequence length. Got k={self.k}, length={self.length}.")
        if not self.cls_as_key and (self.pooling != "cls" or self.global_tokens > 0):
            raise InputError("cls_as_key=False goes with CLS pooling and without global tokens.")
        for name, number in self._usual_numbers().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, number)

    def _check_options(self) -> None:
        """Refuse an option of other kinds of attention."""
        for f in fields(self):
            kinds = [name for name, kind in ATTENTIONS.items() if f.name in kind.options]
            value = getattr(self, f.name)
            if kinds and self.attention not in kinds and value != f.default:
                takers = kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} and {kinds[-1]}"
                verb = "does" if len(kinds) == 1 else "do"
                why = f"takes no {f.name}; {takers} {verb}. Got {f.name}={value}."
                raise InputError(f"{self.attention} attention {why}")

    def _usual_numbers(self) -> dict[str, int]:
        """Return the default number of hash bits or clusters, by the windows of k in the longest input."""
        windows = -(-self.length // (self.k or 1))
        if self.attention == "lsh":
            return {"hash_bits": 1 + (windows - 1).bit_length()}
        return {"clusters": windows} if self.attention == "routing" else {}

    @property
    def pad_id(self) -> int:
        """Token id of PAD; the global tokens have the ids after it, CLS the one after those."""
        return self.vocabulary_size - 1

    @property
    def cls_tokens(self) -> int:
        """Number of learned tokens before the input: 1 with CLS pooling, else 0."""
        return int(self.pooling == "cls")

    @property
    def extra_tokens(self) -> int:
        """Number of tokens that the encoder adds to every input: CLS and the global ones."""
        return self.cls_tokens + self.global_tokens

    @property
    def everywhere(self) -> tuple[int, int]:
        """Number of tokens at the start, and at the end, that attend to all valid keys under the mask."""
        unmasked_cls = self.attention in LOCAL or not self.cls_as_key
        return (self.cls_tokens if unmasked_cls else 0, self.global_tokens)

    @property
    def keys_kept(self) -> int | None:
        """Number of keys that an ordinary query keeps: k, plus CLS and the global tokens in local attention."""
        if self.k is None or self.attention not in LOCAL:
            return self.k
        return self.k + self.global_tokens + (self.cls_tokens if self.cls_as_key else 0)

    @property
    def attention_label(self) -> str:
        """Attention, k and all else that distinguishes masks, in one word: ``topk-5``, ``banded-5-global-1``."""
        usual = {f.name: f.default for f in fields(self)} | self._usual_numbers()
        words = [self.attention, *([] if self.k is None else [str(self.k)])]
        for name, word in _IN_THE_LABEL.items():
            value = getattr(self, name)
            if value != usual[name] and isinstance(value, bool):
                words.append(word)
            elif value != usual[name]:
                words.append(f"{word}{value:g}" if isinstance(value, float) else f"{word}{value}")
        return "-".join(words)


@dataclass(frozen=True)
class TextSource(Record):
    """Text of a language-modelling run, with its tokenizer."""

    file: str  # path as the user gave it
    sha256: str  # hash of the file
    tokenizer: str  # unigram or bpe
    vocabulary: int = field(metadata={"within": f"[1, {LARGEST_SIZE})"})  # number of pieces
    model: str = field(repr=False)  # SentencePiece's model in base64
    holdout_file: str | None = None  # held-out text; None means the last tenth of the lines of the first file
    holdout_sha256: str | None = None

    @property
    def label(self) -> str:
        """File name and six digits that distinguish texts, tokenizers and vocabularies."""
        content = f"{self.sha256} {self.holdout_sha256} {self.model}"
        name = re.sub(r"[^\w.-]+", "-", PurePath(self.file).stem)[:40]
        return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class ListOpsTrees(Record):
    """Law of trees for the task listops."""

    shortest: int = 501  # smallest number of tokens of a sample
    longest: int = 599
    max_depth: int = limited(_COUNT, default=10)  # largest depth, counted from 1 at the root
    min_arity: int = 2  # smallest number of arguments of an operator
    max_arity: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in ("shortest", "longest"), ("min_arity", "max_arity"):
            least = getattr(self, low)
            most = getattr(self, high)
            if not 1 <= least <= most:
                raise InputError(f"listops needs 1 ≤ {low} ≤ {high}. Got {least} and {most}.")

    @property
    def label(self) -> str:
        """Everything that distinguishes such laws, in one word."""
        arities = f"-arity-{self.min_arity}-{self.max_arity}".removesuffix("-arity-2-10")
        return f"{self.shortest}-{self.longest}-depth-{self.max_depth}{arities}"


@dataclass(frozen=True)
class TrainingConfig(Record):
    """Data and optimisation of one run."""

    nested = {"text": TextSource, "listops": ListOpsTrees}  # noqa: RUF012  # as of every record

    task: str
    length: int = _data(
        MISSING, "Tokens per sample; 5:20 draws every sample's length. Default: recipe, or a text's mean line.",
        _COUNT, flags="--length --window", metavar="N or LOW:HIGH", shown="", common=True
    )  # fmt: skip
    epochs: int = _steps(MISSING, "Epochs to train.", _COUNT, shown="recipe", common=True)
    seed: int = _data(153476998, "Seed of data, initialisation, dropout and batch order.", _SEED, common=True)
    train_samples: int = _data(
        5000, "Samples to train on. Default: 5000, or all windows of a text.", _COUNT, shown=""
    )
    holdout_samples: int = _data(2000, "Samples to hold out. Default: 2000, or all windows.", _COUNT, shown="")
    batch_size: int = _steps(25, "Samples per step.", _COUNT, shown="recipe")
    learning_rate: float = _steps(
        0.1,
        "Learning rate at the start. Default: recipe; 0.001 for adam and adamw.",
        "(0, inf)",
        shown="",
        common=True,
    )
    learning_rate_decay: float = _steps(0.9995, "Factor on the rate after each epoch.", "(0, inf)", shown="recipe")
    gradient_clip: float = _steps(0.5, "Clip gradients to this 2-norm.", "(0, inf]")
    snapshots: tuple[int, ...] = option("Run", (), "Epochs to keep as files, like 1,5,20.", metavar="EPOCH,EPOCH")
    text: TextSource | None = None  # text of the task text, and of no other task
    listops: ListOpsTrees | None = None  # trees of the task listops; None means the paper's
    optimizer: str = _steps("sgd", "sgd, adam or adamw.", choices=OPTIMIZERS)
    weight_decay: float | None = _steps(
        None, "Weight decay. Default: 0.01 for adamw, 0 for the others.", "[0, inf)"
    )
    until: float | None = _steps(
        None, "Stop at this training accuracy, like 0.999, after an epoch.", "(0, 1]", common=True
    )
    precision: str = field(default="float32", metadata={"choices": PRECISIONS})  # of the steps; no longer a choice
    compiled: bool = _steps(
        False, "Use torch.compile: for long inputs on CUDA, refused on a CPU.", flags="--compile"
    )
    query_key_scale: float = _steps(1.0, "Factor on the first W_q and W_k; δ changes by its square.", "(0, inf)")
    fresh_samples: bool = _data(
        False, "Draw new training samples for every epoch: no loss falls by memorising them."
    )
    frozen: tuple[str, ...] = _steps(
        (), "What stays as initialised: qk (W_q and W_k, with biases).", choices=FROZEN, metavar="PART,PART"
    )
    least_length: int | None = None  # smallest length of a sample; None means that every sample has the length
    exact: bool = _steps(
        False, "Evaluate the training samples after every epoch, as --until does. Default: after the last one; "
        "others have the means of their steps, with dropout and changing weights.",
    )  # fmt: skip

    @property
    def task_label(self) -> str:
        """What is learned, in one word: ``even-pairs``, ``listops-50-100-depth-5``, ``text-war-1f03ac``."""
        variant = self.text or self.listops
        return self.task if variant is None else f"{self.task}-{variant.label}"

    def __post_init__(self) -> None:
        for name in ("snapshots", "frozen"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        super().__post_init__()
        if (self.task == "text") != (self.text is not None):
            raise InputError(
                f"The task text and nothing else has a text. Got task={self.task!r}, text={self.text}."
            )
        if self.listops is not None and self.task != "listops":
            raise InputError(f"Only the task listops has trees. Got task={self.task!r}, {self.listops}.")
        if self.fresh_samples and self.text is not None:
            raise InputError("A text has no fresh samples: leave out --fresh-samples.")
        if len(set(self.frozen)) < len(self.frozen):
            raise InputError(f"frozen names every part once. Got {', '.join(self.frozen)}.")
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse lengths, rates, data and snapshots that cannot be."""
        if self.least_length is not None:
            if self.task in ("text", "listops"):
                raise InputError(f"The task {self.task} draws no lengths: give it one length.")
            if not 1 <= self.least_length < self.length:
                raise InputError(f"A range of lengths rises, like 5:20. Got {self.least_length}:{self.length}.")
        rise = math.log(self.learning_rate_decay) * (self.epochs - 1)
        rate = math.log(self.learning_rate) + max(rise, 0) + math.log(max(1, self.weight_decay or 0))
        if rate > math.log(_LARGEST_RATE):
            rule = (
                f"The learning rate, at its largest and times the weight decay, must be at most {_LARGEST_RATE:g}"
            )
            raise InputError(f"{rule}. Got e^{rate:.4g}.")
        data = (self.train_samples + self.holdout_samples) * self.length
        if data > _LARGEST_DATA:
            raise InputError(f"The samples must be at most {_LARGEST_DATA} tokens in all. Got {data}.")
        late = [epoch for epoch in self.snapshots if not 0 <= epoch <= self.epochs]
        if late:
            raise InputError(f"Snapshots must lie in 0 … {self.epochs} (epochs). Got {', '.join(map(str, late))}.")


def options() -> list[Field[Any]]:
    """Return the fields of both records that are options of ``semdiag train``."""
    return [f for record in (ModelConfig, TrainingConfig) for f in fields(record) if "help" in f.metadata]
