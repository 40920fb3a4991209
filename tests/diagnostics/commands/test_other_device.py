"""What the commands say on another device than the CPU: the same."""

import json
import math

import pytest
import torch

from semdiag_models import read_checkpoint

pytestmark = pytest.mark.device
LEFT_OUT = {"provenance", "residual_over_rounding"}  # a residual is rounding
REPORT = ("--samples", 5, "--out", "out", "--figures", "none", "--quiet", "--json")
COMMANDS = {
    "dispersion": ("topk",),
    "separation": ("full", "--k", 5),
    "stability": ("topk",),
    "mask-stability": ("full", "topk"),
    "bounds": ("full", "topk"),
    "lipschitz": ("topk",),
    "landscape": ("topk", "--grid", 3),
    "k-sweep": ("full", "--rerun", "--k", "2,3"),
    "overlap": ("full", "topk"),
    "compare": ("full", "topk"),
    "check": ("full", "topk"),
}


def differences(one, other, place=""):
    """Where two answers differ by more than the rounding of sums in another order, in float64."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one.keys() - LEFT_OUT:
            yield from differences(one[name], other[name], f"{place}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for at, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{at}]")
    elif isinstance(one, float) and isinstance(other, float | int):
        if not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9):
            yield place, one, other
    elif one != other:
        yield place, one, other


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_the_same_on_another_device(run_semdiag, here, tiny_runs, other_device, command):
    words = [getattr(tiny_runs, str(word), word) for word in COMMANDS[command]]
    options = REPORT[:2] + REPORT[-2:] if command == "check" else REPORT
    found = []
    for device in ("cpu", other_device):
        outcome = run_semdiag(command, *words, *options, "--device", device)
        assert outcome.code in (0, 1), outcome.err
        found.append(json.loads(outcome.out))
        assert found[-1]["provenance"]["device"] == device
    assert list(differences(*found)) == []


def test_an_indexer_is_fitted_and_tried_on_another_device(run_semdiag, here, other_device):
    (here / "mine.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
        "class Small(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.tokens, self.qkv, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)\n\n"
        "    def forward(self, ids):\n"
        "        q, k, v = (t.view(*ids.shape, 2, 4).transpose(1, 2)\n"
        "                   for t in self.qkv(self.tokens(ids)).chunk(3, -1))\n"
        "        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "        return self.head(mixed.transpose(1, 2).flatten(2))\n\n\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    ids = torch.randint(11, (8, 12), generator=torch.Generator().manual_seed(0))\n"
        "    return Small().eval(), list(ids[:, None])\n",
        encoding="utf-8",
    )
    words = ("indexer", "mine:build", "--k", 3, "--width", 4, "--json")
    results = []
    for device in ("cpu", other_device):
        outcome = run_semdiag(*words, "--device", device)
        assert outcome.code == 0, outcome.err
        results.append(json.loads(outcome.out)["results"][0])
    assert results[0]["divergence"] == pytest.approx(results[1]["divergence"], rel=1e-3)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)


def test_a_report_is_written_on_another_device(run_semdiag, here, tiny_runs, other_device):
    outcome = run_semdiag("report", tiny_runs.full, tiny_runs.topk, *REPORT, "--device", other_device)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["provenance"]["device"] == other_device
    assert (here / "out" / "index.html").exists()


def test_drawn_queries_are_the_same_on_another_device(run_semdiag, here, tiny_runs, other_device):
    words = ("k-sweep", tiny_runs.full, "--queries", 5, *REPORT)
    one, other = (json.loads(run_semdiag(*words, "--device", d).out) for d in ("cpu", other_device))
    assert list(differences(one, other)) == []


@pytest.mark.parametrize("source", ["paper code", "own model"])
def test_other_models_say_the_same_on_another_device(run_semdiag, here, paper_code, other_device, source):
    if source == "paper code":
        torch.save(paper_code.true["tokens"].long()[:5], here / "tokens.pt")
        words = (paper_code.checkpoint, "--config", paper_code.config_file, "--inputs", "tokens.pt")
    else:
        (here / "mine.py").write_text(
            "import torch\nfrom torch import nn\n\n\ndef build():\n    torch.manual_seed(0)\n"
            "    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
            "    return layer.eval(), torch.randn(6, 9, 16)\n",
            encoding="utf-8",
        )
        words = ("mine:build", "--dtype", "float64")
    for command in ("dispersion", "mask-stability"):
        outcomes = [run_semdiag(command, *words, *REPORT, "--device", device) for device in ("cpu", other_device)]
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[1].err
        assert list(differences(*(json.loads(outcome.out) for outcome in outcomes))) == []


@pytest.mark.parametrize(
    "attention",
    ["full", "banded", "block", "topk", "bottomk", "random", "redrawn", "lsh", "routing", "indexer", "moba"],
)
def test_training_runs_and_goes_on_on_another_device(run_semdiag, here, other_device, attention):
    words = [
        "train", "even-pairs", "--attention", attention, "--epochs", 1, "--train-samples", 50,
        "--holdout-samples", 20, "--length", 8, "--blocks", 1, "--width", 16, "--batch-size", 25, "--quiet",
        "--out", "run", "--device", other_device,
    ]  # fmt: skip
    words += [] if attention == "full" else ["--k", 4]
    assert run_semdiag(*words).code == 0
    words[words.index("--epochs") + 1] = 2
    outcome = run_semdiag(*words, "--resume")
    assert outcome.code == 0, outcome.err
    saved = read_checkpoint(here / "run" / "last.pt")
    assert saved.epoch == 2
    assert saved.provenance["device"] == other_device
    assert all(tensor.device == torch.device("cpu") for tensor in saved.state.values())
    assert all(map(math.isfinite, saved.history["train_loss"]))
