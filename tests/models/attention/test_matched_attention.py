"""Encoders with hashed, clustered, redrawn, indexed and pooled attention: dense references, training, resuming."""

import contextlib

import pytest
import torch

from semdiag_models import fast_attention as attention_module
from semdiag_models.checkpoint import read_checkpoint
from semdiag_models.config import ModelConfig
from semdiag_models.model import AttentionCore, Encoder
from semdiag_models.run_folder import open_run, open_seed_runs, train_run
from semdiag_models.train import DivergedError, Trainer

CPU = torch.device("cpu")
KINDS = {
    "lsh": {"attention": "lsh", "k": 3},
    "lsh, k beyond a divisor": {"attention": "lsh", "k": 5, "hash_rounds": 2, "hashes": "asymmetric"},
    "routing": {"attention": "routing", "k": 3},
    "routing, few clusters": {"attention": "routing", "k": 2, "clusters": 2, "centroid_decay": 0.5},
    "redrawn": {"attention": "redrawn", "k": 3},
    "indexer": {"attention": "indexer", "k": 3, "indexer_warm_up": 0},
    "indexer, warming up": {"attention": "indexer", "k": 3, "indexer_width": 3, "indexer_warm_up": 6},
    "moba": {"attention": "moba", "k": 2},
}
WHOLE = {  # what keeps everything
    "lsh": {"attention": "lsh", "k": 9, "hash_rounds": 2},
    "routing": {"attention": "routing", "k": 9, "clusters": 1},
    "redrawn": {"attention": "redrawn", "k": 9},
    "indexer": {"attention": "indexer", "k": 9},
    "moba": {"attention": "moba", "k": 4, "chosen_blocks": 3},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def encoder(kind, pooling="mean", **fields):
    sizes = {"vocabulary_size": 3, "classes": 2, "length": 9, "width": 8, "mlp_width": 8, "heads": 2}
    model = ModelConfig(
        **{**sizes, "head_width": 4, "blocks": 2, "dropout": 0.0, **kind, "pooling": pooling, **fields}
    )
    return Encoder(model).double().eval()


def weights_of(model):
    """The parameters that all kinds have."""
    return [parameter for name, parameter in model.named_parameters() if ".indexer." not in name]


TOKENS = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 1, 1, 0, 2, 2, 2, 2], [1, 2, 2, 2, 2, 2, 2, 2, 2]])


def with_dense_cores(model):
    """Let every core attend through an L × L mask that holds what it was told to select."""

    def dense(core, inputs, output):
        q, k, v, scale, valid, selected = inputs
        length = q.shape[2]
        kept = torch.zeros(*q.shape[:3], length + 1, dtype=torch.bool)
        kept = kept.scatter(-1, selected.where(selected >= 0, length), True)[..., :-1]
        assert valid is None or not (kept & ~valid[:, None, None, :]).any()
        scores = (scale * q @ k.transpose(2, 3)).masked_fill(~kept, -torch.inf)
        some = kept.any(-1, keepdim=True)
        return (scores.masked_fill(~some, 0).softmax(-1) * some) @ v

    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.register_forward_hook(dense)
    return model


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_encoder_equals_dense_attention_with_the_same_mask_and_so_does_its_gradient(kind, pooling):
    model = encoder(kind, pooling).with_draws(3)
    found = []
    for _ in range(2):
        logits = model(TOKENS)
        gradients = torch.autograd.grad(logits.square().sum(), weights_of(model))
        found.append([logits, *gradients])
        with_dense_cores(model)
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_one_bucket_or_cluster_or_k_as_long_as_the_input_is_full_attention(name):
    """Centroids and indexers aside, the parameters are those of full attention."""
    sparse = encoder(WHOLE[name])
    full = encoder({"attention": "full"})
    full.load_state_dict({n: t for n, t in sparse.state_dict().items() if n in full.state_dict()})
    results = []
    for model in (full, sparse):
        logits = model(TOKENS)
        results.append([logits, *torch.autograd.grad(logits.sum(), weights_of(model))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_padding_changes_no_logits(kind):
    if kind["attention"] == "redrawn":
        pytest.skip("draws another mask for every length")
    model, short = encoder(kind), torch.tensor([[0, 1, 1, 0, 1]])
    padded = torch.nn.functional.pad(short, (0, 4), value=2)
    torch.testing.assert_close(model(short), model(padded), rtol=0, atol=1e-12)


def test_other_initial_weights_are_those_of_full_attention(kind):
    torch.manual_seed(4)
    sparse = encoder(kind)
    torch.manual_seed(4)
    full = encoder({"attention": "full"})
    assert all(torch.equal(p, sparse.get_parameter(name)) for name, p in full.named_parameters())


def runs(folder, model, training, *, resume=False, stop_after=None):
    trainer = open_run(folder, model, training, CPU, resume=resume, overwrite=False)

    def stop(progress):
        if progress.row["epoch"] == stop_after:
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        train_run(folder, trainer, {}, stop)
    return trainer


def without_seconds(history):
    return {name: column for name, column in history.items() if name != "seconds"}


@pytest.mark.processor
def test_a_run_is_repeated_and_resumed_to_the_same_bits(kind, tmp_path, tiny_model, tiny_training):
    model, training = tiny_model(**kind, dropout=0.1, heads=2), tiny_training(epochs=3)
    once = runs(tmp_path / "once", model, training)
    runs(tmp_path / "parts", model, training, stop_after=1)
    torch.manual_seed(99)  # whatever state the process is in
    again = runs(tmp_path / "parts", model, training, resume=True)
    assert without_seconds(once.history) == without_seconds(again.history)
    one, other = (read_checkpoint(tmp_path / name / "last.pt") for name in ("once", "parts"))
    assert one.state.keys() == other.state.keys()
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
    assert all(torch.equal(one.rng[name], other.rng[name]) for name in one.rng)


def test_training_moves_centroids_and_they_are_in_the_checkpoint(tmp_path, tiny_model, tiny_training):
    model = tiny_model(**KINDS["routing"], heads=2, blocks=2)
    trainer = runs(tmp_path, model, tiny_training())
    first, last = (read_checkpoint(tmp_path / f"{name}.pt") for name in ("epoch-0", "last"))
    for layer in range(2):
        name = f"blocks.{layer}.attention.centroids"
        assert first.state[name].shape == (2, 3, 8)  # heads, 8 tokens in windows of 3, width of a head
        assert not torch.equal(first.state[name], last.state[name])
        torch.testing.assert_close(last.state[name].norm(dim=-1), torch.ones(2, 3))
        assert torch.equal(last.build().state_dict()[name], trainer.encoder.state_dict()[name])


def test_evaluation_moves_no_centroid():
    model = encoder(KINDS["routing"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model(TOKENS)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_redrawn_attention_keeps_other_keys_every_time_in_evaluation_too_until_its_draws_are_named():
    model = encoder(KINDS["redrawn"])
    assert not torch.equal(model(TOKENS), model(TOKENS))
    torch.manual_seed(7)
    first = model(TOKENS)
    torch.manual_seed(7)
    assert torch.equal(first, model(TOKENS))  # drawn from the global generator
    named = model.with_draws(1)(TOKENS)
    before = torch.get_rng_state()
    assert torch.equal(named, model(TOKENS))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(named, model.with_draws(2)(TOKENS))
    model.train()
    assert not torch.equal(model(TOKENS), model(TOKENS))  # training goes on as before


@pytest.mark.slow
def test_redrawn_keys_are_uniform_over_the_valid_ones():
    """Each of 6 valid keys is among 3 kept with probability ½: counts over 500 forward passes, five sigmas."""
    model = encoder(KINDS["redrawn"], blocks=1, heads=1)
    counts, tokens = torch.zeros(9), torch.tensor([[0, 1, 1, 0, 1, 0, 2, 2, 2]])

    def count(core, inputs):
        chosen = inputs[5][0, 0, 0]
        assert len(set(chosen.tolist())) == 3
        counts.index_add_(0, chosen, torch.ones(3))

    model.blocks[0].attention.core.register_forward_pre_hook(count)
    with torch.no_grad():
        for _ in range(500):
            model(tokens)
    assert not counts[6:].any()
    assert ((counts[:6] - 250).abs() < 5 * (500 * 0.25) ** 0.5).all()


def test_seeds_together_draw_their_own_selections(tmp_path, tiny_model, tiny_training):
    for name in ("lsh", "routing"):
        model = tiny_model(**KINDS[name])
        runs = open_seed_runs(tmp_path / name, model, tiny_training(), (1, 2), CPU, resume=False, overwrite=False)
        assert [run.config.selection_seed for run in runs] == [1, 2]


def test_training_with_masked_matrices_and_with_gathered_keys_is_the_same(kind, monkeypatch):
    """Loss, gradients and moved centroids of one step, on inputs that count as short or long."""
    results = []
    for longest in (128, 0):
        monkeypatch.setattr(attention_module, "SHORT", longest)
        torch.manual_seed(0)
        model = encoder(kind).train()
        torch.manual_seed(1)  # redrawn keys
        loss = torch.nn.functional.cross_entropy(model(TOKENS), torch.tensor([0, 1, 1]))
        gradients = torch.autograd.grad(loss, weights_of(model))
        results.append(
            [loss.detach(), *gradients, *(t for n, t in model.state_dict().items() if "centroids" in n)]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# --- an indexer learns beside the model


def trained(tiny_model, tiny_training, epochs=3, **fields):
    trainer = Trainer(tiny_model(**fields, blocks=2, dropout=0.1), tiny_training(epochs=epochs), CPU)
    trainer.run(lambda progress: None)
    return trainer


def test_an_indexer_that_keeps_all_keys_changes_neither_the_other_weights_nor_the_draws(tiny_model, tiny_training):
    """Within float32's rounding, after twelve steps with dropout: gathered keys are summed in another order."""
    full = trained(tiny_model, tiny_training, attention="full")
    for warm_up in (0, 100):
        indexed = trained(tiny_model, tiny_training, attention="indexer", k=8, indexer_warm_up=warm_up)
        for name, parameter in full.encoder.named_parameters():
            torch.testing.assert_close(indexed.encoder.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
        assert torch.equal(indexed.rng["cpu"], full.rng["cpu"])


def test_all_keys_are_kept_in_the_warm_up_of_training_and_in_no_evaluation():
    model = encoder(KINDS["indexer, warming up"], blocks=1)
    kept = []
    model.attention(0).core.register_forward_pre_hook(lambda core, inputs: kept.append(inputs[5]))
    model(TOKENS)
    for _ in range(7):
        model.train()(TOKENS)
    assert [None if keys is None else keys.shape[-1] for keys in kept] == [3, *[None] * 6, 3]
    assert model.attention(0).indexer.steps == 7


def test_the_divergence_is_taken_once_and_moves_the_indexer_alone():
    model = encoder(KINDS["indexer"]).train()
    model(TOKENS)
    divergence = model.take_divergence()
    assert divergence.item() > 0
    assert model.take_divergence() == 0
    divergence.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved
    assert all(".indexer." in name for name in moved)
    apart, together = model.gradient_groups()[::-1]
    assert {id(p) for p in apart} == {id(p) for each in model.indexers() for p in each.parameters()}
    assert len(apart) + len(together) == len(list(model.parameters()))


def test_training_brings_an_indexer_nearer_to_its_layers_attention(tiny_model, tiny_training):
    """At the same other weights: the indexer of the end diverges less than the one of the beginning."""
    fields = {"attention": "indexer", "k": 3, "indexer_warm_up": 8}
    trainer = trained(tiny_model, tiny_training, epochs=25, **fields)
    state = trainer.encoder.state_dict()
    torch.manual_seed(trainer.training.seed)
    first = Encoder(trainer.config).state_dict()
    divergences = []
    for indexers in (first, state):
        model = Encoder(trainer.config)
        model.load_state_dict({name: (indexers if ".indexer." in name else state)[name] for name in state})
        model.train()(trainer.holdout_split.tokens)
        divergences.append(model.take_divergence().item())
    assert divergences[1] < divergences[0]


def test_an_indexer_that_is_no_number_any_more_ends_the_run(tiny_model, tiny_training):
    trainer = Trainer(tiny_model(attention="indexer", k=3), tiny_training(), CPU)
    with torch.no_grad():
        trainer.encoder.indexers()[0].weight.bias.fill_(torch.nan)
    with pytest.raises(DivergedError, match="nan in epoch 1"):
        trainer.run(lambda progress: None)
