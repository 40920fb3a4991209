"""The kernel of the largest scores in Triton's interpreter, in a process of its own: against torch's topk."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch
from semdiag_models.cuda_steps import largest_of_rows

for dtype in (torch.float32, torch.float64):
    scores = torch.randn(2, 3, 37, dtype=dtype)
    scores[0, 1, 3:] = -torch.inf  # fewer than five keys are allowed
    values, positions = largest_of_rows(scores, 5)
    wanted = scores.topk(5, -1)
    assert torch.equal(values, wanted.values)
    kept = values > -torch.inf  # the positions of others say nothing
    assert torch.equal(scores.gather(-1, positions)[kept], values[kept])
    assert torch.equal(positions[1], wanted.indices[1])
    assert positions[0, 1, :3].sort().values.tolist() == [0, 1, 2]
ties = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
assert largest_of_rows(ties, 2)[1].tolist() == [[1, 2]]
assert 0 <= largest_of_rows(torch.full((1, 9), torch.nan), 3)[1].min()
assert largest_of_rows(torch.full((1, 9), torch.nan), 3)[1].max() < 9
compiled = torch.compile(lambda x: largest_of_rows(2 * x, 3)[0].sum(), backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(scores), (2 * scores).topk(3, -1).values.sum())
"""


@pytest.mark.slow
def test_it_is_topk_also_of_ties_forbidden_keys_and_after_a_divergence():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], check=True, env=environment, timeout=120)
