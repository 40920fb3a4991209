import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from semdiag_files import InputError
from semdiag_models.config import _IN_THE_LABEL, ACTIVATIONS, ModelConfig, TrainingConfig
from semdiag_models.kinds import ATTENTIONS

MODEL = {"vocabulary_size": 3, "classes": 2, "length": 40}
TRAINING = {"task": "parity", "length": 40, "epochs": 10}


SIZE, SEED = "[1, 100000]", "[0, 9223372036854775808)"
OUTSIDE = [  # field, value, interval, and other fields without which it would be refused
    *((n, 0, SIZE) for n in ("vocabulary_size", "classes", "length", "blocks", "width", "mlp_width", "heads")),
    *(("head_width", n, SIZE) for n in (0, 10**9)),
    ("length", 100_001, SIZE),
    *(("dropout", p, "[0, 1)") for p in (1.0, -0.1, math.nan)),
    *(("inverse_temperature", t, "(-inf, inf)") for t in (math.nan, math.inf)),
    *(("first_norm_eps", eps, "[0, inf)") for eps in (-1.0, math.nan)),
    *(("k", k, SIZE, {"attention": "topk"}) for k in (0, -3)),
    ("global_tokens", -1, "[0, 100000]", {"attention": "banded", "k": 3}),
    ("hash_rounds", 0, "[1, 100]", {"attention": "lsh", "k": 3}),
    ("hash_bits", 31, "[1, 30]", {"attention": "lsh", "k": 3}),
    ("clusters", 0, SIZE, {"attention": "routing", "k": 3}),
    ("centroid_decay", math.nan, "[0, 1]", {"attention": "routing", "k": 3}),
    ("selection_seed", -1, SEED, {"attention": "random", "k": 3}),
]
OUTSIDE_TRAINING = [
    *((n, 0, "[1, 1000000000]") for n in ("length", "epochs", "train_samples", "holdout_samples", "batch_size")),
    *(
        (n, v, "(0, inf)")
        for n in ("learning_rate", "learning_rate_decay")
        for v in (0.0, -0.1, math.nan, math.inf)
    ),
    *(("gradient_clip", v, "(0, inf]") for v in (0.0, math.nan)),
    *(("until", v, "(0, 1]") for v in (0.0, 1.5, math.nan)),
    ("weight_decay", -1.0, "[0, inf)"),
    ("query_key_scale", 0.0, "(0, inf)"),
    *(("seed", seed, SEED) for seed in (-1, 2**63)),
]


@pytest.mark.parametrize("case", OUTSIDE + OUTSIDE_TRAINING, ids=lambda case: f"{case[0]}={case[1]}")
def test_a_number_outside_its_interval_is_refused_with_the_interval(case):
    name, value, interval, *other = case
    record, legal = (ModelConfig, MODEL) if case in OUTSIDE else (TrainingConfig, TRAINING)
    with pytest.raises(InputError) as refused:
        record(**{**legal, **(other[0] if other else {}), name: value})
    assert str(refused.value) == f"{name} must lie in {interval}. Got {name}={value}."


@pytest.mark.parametrize("value", [1e50, -1e50, 3.5e38])
@pytest.mark.parametrize("name", ["inverse_temperature", "learning_rate", "gradient_clip", "query_key_scale"])
def test_a_number_beyond_float32_is_refused(name, value):
    record, legal = (ModelConfig, MODEL) if name == "inverse_temperature" else (TrainingConfig, TRAINING)
    if value > 0 or record is ModelConfig:
        with pytest.raises(InputError, match=rf"^{name} must fit float32, up to 3\.4e\+38\."):
            record(**legal, **{name: value})
    record(**legal, **{name: 1e35})


def test_a_learning_rate_may_not_leave_float32_on_the_way():
    TrainingConfig(**{**TRAINING, "epochs": 35}, learning_rate=1.0, learning_rate_decay=10.0)
    for more in ({"epochs": 37}, {"epochs": 2, "learning_rate_decay": 3e38, "learning_rate": 2.0},
                 {"weight_decay": 1e20, "learning_rate": 1e19}):  # fmt: skip
        with pytest.raises(InputError, match=r"must be at most 1e\+35"):
            TrainingConfig(**{**TRAINING, "learning_rate": 1.0, "learning_rate_decay": 10.0, "epochs": 1, **more})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "topk5", "k": 5}, "Unknown attention 'topk5'. Did you mean 'topk'? Known: full, banded"),
        ({"activation": "rely"}, "Unknown activation 'rely'. Did you mean 'relu'? Known: relu, gelu, mish"),
        ({"norm": "after"}, "Unknown norm 'after'. Known: pre, post."),
        ({"pooling": "max"}, "Unknown pooling 'max'. Known: mean, cls."),
        ({"attention": "lsh", "k": 5, "hashes": "both"}, "Unknown hashes 'both'. Known: shared, asymmetric."),
        ({"width": 8, "dropout": 1e-18}, "dropout must be 0 or at least 1e-9. Got dropout=1e-18."),
        ({"width": 7}, "width must be even (sine and cosine positions). Got width=7."),
        ({"attention": "topk"}, "topk attention needs k, the number of keys kept per query."),
        ({"attention": "topk", "k": 41}, "k must be at most the sequence length. Got k=41, length=40."),
        ({"attention": "topk", "k": 3, "cls_as_key": False}, "cls_as_key=False goes with CLS pooling"),
        (
            {"attention": "random", "k": 3, "cls_as_key": False},
            "random attention takes no cls_as_key; banded, block",
        ),
    ],
)
def test_an_illegal_model_is_refused_with_what_would_work(fields, message):
    with pytest.raises(InputError) as refused:
        ModelConfig(**{**MODEL, **fields})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_samples": 10**9}, "The samples must be at most 1000000000 tokens in all. Got 40000080000."),
        ({"snapshots": (3, 11)}, "Snapshots must lie in 0 … 10 (epochs). Got 11."),
        ({"snapshots": (-1,)}, "Snapshots must lie in 0 … 10 (epochs). Got -1."),
        ({"optimizer": "sdg"}, "Unknown optimizer 'sdg'. Did you mean 'sgd'? Known: sgd, adam, adamw."),
        ({"precision": "int8"}, "Unknown precision 'int8'. Known: float32, tf32, bf16."),
    ],
)
def test_an_illegal_training_is_refused_with_what_would_work(fields, message):
    with pytest.raises(InputError) as refused:
        TrainingConfig(**{**TRAINING, **fields})
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "topk", "k": 1},
        {"attention": "topk", "k": 40},
        {"dropout": 0},
        {"dropout": 0.999},
        {"first_norm_eps": 0},
        {"inverse_temperature": -1.5},
    ],
)
def test_values_at_the_edge_of_the_legal_are_accepted(fields):
    config = ModelConfig(**MODEL, **fields)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(**MODEL),
        ModelConfig(**MODEL, attention="banded", k=9, activation="mish", pad_as_token=True, dropout=0),
        ModelConfig(**MODEL, attention="block", k=9, global_tokens=3, norm="post", pooling="cls"),
        ModelConfig(**MODEL, attention="random", k=9, selection_seed=2**63 - 1),
        TrainingConfig(**TRAINING),
        TrainingConfig(**TRAINING, seed=2**63 - 1, snapshots=(0, 3, 10), learning_rate=1),
    ],
)
def test_a_record_survives_the_round_trip_through_plain_values(config):
    values = config.to_dict()
    assert all(type(value) in (int, float, str, bool, list, type(None)) for value in values.values())
    assert type(config).from_dict(values) == config


def test_fields_with_a_default_may_be_missing():
    assert ModelConfig.from_dict(MODEL) == ModelConfig(**MODEL)
    assert TrainingConfig.from_dict(TRAINING).snapshots == ()


def test_a_missing_field_is_named():
    with pytest.raises(InputError, match=r"^ModelConfig is incomplete: .*'classes'"):
        ModelConfig.from_dict({"vocabulary_size": 3, "length": 40})


def test_an_unknown_field_is_named_with_the_nearest():
    with pytest.raises(InputError, match=r"^Unknown ModelConfig field 'lenght'\. Did you mean 'length'"):
        ModelConfig.from_dict({**MODEL, "lenght": 40})


@pytest.mark.parametrize(
    ("record", "field", "value", "message"),
    [
        (ModelConfig, "length", "40", "length must be int. Got '40'."),
        (ModelConfig, "length", True, "length must be int. Got True."),
        (ModelConfig, "length", 40.0, "length must be int. Got 40.0."),
        (ModelConfig, "length", None, "length must be int. Got None."),
        (ModelConfig, "k", "x", "k must be int | None. Got 'x'."),
        (ModelConfig, "dropout", "x", "dropout must be float. Got 'x'."),
        (ModelConfig, "attention", 7, "attention must be str. Got 7."),
        (ModelConfig, "pad_as_token", 1, "pad_as_token must be bool. Got 1."),
        (TrainingConfig, "snapshots", 5, "snapshots must be tuple[int, ...]. Got 5."),
        (TrainingConfig, "snapshots", ["a"], "snapshots must be tuple[int, ...]. Got ['a']."),
        (TrainingConfig, "snapshots", [True], "snapshots must be tuple[int, ...]. Got [True]."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(record, field, value, message):
    with pytest.raises(InputError) as refused:
        record.from_dict({**(MODEL if record is ModelConfig else TRAINING), field: value})
    assert str(refused.value) == message


def test_a_huge_value_of_the_wrong_type_is_shown_on_one_short_line():
    with pytest.raises(InputError) as refused:
        ModelConfig.from_dict({**MODEL, "k": torch.zeros(50, 50)})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 100


def test_records_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        ModelConfig(**MODEL).length = 5


def test_runs_that_differ_in_an_option_of_their_attention_have_other_labels():
    """The seed of a selection is left out, as the seed of the run is."""
    options = {name for kind in ATTENTIONS.values() for name in kind.options}
    assert options - {"k", "selection_seed"} <= {*_IN_THE_LABEL}


def test_the_label_names_attention_and_k():
    labels = [ModelConfig(**MODEL, attention=a, k=None if a == "full" else 5).attention_label for a in ATTENTIONS]
    assert labels == [a if a == "full" else f"{a}-5" for a in ATTENTIONS]
    assert ModelConfig(**MODEL, attention="block", k=5, global_tokens=3).attention_label == "block-5-global-3"


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"attention": "lsh", "hash_bits": 4}, "lsh-5"),  # 8 windows of 5, twice as many buckets: 4 bits
        ({"attention": "lsh", "hash_rounds": 2}, "lsh-5-rounds-2"),
        ({"attention": "lsh", "hash_bits": 2, "hashes": "asymmetric"}, "lsh-5-bits-2-asymmetric"),
        ({"attention": "routing", "clusters": 8}, "routing-5"),
        ({"attention": "routing", "clusters": 4, "centroid_decay": 0.9}, "routing-5-clusters-4-decay-0.9"),
    ],
)
def test_the_label_tells_hashes_and_clusters_apart_where_they_are_not_the_usual_ones(fields, label):
    assert ModelConfig(**MODEL, k=5, **fields).attention_label == label


@pytest.mark.parametrize(
    ("length", "k", "bits", "clusters"),
    [(40, 5, 4, 8), (41, 5, 5, 9), (40, 40, 1, 1), (3, 2, 2, 2), (600, 10, 7, 60)],
)
def test_numbers_of_buckets_and_clusters_follow_from_the_length_once(length, k, bits, clusters):
    sizes = {**MODEL, "length": length, "k": k}
    assert ModelConfig(**sizes, attention="lsh").hash_bits == bits
    model = ModelConfig(**sizes, attention="routing")
    assert model.clusters == clusters
    assert replace(model, length=2 * length).clusters == clusters  # of another length it stays the same model


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, None),
        ({"pooling": "cls"}, None),
        ({"attention": "topk", "k": 5, "pooling": "cls"}, 5),
        ({"attention": "banded", "k": 5, "pooling": "cls", "global_tokens": 2}, 8),
    ],
)
def test_the_extra_tokens_are_kept_by_every_query_of_local_attention(fields, kept):
    assert ModelConfig(**MODEL, **fields).keys_kept == kept


def test_pad_is_the_last_token_id():
    assert ModelConfig(**MODEL).pad_id == 2


def test_every_named_activation_is_legal():
    assert [ModelConfig(**MODEL, activation=name).activation for name in ACTIVATIONS] == ["relu", "gelu", "mish"]
