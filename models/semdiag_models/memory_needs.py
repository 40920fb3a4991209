"""A lower bound of the memory for training a model, computed before allocation."""

from semdiag_models.attention.kinds import ATTENTIONS
from semdiag_models.attention.matrix_attention import SHORT
from semdiag_models.model_config import ModelConfig
from semdiag_models.training_config import TrainingConfig

_FLOAT, _INDEX = 4, 8  # bytes
_COPIES = 2, 5  # copies of the parameters: with gradients; in hand-derived steps also buffers


def parameter_count(model: ModelConfig) -> int:
    """Return the number of an encoder's parameters."""
    width, inner, mlp = model.width, model.heads * model.head_width, model.mlp_width
    attention = width * 3 * inner + 3 * inner + inner * width + width
    block = attention + width * mlp + mlp + mlp * width + width
    ends = (model.vocabulary_size + model.extra_tokens) * width + width * model.classes + model.classes
    return model.blocks * block + ends


def training_memory(model: ModelConfig, training: TrainingConfig, on_cpu: bool = True) -> int:
    """Return a lower bound of the main memory for training, in bytes."""
    length = model.length + model.extra_tokens
    by_hand = on_cpu and training.precision == "float32" and not training.compiled
    copies = _COPIES[by_hand] if on_cpu else 1
    copies += 2 * (on_cpu and training.optimizer != "sgd")
    needed = _FLOAT * copies * parameter_count(model)
    needed += _FLOAT * 2 * length * model.width  # positions, and their angles during construction
    needed += _FLOAT * model.blocks * model.heads * model.head_width * (model.clusters or 0)
    if training.text is None:  # windows of a text share memory
        needed += _INDEX * model.length * (training.train_samples + training.holdout_samples)
    if not on_cpu:
        return needed
    batch = min(training.batch_size, training.train_samples)
    per_token = 2 * model.width + 4 * model.heads * model.head_width + model.mlp_width
    needed += _FLOAT * batch * length * model.blocks * per_token
    if by_hand and length <= SHORT:  # the weights of every block, and scores in two orders
        return needed + _FLOAT * batch * model.heads * length**2 * (model.blocks + 2)
    return needed + _square(model, length)


def _square(model: ModelConfig, length: int) -> int:
    """Return the bytes of scores or orders between all tokens of one sample that exist at the same time."""
    kind = ATTENTIONS[model.attention]
    entries = {
        "all": model.dropout > 0,  # one strip of one head
        "fixed": model.blocks * model.heads * kind.drawn,
        "redrawn": model.heads,
    }.get(kind.keeps, kind.follows_scores)
    return _FLOAT * entries * length**2
