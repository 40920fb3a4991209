"""Theorem 2 on encoders: every slope below its bound, in every tensor; tables, ties, and what is not known."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from semdiag.capturing.loading import load
from semdiag.mathematics.bounds.attention_bounds import paper_attention_map_bound
from semdiag.mathematics.spectral_norms import log
from semdiag.measuring.calls.collector import NotAvailableError
from semdiag.measuring.encoders.network_constants import network_forms
from semdiag.measuring.encoders.traces import trace_inputs
from semdiag.measuring.encoders.weights import named_tensors
from semdiag.measuring.table import column_types
from semdiag.questions.bounds import measure
from semdiag.questions.bounds.answer import SCOPE
from semdiag.questions.bounds.measure import CONSTANTS, PARAMETERS, measure_constants


def value(constants, quantity, form, layer=-1, head=-1):
    rows = constants[(constants["quantity"] == quantity) & (constants["form"] == form)]
    rows = rows[(rows["layer"] == layer) & (rows["head"] == head)]
    assert len(rows) == 1
    return rows["ln_value"].item()


@pytest.mark.parametrize("activation", ["relu", "gelu", "mish"])
@pytest.mark.parametrize("size", [0.4, 1.5])
def test_every_slope_is_below_its_bound(kind, wild_encoder, padded_tokens, activation, size):
    encoder = wild_encoder(kind, size, activation=activation)
    constants, parameters = measure_constants(encoder, *padded_tokens)
    measured = parameters[["ln_gradient", "ln_secant"]].max(axis=1)
    assert (measured <= parameters["ln_sound"]).all()
    assert (parameters["ln_gradient"] <= parameters["ln_local"] + 1e-9).all()
    assert (parameters["ln_local"] <= parameters["ln_sound"] + 1e-12).all()
    assert value(constants, "network", "local") < value(constants, "network", "sound")
    assert parameters["holds"].all()
    scored = parameters["tensor"].str.endswith(("q.weight", "q.bias", "k.weight"))
    assert (parameters["ln_point"].notna() == scored).all()
    assert (parameters["ln_gradient"] <= parameters["ln_point"] + 1e-9)[scored].all()
    keys = parameters["tensor"].str.endswith("k.bias")
    assert (parameters.loc[keys, ["ln_gradient", "ln_sound"]] == -math.inf).all(axis=None)
    assert parameters.loc[keys, "ln_secant"].isna().all()  # its numerator would be rounding and nothing else
    assert np.isfinite(parameters.loc[~keys, ["ln_gradient", "ln_secant", "ln_sound"]]).all(axis=None)
    together = 0.5 * np.logaddexp.reduce(2 * parameters["ln_gradient"].to_numpy())
    assert together <= value(constants, "network", "sound")


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_every_slope_of_a_trained_model_is_below_its_bound(tiny_models, which):
    model = tiny_models[which]
    _, parameters = measure_constants(model.module, *model.default_inputs(40, 0)[:2])
    assert (parameters[["ln_gradient", "ln_secant"]].max(axis=1) <= parameters["ln_sound"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [10, 1000])
def test_no_rounding_of_large_scores_is_taken_for_a_slope(factor):
    """Scores 100 times and a million times as large as trained; only b_k's constant is exactly 0."""
    folder = Path(__file__).parents[4] / "checkpoints" / "missing-duplicate-full-seed-153476998"
    model = load(folder / "last.pt")
    with torch.no_grad():
        for tensor in named_tensors(model.encoder):
            if tensor.bound.endswith(("W_q", "W_k", "b_k")):
                tensor.values.mul_(factor)
    _, parameters = measure_constants(model.encoder, *model.default_inputs(25, 0)[:2])
    assert parameters["ln_gradient"].notna().all()
    assert (parameters[["ln_gradient", "ln_secant"]].max(axis=1) <= parameters["ln_sound"]).all()


def test_the_local_form_takes_the_residual_of_the_loss(wild_encoder, padded_tokens):
    encoder, (tokens, labels) = wild_encoder("full", 0.7), padded_tokens
    with torch.no_grad():
        encoder.head.weight.mul_(3)  # some inputs are classified nearly for certain, right or wrong
        chances = encoder(tokens).softmax(-1)
    residual = (chances - F.one_hot(labels, chances.shape[-1])).norm(dim=-1)
    assert 1e-6 < residual.min() < 0.1 * residual.max()  # of which 4 units of rounding are less than 1e-9
    (_, known), (_, unknown) = (measure_constants(encoder, tokens, given) for given in (labels, None))
    known, unknown = (table.set_index("tensor") for table in (known, unknown))
    assert known["ln_local"]["head.bias"] == pytest.approx(math.log(residual.mean()), abs=1e-12)
    assert unknown["ln_local"]["head.bias"] == pytest.approx(math.log(2) / 2, abs=1e-12)
    assert (known["ln_local"] <= unknown["ln_local"]).all()
    assert known["ln_sound"].equals(unknown["ln_sound"])


@pytest.mark.slow
def test_moves_in_any_direction_stay_below_the_bound(kind, wild_encoder, padded_tokens):
    """Each sample's own loss, tensors moved alone by up to a percent, along its gradient and at random."""
    encoder, (tokens, labels) = wild_encoder(kind, 0.7), padded_tokens
    _, parameters = measure_constants(encoder, tokens, labels)
    bounds = parameters.set_index("tensor")["ln_sound"]
    generator = torch.Generator().manual_seed(0)

    def losses():
        with torch.no_grad():
            return F.cross_entropy(encoder(tokens), labels, reduction="none")

    start = losses()
    for tensor in named_tensors(encoder):
        before = tensor.values.clone()
        for radius in (1e-5, 1e-2):
            direction = torch.randn(before.shape, generator=generator, dtype=torch.float64)
            step = radius * before.norm() / direction.norm() * direction
            tensor.values.copy_(before + step)
            moved = (losses() - start).abs()
            assert (moved <= math.exp(bounds[tensor.name]) * step.norm() + 1e-11).all(), tensor.name
        tensor.values.copy_(before)


def test_the_secant_lies_on_the_loss(wild_encoder, padded_tokens):
    encoder, (tokens, labels) = wild_encoder("full", 0.7), padded_tokens
    _, parameters = measure_constants(encoder, tokens, labels)
    encoder.zero_grad()
    F.cross_entropy(encoder(tokens), labels).backward()
    rows = parameters.set_index("tensor")
    for tensor in named_tensors(encoder):
        size = tensor.gradient.norm().item()
        if size > 1e-9:
            assert rows.loc[tensor.name, "ln_gradient"] == pytest.approx(math.log(size), abs=1e-8)
            assert rows.loc[tensor.name, "ln_secant"] == pytest.approx(math.log(size), abs=0.05)


def test_the_paper_form_takes_largest_and_smallest_values(wild_encoder, padded_tokens):
    from semdiag.mathematics.bounds.attention_bounds import HeadNorms
    from semdiag.measuring.encoders.traces import trace_inputs
    from semdiag.measuring.encoders.weights import block_weights

    encoder, (tokens, labels) = wild_encoder("topk"), padded_tokens
    constants, parameters = measure_constants(encoder, tokens, labels)
    for layer, trace in enumerate(trace_inputs(encoder, tokens).layers):
        weights = block_weights(encoder, layer)
        for h in range(2):
            norms = HeadNorms(weights.gamma[h], weights.upsilon[h], trace.token_norm.max(), trace.token_norm.max())
            delta, gap = trace.dispersion[:, h].max(), trace.separation[:, h].min()
            beta = trace.load[:, h].max().double() / 3
            bound = paper_attention_map_bound(delta, norms, beta, gap)
            found = value(constants, "attention_map", "paper", layer, h)
            assert found == pytest.approx(bound.log_value.item(), rel=1e-13)  # β in float64
    has_paper = parameters["ln_paper"].notna()
    assert has_paper.equals(
        parameters["tensor"].str.contains(r"blocks\.\d\.(?:attention|expand|contract).*weight")
    )


def test_one_tie_does_not_hide_the_other_inputs(wild_encoder, padded_tokens):
    """Zero keys tie every row; only the inputs whose rows are all kept whole have a constant."""
    encoder, tokens = wild_encoder("topk"), padded_tokens[0]
    with torch.no_grad():
        encoder.blocks[1].attention.qkv.weight[16:32] = 0  # W_k of the last block, and b_k
        encoder.blocks[1].attention.qkv.bias[16:32] = 0
    constants, parameters = measure_constants(encoder, tokens)
    forms = network_forms(encoder, trace_inputs(encoder, tokens))
    rows = constants[(constants["quantity"] == "network") & (constants["form"] == "sound")].iloc[0]
    finite = forms.each[forms.each.isfinite()]
    assert len(finite) == 1  # one sample has a single token
    assert (rows["ln_value"], rows["infinite"]) == (math.inf, len(tokens) - 1)
    assert rows["ln_finite"] == pytest.approx(finite.max().item())
    counts = parameters.set_index("tensor")["infinite"]
    assert counts["blocks.1.attention.k.weight"] == len(tokens) - 1
    assert counts["head.weight"] == 0
    untied, _ = measure_constants(wild_encoder("topk"), tokens)
    assert (untied["infinite"] == 0).all()
    assert untied["ln_finite"].equals(untied["ln_value"])


def test_that_the_constants_are_of_one_parameter_vector_is_returned(wild_encoder, padded_tokens):
    encoder = wild_encoder("topk")
    forms = network_forms(encoder, trace_inputs(encoder, padded_tokens[0]))
    for bound in (forms.sound, forms.paper):
        assert any("one parameter vector" in a.statement for a in bound.assumptions)
    assert "not a Lipschitz constant of a region" in SCOPE  # printed under the tables


def test_tables_have_their_columns_and_every_place_once(kind, wild_encoder, padded_tokens):
    constants, parameters = measure_constants(wild_encoder(kind), *padded_tokens, model="m")
    for declared, table in ((CONSTANTS, constants), (PARAMETERS, parameters)):
        assert column_types(table) == declared.columns
        assert set(table["model"]) == {"m"}
    assert not constants.duplicated(["layer", "head", "quantity", "form"]).any()
    sound = constants[constants["form"] == "sound"]
    assert sound["holds"].all()
    assert (sound["assumptions"] == "").all()
    paper = constants[constants["form"] == "paper"]
    assert not paper["holds"].any()
    assert paper["assumptions"].str.contains("query projection has no bias").all()
    assert set(parameters["group"]) == {"qk", "value-output", "mlp-in", "mlp-out", "embedding", "head"}


def test_what_the_papers_form_supposes_is_said_where_it_is_not_so(kind, wild_encoder, padded_tokens):
    encoder = wild_encoder(kind)
    constants, _ = measure_constants(encoder, *padded_tokens)
    said = constants.loc[
        (constants["quantity"] == "network") & (constants["form"] == "paper"), "assumptions"
    ].item()
    assert ("blocks normalise their outputs (post-norm)" in said) == (encoder.config.norm == "pre")
    assert ("every query keeps the same number of keys" in said) == (encoder.config.keys_kept != encoder.config.k)


def test_reading_a_cls_token_divides_by_no_length(wild_encoder, padded_tokens):
    """All tokens are read with weight 1/L by the mean, the CLS token with weight 1."""
    encoder = wild_encoder("full", pooling="cls")
    tokens, labels = padded_tokens
    whole = [1, 5]  # without PAD, so that L is the same
    _, parameters = measure_constants(encoder, tokens[whole], labels[whole])
    forms = network_forms(encoder, trace_inputs(encoder, tokens[whole]))
    last = parameters.set_index("tensor").loc["blocks.1.contract.bias", "ln_sound"]
    head = torch.linalg.matrix_norm(encoder.head.weight.detach(), 2)
    assert last == pytest.approx(float(torch.log(2**0.5 * head * 13)))  # b_R moves 13 tokens by 1 each
    assert forms.sound.log_value >= last


@pytest.mark.slow
@pytest.mark.processor
def test_norms_in_the_convention_of_the_papers_code(paper_code):
    model = load(paper_code.checkpoint, paper_code.config)
    constants, parameters = measure_constants(model.module, paper_code.true["tokens"])
    names = {"gamma": "QK_norm_Gamma", "upsilon": "V_norm_Upsilon", "mlp_in": "P_norm_B", "mlp_out": "R_norm_B"}
    for quantity, name in names.items():
        for layer, true in enumerate(paper_code.true[f"norm64_{name}"].flatten().tolist()):
            head = 0 if quantity in ("gamma", "upsilon") else -1
            found = math.exp(value(constants, quantity, "paper code", layer, head))
            assert found == pytest.approx(true, rel=1e-9)
    assert parameters["ln_sound"].notna().all()


@pytest.mark.slow
def test_ties_leave_no_guarantee_and_are_said(wild_encoder, padded_tokens):
    encoder = wild_encoder("topk")
    encoder.positions.zero_()
    constants, parameters = measure_constants(encoder, *padded_tokens)
    assert value(constants, "network", "sound") == math.inf
    said = constants.loc[constants["quantity"] == "network", "assumptions"]
    assert said.str.contains(
        r"separation is positive in every row .* \(smallest = 0, rows not positive = \d+\)"
    ).all()
    assert not parameters["holds"].any()
    last = parameters[parameters["tensor"] == "blocks.1.contract.weight"]
    assert np.isfinite(last["ln_sound"]).all()  # no attention above it


def test_an_attention_that_no_bound_covers_still_has_its_norms(wild_encoder, padded_tokens):
    encoder = wild_encoder("bottomk")
    constants, parameters = measure_constants(encoder, *padded_tokens)
    assert np.isfinite(value(constants, "gamma", "measured", 0, 0))
    for form in ("sound", "paper"):
        assert value(constants, "network", form) == math.inf
        network = constants[(constants["quantity"] == "network") & (constants["form"] == form)]
        assert "a bound is known for bottomk attention" in network["assumptions"].item()
    assert np.isfinite(parameters["ln_gradient"].drop(4)).any()


def test_a_normalisation_without_eps_of_constant_tokens_has_no_constant(wild_encoder, padded_tokens):
    encoder = wild_encoder("full", first_norm_eps=0.0)
    encoder.positions.zero_()
    with torch.no_grad():
        encoder.embedding.weight[0] = 1.0
    constants, parameters = measure_constants(encoder, *padded_tokens)
    assert value(constants, "norm_lipschitz_attention", "measured", 0) == math.inf
    rows = constants[(constants["form"] == "sound") & (constants["layer"] == 0)]
    assert rows["assumptions"].str.contains("no token has constant entries").all()
    assert rows["assumptions"].str.contains("every score is finite").all()
    assert parameters[["ln_gradient", "ln_secant"]].isna().all(axis=None)


def test_without_labels_no_slope_is_known(wild_encoder, padded_tokens):
    _, parameters = measure_constants(wild_encoder("full"), padded_tokens[0])
    assert parameters[["ln_gradient", "ln_secant"]].isna().all(axis=None)
    assert parameters["ln_sound"].notna().all()


def test_parameters_that_are_not_finite_are_said(wild_encoder, padded_tokens):
    encoder = wild_encoder("full")
    with torch.no_grad():
        encoder.head.bias[0] = math.nan
    with pytest.raises(NotAvailableError, match=r"^its tensor head\.bias holds a NaN or an infinity$"):
        measure_constants(encoder, *padded_tokens)


@pytest.mark.slow
def test_samples_of_nothing_but_padding_are_left_out(wild_encoder, padded_tokens):
    encoder, (tokens, labels) = wild_encoder("topk"), padded_tokens
    more = torch.cat([torch.full((1, 12), 2), tokens]), torch.cat([labels[:1], labels])
    for found, expected in zip(
        measure_constants(encoder, *more), measure_constants(encoder, *padded_tokens), strict=True
    ):
        pd.testing.assert_frame_equal(found, expected)


def test_only_so_many_samples_are_used(wild_encoder, padded_tokens, monkeypatch):
    encoder, (tokens, labels) = wild_encoder("full"), padded_tokens
    monkeypatch.setattr(measure, "SAMPLES", 2)
    few, _ = measure_constants(encoder, tokens, labels)
    pd.testing.assert_frame_equal(few, measure_constants(encoder, tokens[:2], labels[:2])[0])


def test_nothing_is_left_behind(kind, wild_encoder, padded_tokens, untouched):
    encoder = wild_encoder(kind).float().train()
    check = untouched(encoder)
    measure_constants(encoder, *padded_tokens)
    check()


def test_values_are_logarithms(wild_encoder, padded_tokens):
    encoder = wild_encoder("full")
    constants, _ = measure_constants(encoder, *padded_tokens)
    norm = torch.linalg.matrix_norm(encoder.blocks[1].expand.weight.detach(), 2)
    assert value(constants, "mlp_in", "measured", 1) == pytest.approx(log(norm).item())
