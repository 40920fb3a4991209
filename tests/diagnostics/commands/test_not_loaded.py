"""A function that builds a model and loads nothing: random weights are named where nobody misses it."""

import json

import pytest

BUILDER = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    state = dict(("{prefix}" + name, x) for name, x in model.state_dict().items())
    model.load_state_dict(state, strict=False)
    return model, [torch.randn(3, 6, 16)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["_orig_mod.module.", ""])
def test_random_weights_are_named_at_the_top_of_page_and_terminal(run_semdiag, here, monkeypatch, prefix):
    monkeypatch.syspath_prepend(here)
    name = f"own_builder_{len(prefix)}"
    (here / f"{name}.py").write_text(BUILDER.format(prefix=prefix))
    outcome = run_semdiag("report", f"{name}:build", "--figures", "none", "--out", "page", "--rerun-minutes", 0)
    assert outcome.code == 0, outcome.err
    whole = json.loads((here / "page" / "summary.json").read_text(encoding="utf-8"))
    said = f"Warning: of {name}:build, 12 of its 12 parameters were not loaded (layers.0.self_attn"
    assert whole["verdict"][0].startswith(said) == bool(prefix)
    assert any(words.startswith(said) for words in whole["cautions"]) == bool(prefix)
    assert ("12 weights fit nothing in it (_orig_mod.module.layers.0" in outcome.err) == bool(prefix)
