"""Layers in sentences and tables: by number, and by their module where a model has several stacks."""

import re
import sys

import pytest

import semdiag
from semdiag import Findings
from semdiag.measuring.words import layer_name
from semdiag.questions import percentile_tables
from semdiag.questions.heads import heads_glance

MODULES = "encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"


@pytest.mark.parametrize(
    ("layer", "modules", "said"),
    [
        (1, ["layers.0.attention", "layers.1.attention"], "1"),
        (1, ["stages.0.blocks.0.attn", "stages.1.blocks.0.attn"], "1"),
        (0, [""], "0"),
        (1, ["layer", "layer"], "1"),  # one module, called twice
        (2, ["encoder.0.self", "decoder.0.self", "decoder.0.cross"], "2 (decoder.0.cross)"),
        (0, ["vision.layers.0.attn", "text.layers.0.attn"], "0 (vision.layers.0.attn)"),
        (7, ["encoder.0", "decoder.0"], "7"),
    ],
)
def test_a_module_is_named_where_there_are_several_stacks(layer, modules, said):
    assert layer_name(layer, modules) == said


SOURCE = """
import torch


def _built(factor):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        inputs = {"src": torch.randn(6, 5, 16), "tgt": torch.randn(6, 4, 16)}
    with torch.no_grad():
        model.decoder.layers[0].multihead_attn.in_proj_weight[:8] *= factor  # the first head's queries
    return model, inputs


def one():
    return _built(1)


def other():
    return _built(9)
"""
CROSS = "layer 2 (decoder.layers.0.multihead_attn)"


@pytest.fixture
def both(here):
    """An encoder-decoder, and a copy of which the decoder sees the encoder otherwise."""
    (here / "theirs.py").write_text(SOURCE, encoding="utf-8")
    yield "theirs:one", "theirs:other"
    sys.modules.pop("theirs", None)


@pytest.mark.slow
def test_sentences_on_an_encoder_decoder_name_the_module(both, run_semdiag):
    outcome = run_semdiag("compare", *both, "--figures", "none", "--out", "page")
    assert outcome.code == 0, outcome.err
    assert f"begins in {CROSS}, head 0." in " ".join(outcome.out.split())
    loaded = semdiag.load(both[1])
    findings = Findings(semdiag.measure(loaded, [loaded.batches], k=[2]))
    assert re.search(r"head [01] of layer [012] \((en|de)coder\.layers\.0\.\w+\)$", heads_glance(findings).words)


@pytest.mark.slow
def test_tables_of_an_encoder_decoder_name_the_module(both, run_semdiag, monkeypatch):
    monkeypatch.setattr(percentile_tables, "_MOST_HEADS", 1)
    monkeypatch.setattr(percentile_tables, "_EXTREME", 1)
    outcome = run_semdiag("dispersion", both[1], "--figures", "none", "--out", "page")
    assert outcome.code == 0, outcome.err
    assert "2 (decoder.layers.0.multihead_attn)" in outcome.out
    assert f"The median is largest in head 0 of {CROSS} (" in outcome.out
