import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from semdiag_models.config import ACTIVATIONS, ATTENTIONS, ModelConfig, TrainingConfig
from semdiag_models.reading import InputError

MODEL = {"vocabulary_size": 3, "classes": 2, "length": 40}
TRAINING = {"task": "parity", "length": 40, "epochs": 10}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "topk5", "k": 5}, "Unknown attention 'topk5'. Did you mean 'topk'? Known: full, banded"),
        ({"activation": "rely"}, "Unknown activation 'rely'. Did you mean 'relu'? Known: relu, gelu, mish"),
        *(
            ({name: 0}, f"{name} must be at least 1. Got {name}=0.")
            for name in (
                "vocabulary_size",
                "classes",
                "length",
                "blocks",
                "width",
                "mlp_width",
                "heads",
                "head_width",
            )
        ),
        ({"width": 10**9}, "width must be at most 100000. Got width=1000000000."),
        ({"length": 100_001}, "length must be at most 100000. Got length=100001."),
        ({"width": 7}, "width must be even (sine and cosine positions). Got width=7."),
        ({"dropout": 1.0}, "dropout must be 0 or lie in [1e-09, 1). Got dropout=1.0."),
        ({"dropout": -0.1}, "dropout must be 0 or lie in [1e-09, 1). Got dropout=-0.1."),
        ({"dropout": math.nan}, "dropout must be 0 or lie in [1e-09, 1). Got dropout=nan."),
        ({"dropout": 1e-18}, "dropout must be 0 or lie in [1e-09, 1). Got dropout=1e-18."),
        ({"inverse_temperature": math.nan}, "inverse_temperature must be finite. Got nan."),
        ({"inverse_temperature": math.inf}, "inverse_temperature must be finite. Got inf."),
        ({"first_norm_eps": -1.0}, "first_norm_eps must be finite and not negative. Got -1.0."),
        ({"first_norm_eps": math.nan}, "first_norm_eps must be finite and not negative. Got nan."),
        ({"k": 5}, "Full attention keeps every key and takes no k. Got k=5."),
        ({"attention": "topk"}, "topk attention needs k, the number of keys kept per query."),
        ({"attention": "banded", "k": 0}, "k must be at least 1. Got k=0."),
        ({"attention": "block", "k": -3}, "k must be at least 1. Got k=-3."),
        ({"attention": "topk", "k": 41}, "k must be at most the sequence length. Got k=41, length=40."),
        ({"attention": "bottomk"}, "bottomk attention needs k, the number of keys kept per query."),
        (
            {"attention": "random-k", "k": 5},
            "Unknown attention 'random-k'. Did you mean 'random'? Known: full, banded",
        ),
        *(
            (
                {"attention": kind, "k": k, "global_tokens": 2},
                f"Global tokens go with banded and block attention only. Got 2 with {kind} attention.",
            )
            for kind, k in (("full", None), ("topk", 5), ("bottomk", 5), ("random", 5))
        ),
        ({"global_tokens": -1}, "global_tokens must lie in 0 … 100000. Got -1."),
        ({"norm": "after"}, "Unknown norm 'after'. Known: pre, post."),
        ({"pooling": "max"}, "Unknown pooling 'max'. Known: mean, cls."),
        (
            {"attention": "topk", "k": 5, "hash_rounds": 2},
            "Only lsh attention takes hash_rounds. Got it with topk.",
        ),
        ({"attention": "topk", "k": 5, "clusters": 2}, "Only routing attention takes clusters. Got it with topk."),
        ({"hashes": "asymmetric"}, "Only lsh attention takes hashes. Got it with full."),
        ({"attention": "lsh", "k": 5, "hashes": "both"}, "Unknown hashes 'both'. Known: shared, asymmetric."),
        ({"attention": "lsh", "k": 5, "hash_rounds": 0}, "hash_rounds must lie in 1 … 100. Got 0."),
        ({"attention": "lsh", "k": 5, "hash_bits": 31}, "hash_bits must lie in 1 … 30. Got 31."),
        ({"attention": "routing", "k": 5, "clusters": 0}, "clusters must lie in 1 … 100000. Got 0."),
        (
            {"attention": "routing", "k": 5, "centroid_decay": math.nan},
            "centroid_decay must lie in 0 … 1. Got nan.",
        ),
        ({"attention": "lsh"}, "lsh attention needs k, the number of keys kept per query."),
        (
            {"selection_seed": 3},
            "Only random, lsh and routing attention take a selection_seed. Got one with full.",
        ),
        (
            {"attention": "random", "k": 5, "selection_seed": -1},
            "selection_seed must lie in 0 … 2^63 - 1. Got -1.",
        ),
        ({"attention": "topk", "k": 3, "cls_as_key": False}, "cls_as_key=False goes with CLS, local, topk or"),
        ({"pooling": "cls", "cls_as_key": False}, "cls_as_key=False goes with CLS"),
    ],
)
def test_an_illegal_model_is_refused_with_what_would_work(fields, message):
    with pytest.raises(InputError) as refused:
        ModelConfig(**{**MODEL, **fields})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: 0}, f"{name} must be at least 1. Got {name}=0.")
            for name in ("length", "epochs", "train_samples", "holdout_samples", "batch_size")
        ),
        *(
            ({name: value}, f"{name} must be positive. Got {name}={value}.")
            for name in ("learning_rate", "learning_rate_decay", "gradient_clip")
            for value in (0.0, -0.1, math.nan)
        ),
        ({"train_samples": 10**12}, "The samples must be at most 1000000000 tokens in all. Got 40000000080000."),
        ({"seed": -1}, "seed must lie in 0 … 2^63 - 1. Got seed=-1."),
        ({"seed": 2**63}, f"seed must lie in 0 … 2^63 - 1. Got seed={2**63}."),
        ({"snapshots": (3, 11)}, "Snapshots must lie in 0 … 10 (epochs). Got 11."),
        ({"snapshots": (-1,)}, "Snapshots must lie in 0 … 10 (epochs). Got -1."),
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
        (ModelConfig, "length", "40", "ModelConfig.length must be int. Got '40'."),
        (ModelConfig, "length", True, "ModelConfig.length must be int. Got True."),
        (ModelConfig, "length", 40.0, "ModelConfig.length must be int. Got 40.0."),
        (ModelConfig, "length", None, "ModelConfig.length must be int. Got None."),
        (ModelConfig, "k", "x", "ModelConfig.k must be int | None. Got 'x'."),
        (ModelConfig, "dropout", "x", "ModelConfig.dropout must be float. Got 'x'."),
        (ModelConfig, "attention", 7, "ModelConfig.attention must be str. Got 7."),
        (ModelConfig, "pad_as_token", 1, "ModelConfig.pad_as_token must be bool. Got 1."),
        (TrainingConfig, "snapshots", 5, "TrainingConfig.snapshots must be tuple[int, ...]. Got 5."),
        (TrainingConfig, "snapshots", ["a"], "TrainingConfig.snapshots must be tuple[int, ...]. Got ['a']."),
        (TrainingConfig, "snapshots", [True], "TrainingConfig.snapshots must be tuple[int, ...]. Got [True]."),
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


def test_the_label_names_attention_and_k():
    labels = [ModelConfig(**MODEL, attention=a, k=None if a == "full" else 5).attention_label for a in ATTENTIONS]
    kinds = ("banded", "block", "topk", "bottomk", "random", "redrawn", "lsh", "routing")
    assert labels == ["full", *(f"{kind}-5" for kind in kinds)]
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
