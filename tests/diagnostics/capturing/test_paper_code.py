"""A checkpoint of the paper's released code gives the values that the released code's own modules give."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.loading import load
from semdiag.mathematics.row_statistics import row_statistics
from semdiag_models import InputError

CLOSE = {"rtol": 0, "atol": 1e-9}
NAME = (
    "missdup-l40-s0-L40-5000-2000-0__demb:64__dmlp:64__nblocks:5__nheads:1__mask:{mask}__mask_size:{size}"
    "__dropout:0.01__init_lr:0.1__lr_decay_rate:0.9995__bsz:25__nepochs:250__seed:201__mlpa:relu{end}.pt"
)


@pytest.fixture(scope="module")
def run(paper_code):
    """Logits and attention calls of the fixture's sequences, in float64."""
    encoder = load(paper_code.checkpoint, paper_code.config).module.double()
    calls = []
    with torch.no_grad(), watch_attention(encoder, calls.append):
        logits = encoder(paper_code.true["tokens"])
    return logits, calls


def test_logits_and_loss_are_those_of_the_released_code(paper_code, run):
    logits = run[0]
    torch.testing.assert_close(logits, paper_code.true["logits"], **CLOSE)
    loss = F.cross_entropy(logits, paper_code.true["labels"])
    torch.testing.assert_close(loss, paper_code.true["ce_loss"].reshape(()), **CLOSE)


def test_scores_and_masks_are_those_of_the_released_code(paper_code, run):
    assert len(run[1]) == len(paper_code.true["dots"]) == 5
    for call, dots, mask in zip(run[1], paper_code.true["dots"], paper_code.true["mask"], strict=True):
        scores = call.scale * call.q[:2] @ call.k[:2].transpose(2, 3)
        torch.testing.assert_close(scores, dots, **CLOSE)
        selected = torch.zeros_like(mask).scatter(-1, call.selected[:2], True)
        assert torch.equal(selected, mask)


def test_dispersion_separation_and_loads_are_those_of_the_released_code(paper_code, run):
    true = paper_code.true
    for call in run[1]:
        found = row_statistics(call.q, call.k, call.scale, call.allowed, call.selected, call.queries)
        torch.testing.assert_close(found.dispersion(), true["dispersion"][call.layer], **CLOSE)
        torch.testing.assert_close(found.separation(), true["separation"][call.layer], **CLOSE)
        assert torch.equal(found.key_load(), true["beta"][call.layer])


def test_the_first_norm_matters_to_the_comparison(paper_code):
    encoder = load(paper_code.checkpoint, paper_code.config).module.double()
    encoder.blocks[0].attention_norm_eps = 1e-5
    with torch.no_grad():
        assert (encoder(paper_code.true["tokens"]) - paper_code.true["logits"]).abs().max() > 1e-9


def copied(paper_code, folder, mask="windowed", size=5, end="_best"):
    return shutil.copyfile(paper_code.checkpoint, folder / NAME.format(mask=mask, size=size, end=end))


def test_the_file_name_says_the_configuration(paper_code, tmp_path):
    model = load(copied(paper_code, tmp_path))
    config = model.module.config
    assert (config.attention, config.k, config.heads, config.blocks) == ("banded", 5, 1, 5)
    assert (config.first_norm_eps, config.pad_as_token, config.activation) == (0, True, "relu")
    assert (config.vocabulary_size, config.classes, config.length) == (4, 2, 40)
    assert (model.source, model.snapshot, model.task) == ("paper code", "best", "missing-duplicate")
    assert (model.seed, model.epoch, model.training) == (201, None, None)
    with torch.no_grad():
        logits = model.module.double()(paper_code.true["tokens"])
    torch.testing.assert_close(logits, paper_code.true["logits"], **CLOSE)


def test_a_snapshot_with_another_ending_is_not_called_best(paper_code, tmp_path):
    assert load(copied(paper_code, tmp_path, end="")).snapshot == "unknown"


@pytest.mark.parametrize(
    ("mask", "size", "attention", "k"),
    [
        ("none", 5, "full", None),
        ("none", -1, "full", None),
        ("windowed", -1, "full", None),
        ("topk", 5, "topk", 5),
        ("blklocal", 8, "block", 8),
    ],
)
def test_every_supported_mask_is_read_from_the_name(paper_code, tmp_path, mask, size, attention, k):
    config = load(copied(paper_code, tmp_path, mask, size)).module.config
    assert (config.attention, config.k) == (attention, k)


@pytest.mark.parametrize("mask", ["botk", "rnd"])
def test_masks_that_are_not_supported_are_named(paper_code, tmp_path, mask):
    with pytest.raises(
        InputError, match=f"uses mask '{mask}'. Supported are the masks none, windowed, blklocal, topk"
    ):
        load(copied(paper_code, tmp_path, mask))


def test_global_tokens_are_refused(paper_code, tmp_path):
    path = tmp_path / NAME.format(mask="windowed", size="5__ngtk:2", end="_best")
    shutil.copyfile(paper_code.checkpoint, path)
    with pytest.raises(InputError, match="uses 2 global tokens"):
        load(path)
    none = tmp_path / NAME.format(mask="windowed", size="5__ngtk:0", end="_best")
    assert load(shutil.copyfile(paper_code.checkpoint, none)).module.config.attention == "banded"


def test_the_inverse_temperature_is_read_from_the_name(paper_code, tmp_path):
    path = tmp_path / NAME.format(mask="none", size="-1__inv_temp:2.5", end="_best")
    model = load(shutil.copyfile(paper_code.checkpoint, path))
    assert model.module.blocks[0].attention.scale == pytest.approx(2.5 / 8)


def test_a_configuration_overrides_the_file_name(paper_code, tmp_path):
    model = load(copied(paper_code, tmp_path), {"mask_type": "topk", "mask_size": 7, "seed": 3, "task": "parity"})
    assert (model.module.config.attention_label, model.seed, model.task) == ("topk-7", 3, "parity")


def test_a_name_that_says_nothing_needs_a_configuration(paper_code):
    with pytest.raises(
        InputError, match=r"does not say mask_type, mask_size, n_heads\. Give them .* --config FILE"
    ):
        load(paper_code.checkpoint)
    with pytest.raises(InputError, match=r"does not say n_heads\."):
        load(paper_code.checkpoint, {"mask_type": "topk", "mask_size": 5})


def test_an_unknown_task_stays_unknown(paper_code):
    model = load(paper_code.checkpoint, {**paper_code.config, "task": "juggling", "seed": "tuesday"})
    assert (model.task, model.seed) == (None, None)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("mask_size", 0, "k must be at least 1. Got k=0."),
        ("mask_size", 41, "k must be at most the sequence length. Got k=41, length=40."),
        ("mask_size", "5", "ModelConfig.k must be int"),
        ("mask_type", ["topk"], "uses mask"),
        ("n_heads", 0, "n_heads must be a positive whole number. Got 0."),
        ("n_heads", "one", "n_heads must be a positive whole number. Got 'one'."),
        ("n_heads", 3, "has shape (192, 64); its configuration says (189, 64)."),
        ("n_heads", 100, "head_width must be at least 1."),
        ("activation", "tanh", "Unknown activation 'tanh'."),
        ("activation", None, "ModelConfig.activation must be str."),
        ("inv_temp", "warm", "ModelConfig.inverse_temperature must be float. Got 'warm'."),
        ("inv_temp", float("nan"), "inverse_temperature must be finite."),
    ],
)
def test_an_entry_of_the_configuration_that_does_not_fit_is_named(paper_code, entry, value, message):
    with pytest.raises(InputError) as refused:
        load(paper_code.checkpoint, {**paper_code.config, entry: value})
    assert message in str(refused.value)
    assert "fresh_windowed5.pt" in str(refused.value)


MARK = "encoder.transformer.0.attention."


def replaced(name, make):
    return lambda state: {**state, name: make(state[name])}


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("embedding.weight"), "holds no tensor 'embedding.weight'"),
        (without("pos_encoder.pe"), "holds no tensor 'pos_encoder.pe'"),
        (without("encoder.transformer.4.ffn.3.bias"), "lacks parameter 'encoder.transformer.4.ffn.3.bias'"),
        (
            without("encoder.transformer.2.attention.W_k.weight"),
            "lacks parameter 'encoder.transformer.2.attention",
        ),
        (replaced("embedding.weight", lambda t: t[0]), "'embedding.weight' has shape (64,)"),
        (replaced("linear.weight", lambda t: t.sum()), "'linear.weight' has shape ()"),
        (replaced("linear.weight", lambda t: t[:, :5]), "parameter 'head.weight' has shape (2, 5)"),
        (replaced("linear.bias", lambda t: 3), "holds no tensor 'linear.bias'"),
        (replaced("linear.bias", lambda t: t.to_sparse()), "holds no tensor 'linear.bias'"),
        (replaced("pos_encoder.pe", lambda t: t[0]), "'pos_encoder.pe' has shape (40, 64)"),
        (
            replaced("pos_encoder.pe", lambda t: t[..., :5]),
            "'pos_encoder.pe' has shape (1, 40, 5), which does not fit",
        ),
        (replaced("pos_encoder.pe", lambda t: t[:0]), "'pos_encoder.pe' has shape (0, 40, 64)"),
        (replaced(MARK + "W_q.weight", lambda t: t[:, :3]), "W_q, W_k and W_v do not fit"),
        (replaced(MARK + "W_k.weight", lambda t: t[:3]), "'blocks.0.attention.qkv.weight' has shape (131, 64)"),
        (replaced(MARK + "W_k.weight", lambda t: t.sum()), "W_q, W_k and W_v do not fit"),
        (replaced(MARK + "W_k.bias", lambda t: t.to("meta")), "holds no tensor"),
        (lambda s: {**s, "encoder.transformer.77777.x": torch.ones(1)}, "lacks parameter 'encoder.transformer.5."),
        (lambda s: {**s, "encoder.transformer.777777.x": torch.ones(1)}, "blocks must be at most"),
    ],
)
def test_a_damaged_checkpoint_says_what_is_wrong_with_it(paper_code, tmp_path, damage, message):
    state = damage(torch.load(paper_code.checkpoint, weights_only=True))
    torch.save(state, tmp_path / "damaged.pt")
    with pytest.raises(InputError) as refused:
        load(tmp_path / "damaged.pt", paper_code.config)
    assert message in str(refused.value)
    assert "damaged.pt" in str(refused.value)


def test_parameters_without_a_name_do_no_harm(paper_code, tmp_path):
    torch.save({**torch.load(paper_code.checkpoint, weights_only=True), 5: torch.ones(2)}, tmp_path / "odd.pt")
    assert load(tmp_path / "odd.pt", paper_code.config).module.config.blocks == 5


def test_default_inputs_are_fresh_samples_of_the_task_and_say_so(paper_code, tmp_path):
    model = load(copied(paper_code, tmp_path))
    tokens, labels, source = model.default_inputs(20, 3)
    assert (tokens.shape, labels.shape) == ((20, 40), (20,))
    assert source == "fresh samples of missing-duplicate (seed 3), not the model's own held-out data"
    assert (tokens == 2).sum(1).tolist() == [1] * 20
    assert torch.equal(tokens, model.default_inputs(20, 3)[0])
    assert not torch.equal(tokens, model.default_inputs(20, 4)[0])


def test_default_inputs_of_a_short_model_are_whole_samples(paper_code, tmp_path):
    state = torch.load(paper_code.checkpoint, weights_only=True)
    path = tmp_path / NAME.format(mask="windowed", size=5, end="_best")
    torch.save({**state, "pos_encoder.pe": state["pos_encoder.pe"][:, :11]}, path)
    tokens, labels, _ = load(path).default_inputs(50, 0)
    assert tokens.shape == (50, 11)
    assert tokens[:, -1].tolist() == [3] * 50
    twins = (tokens[:, :10] == 2).int().argmax(1).add(5).remainder(10)
    assert torch.equal(tokens.gather(1, twins[:, None])[:, 0], labels)


def test_default_inputs_need_a_task(paper_code):
    model = load(paper_code.checkpoint, paper_code.config)
    with pytest.raises(InputError, match=r"^The task of .* is unknown: name its inputs with --inputs FILE\.$"):
        model.default_inputs(20, 0)
