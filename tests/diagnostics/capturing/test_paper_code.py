"""A checkpoint of the paper's released code gives the values that the released code's own modules give."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.loading import load
from semdiag.mathematics.row_statistics import row_statistics
from semdiag.measuring.calls.collector import scored_rows
from semdiag_files import InputError
from semdiag_models import Encoder, ModelConfig

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


@pytest.mark.processor
def test_logits_and_loss_are_those_of_the_released_code(paper_code, run):
    logits = run[0]
    torch.testing.assert_close(logits, paper_code.true["logits"], **CLOSE)
    loss = F.cross_entropy(logits, paper_code.true["labels"])
    torch.testing.assert_close(loss, paper_code.true["ce_loss"].reshape(()), **CLOSE)


@pytest.mark.processor
def test_scores_and_masks_are_those_of_the_released_code(paper_code, run):
    assert len(run[1]) == len(paper_code.true["dots"]) == 5
    for call, dots, mask in zip(run[1], paper_code.true["dots"], paper_code.true["mask"], strict=True):
        scores = call.scale * call.q[:2] @ call.k[:2].transpose(2, 3)
        torch.testing.assert_close(scores, dots, **CLOSE)
        selected = torch.zeros_like(mask).scatter(-1, call.selected[:2], True)
        assert torch.equal(selected, mask)


@pytest.mark.processor
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
        ("botk", 7, "bottomk", 7),
    ],
)
def test_every_supported_mask_is_read_from_the_name(paper_code, tmp_path, mask, size, attention, k):
    config = load(copied(paper_code, tmp_path, mask, size)).module.config
    assert (config.attention, config.k) == (attention, k)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ("rnd", "draws its random mask anew in every forward pass, so there is no single model to measure."),
        ("lsh", "uses mask 'lsh'."),
    ],
)
def test_masks_that_are_not_supported_are_named(paper_code, tmp_path, mask, why):
    with pytest.raises(InputError) as refused:
        load(copied(paper_code, tmp_path, mask))
    assert f"{why} Supported are the masks none, windowed, blklocal, topk, botk." in str(refused.value)


def test_what_is_said_of_cls_is_read_from_the_name(paper_code, tmp_path):
    for said, mask, expected in (
        ("True", "windowed", ("mean", True, 4, 40)),
        ("False", "windowed", ("cls", False, 3, 39)),
        ("False", "topk", ("cls", False, 3, 39)),
        ("False", "none", ("cls", True, 3, 39)),
    ):
        path = tmp_path / NAME.format(mask=mask, size=f"5__nocls:{said}", end="_best")
        config = load(shutil.copyfile(paper_code.checkpoint, path)).module.config
        assert (config.pooling, config.cls_as_key, config.vocabulary_size, config.length) == expected
    model = load(path, {"nocls": True})
    assert model.module.config.pooling == "mean"


def test_cls_and_global_tokens_are_refused_together(paper_code, tmp_path):
    path = tmp_path / NAME.format(mask="windowed", size="5__ngtk:1__nocls:False", end="_best")
    with pytest.raises(InputError, match="has CLS and 1 global tokens, which the paper's code refuses"):
        load(shutil.copyfile(paper_code.checkpoint, path))


def named_as_theirs(encoder):
    """An encoder's parameters under the names of the released code."""
    ours = encoder.state_dict()
    state = {"embedding.weight": ours["embedding.weight"], "pos_encoder.pe": encoder.positions[None]}
    for part in ("weight", "bias"):
        state[f"linear.{part}"] = ours[f"head.{part}"]
        for i in range(encoder.config.blocks):
            theirs = f"encoder.transformer.{i}."
            for name, values in zip("qkv", ours[f"blocks.{i}.attention.qkv.{part}"].chunk(3), strict=True):
                state[f"{theirs}attention.W_{name}.{part}"] = values.clone()
            state[f"{theirs}attention.W_o.{part}"] = ours[f"blocks.{i}.attention.out.{part}"]
            state[f"{theirs}ffn.0.{part}"] = ours[f"blocks.{i}.expand.{part}"]
            state[f"{theirs}ffn.3.{part}"] = ours[f"blocks.{i}.contract.{part}"]
    return state


def cls_mask(scores, mask, size, last):
    """The same with CLS in front: it attends to all, no other query attends to it; no mask in the last block."""
    length = scores.shape[-1]
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    keep[:, :, 0] = True
    if mask == "none" or last:
        return torch.ones_like(keep)
    for b, h, i in np.ndindex(*scores.shape[:3]):
        if i and mask in ("topk", "botk"):
            order = sorted(range(1, length), key=lambda j: float(scores[b, h, i, j]), reverse=mask == "topk")
            keep[b, h, i, order[:size]] = True
        elif i:
            first = min(max(i - (size - 1) // 2, 1), length - size)
            if mask == "blklocal":
                first = 1 + (i - 1) // size * size
            keep[b, h, i, first : min(first + size, length)] = True
    return keep


def released_mask(scores, mask, size, extra):
    """Which keys the released code keeps: (B, H, L, L) bool, by loops."""
    length = scores.shape[-1]
    inner, keep = length - extra, torch.zeros(scores.shape, dtype=torch.bool)
    keep[:, :, inner:, :] = keep[:, :, :, inner:] = extra > 0
    for i in range(inner):
        first = min(max(i - (size - 1) // 2, 0), inner - size)
        if mask == "blklocal":
            first = i // size * size
        keep[:, :, i, first : min(first + size, inner)] = True
    if mask != "botk":
        return keep
    return torch.zeros_like(keep).scatter(-1, scores.topk(size, largest=False).indices, True)


def released_logits(state, ids, mask_of, cls):
    """Two blocks of two heads in float64, written out; the last one has one query, CLS, if there is one."""
    state = {name: values.double() for name, values in state.items()}
    x = state["embedding.weight"][ids] * 4 + state["pos_encoder.pe"][:, : ids.shape[1]]
    for i in range(2):
        w = {name.removeprefix(f"encoder.transformer.{i}."): v for name, v in state.items()}
        u = F.layer_norm(x, (16,), eps=1e-5 if i else 0)
        q, k, v = (
            F.linear(u, w[f"attention.W_{n}.weight"], w[f"attention.W_{n}.bias"])
            .unflatten(-1, (2, 16))
            .transpose(1, 2)
            for n in "qkv"
        )
        scores = q @ k.mT / 4
        scores = scores.masked_fill(~mask_of(scores, i == 1), -1e15)
        if cls and i == 1:
            scores, x = scores[:, :, :1], x[:, :1]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, w["attention.W_o.weight"], w["attention.W_o.bias"])
        hidden = F.relu(F.linear(F.layer_norm(x, (16,)), w["ffn.0.weight"], w["ffn.0.bias"]))
        x = x + F.linear(hidden, w["ffn.3.weight"], w["ffn.3.bias"])
    return F.linear(x[:, 0] if cls else x.mean(1), state["linear.weight"], state["linear.bias"])


def as_released(tmp_path, mask, entries, **fields):
    """A random model stored as the released code does, and its state dict."""
    torch.manual_seed(1)
    sizes = {"vocabulary_size": 4, "classes": 2, "length": 10, "blocks": 2, "width": 16, "mlp_width": 16}
    encoder = Encoder(ModelConfig(**sizes, heads=2, head_width=16, **fields))
    with torch.no_grad():
        for name, values in encoder.named_parameters():
            if "qkv" in name:
                values.mul_(3)  # so that it matters which keys are kept
    state = named_as_theirs(encoder)
    path = tmp_path / NAME.format(mask=mask, size=entries, end="_best").replace("nheads:1", "nheads:2")
    torch.save(state, path)
    return load(path), state


@pytest.mark.parametrize(
    ("mask", "extra"), [("botk", 0), *((m, g) for m in ("windowed", "blklocal") for g in (1, 3))]
)
def test_controls_and_global_tokens_compute_what_the_released_code_does(tmp_path, mask, extra):
    """Written out by its definition: global tokens with the last ids at the end, mean over all, PAD a token."""
    kind = {"botk": "bottomk", "windowed": "banded", "blklocal": "block"}[mask]
    model, state = as_released(tmp_path, mask, f"5__ngtk:{extra}", attention=kind, k=5, global_tokens=extra)
    assert (model.module.config.global_tokens, model.module.config.length) == (extra, 10)
    assert (model.module.config.pad_id, model.module.config.attention) == (3, kind)
    tokens = torch.randint(4, (3, 10))
    ids = torch.cat([tokens, torch.arange(4, 4 + extra).expand(3, -1)], 1)
    logits = released_logits(state, ids, lambda scores, last: released_mask(scores, mask, 5, extra), cls=False)
    with torch.no_grad():
        torch.testing.assert_close(model.module.double()(tokens), logits, **CLOSE)
    inputs, labels, _ = model.default_inputs(20, 0)
    assert (inputs.shape, labels.shape) == ((20, 10), (20,))


@pytest.mark.parametrize("mask", ["none", "windowed", "blklocal", "topk", "botk"])
def test_a_cls_token_computes_what_the_released_code_does(tmp_path, mask):
    """CLS has the last id and stands in front; logits, and which keys each query of the first block keeps."""
    kind = {"botk": "bottomk", "windowed": "banded", "blklocal": "block", "topk": "topk"}.get(mask, "full")
    fields = {"attention": kind, "k": None if kind == "full" else 5, "pooling": "cls"}
    model, state = as_released(tmp_path, mask, "5__nocls:False", **fields)
    tokens, masks = torch.randint(4, (3, 10)), []

    def mask_of(scores, last):
        masks.append(cls_mask(scores, mask, 5, last))
        return masks[-1]

    logits = released_logits(state, F.pad(tokens, (1, 0), value=4), mask_of, cls=True)
    calls, encoder = [], model.module.double()
    with torch.no_grad(), watch_attention(encoder, calls.append):
        torch.testing.assert_close(encoder(tokens), logits, **CLOSE)
    rows = scored_rows(calls[0])
    assert torch.equal(rows.selected, masks[0])
    assert (rows.separation[:, :, 1:] > 0).all() == (mask in ("topk", "none"))  # CLS is not among what is dropped
    with torch.no_grad():  # ours, where CLS is an ordinary token (or global), is another function
        ordinary = Encoder(replace(encoder.config, cls_as_key=True)).double().eval()
        ordinary.load_state_dict(encoder.state_dict())
        assert ((ordinary(tokens) - logits).abs().max() > 1e-6) == (mask != "none")


def test_global_tokens_that_do_not_fit_are_refused(paper_code, tmp_path):
    for size, message in (
        ("5__ngtk:4", "ngtk must be a number of global tokens, less than 4. Got 4."),
        ("5__ngtk:-1", "ngtk must be a number of global tokens, less than 4. Got -1."),
        ("5__ngtk:few", "ngtk must be a number of global tokens, less than 4. Got 'few'."),
        ("-1__ngtk:1", "full attention takes no global_tokens; banded and block do."),
    ):
        path = tmp_path / NAME.format(mask="windowed", size=size, end="_best")
        with pytest.raises(InputError) as refused:
            load(shutil.copyfile(paper_code.checkpoint, path))
        assert message in str(refused.value)
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
        ("mask_size", 0, "k must lie in [1, 100000]. Got k=0."),
        ("mask_size", 41, "k must be at most the sequence length. Got k=41, length=40."),
        ("mask_size", "5", "k must be int"),
        ("mask_type", ["topk"], "uses mask"),
        ("n_heads", 0, "n_heads must be a positive whole number. Got 0."),
        ("n_heads", "one", "n_heads must be a positive whole number. Got 'one'."),
        ("n_heads", 3, "has shape (192, 64); its configuration says (189, 64)."),
        ("n_heads", 100, "head_width must lie in [1,"),
        ("activation", "tanh", "Unknown activation 'tanh'."),
        ("activation", None, "activation must be str."),
        ("inv_temp", "warm", "inverse_temperature must be float. Got 'warm'."),
        ("inv_temp", float("nan"), "inverse_temperature must lie in"),
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
        (replaced("linear.bias", lambda t: t.to_sparse()), "holds a sparse tensor"),
        (replaced("pos_encoder.pe", lambda t: t[0]), "'pos_encoder.pe' has shape (40, 64)"),
        (
            replaced("pos_encoder.pe", lambda t: t[..., :5]),
            "'pos_encoder.pe' has shape (1, 40, 5), which does not fit",
        ),
        (replaced("pos_encoder.pe", lambda t: t[:0]), "'pos_encoder.pe' has shape (0, 40, 64)"),
        (replaced(MARK + "W_q.weight", lambda t: t[:, :3]), "W_q, W_k and W_v do not fit"),
        (replaced(MARK + "W_k.weight", lambda t: t[:3]), "'blocks.0.attention.qkv.weight' has shape (131, 64)"),
        (replaced(MARK + "W_k.weight", lambda t: t.sum()), "W_q, W_k and W_v do not fit"),
        (replaced(MARK + "W_k.bias", lambda t: t.to("meta")), "holds a meta tensor"),
        (lambda s: {**s, "encoder.transformer.77777.x": torch.ones(1)}, "lacks parameter 'encoder.transformer.5."),
        (lambda s: {**s, "encoder.transformer.777777.x": torch.ones(1)}, "blocks must lie in"),
        (lambda s: {**without("linear.bias")(s), f"encoder.transformer.{'7' * 5000}.x": torch.ones(1)}, "lacks"),
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
