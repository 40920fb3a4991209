"""Row statistics by kernels against the CPU path in float64: in Triton's interpreter, and on a GPU if any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semdiag.mathematics import kernels

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "benchmarks/kernels_on_gpu.py"
MASKS = (
    *("none", "causal", "window", "padding", "causal and padding", "segments", "dense", "bias", "slopes"),
    *("soft cap", "sinks", "not finite", "zeros", "drawn"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """What the check finds, by case; in a process of its own, because the interpreter is chosen at import."""
    out = tmp_path_factory.mktemp("kernels")
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(SCRIPT),
        "--check",
        "--device",
        request.param,
        "--out",
        str(out),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    cases = json.loads((out / "kernels.json").read_text())
    shares = {name: case["share"] for name, case in cases.items() if isinstance(case, dict) and "share" in case}
    return shares, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("found", ["cpu"], indirect=True)
@pytest.mark.parametrize("mask", MASKS)
def test_kernels_agree_with_the_cpu_path_within_the_derived_error(found, mask):
    shares, said = found
    (share,) = (share for name, share in shares.items() if name.endswith(f", {mask}"))
    assert share <= 1, said


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("found", ["cuda"], indirect=True)
def test_kernels_agree_on_a_gpu(found):
    shares, said = found
    assert len(shares) > 100
    assert max(shares.values()) <= 1, said


def test_calls_that_the_kernels_do_not_take_are_named(monkeypatch):
    q = torch.zeros(1, 1, 2, 16)
    assert "NVIDIA" in kernels.refusal(q, None)
    assert "float64" in kernels.refusal(q.double(), None)
    assert "300" in kernels.refusal(torch.zeros(1, 1, 2, 300), None)
    assert "2,000" in kernels.refusal(q, None, 2000)
    assert "lists of keys" in kernels.refusal(q, torch.zeros(1, 1, 2, 1))
    card = torch.device("cuda", 0)
    kernels._missing.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5" in kernels._missing(card)
    kernels._missing.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels._missing(card) is None
    kernels._missing.cache_clear()
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert "triton" in kernels._missing(card)
    kernels._missing.cache_clear()
