"""``semdiag k-sweep --out``, interrupted: what is finished is kept, and the same command goes on."""

import pytest

SOURCE = '''
import os

import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    """Causal attention to the logits of the next token; Ctrl-C comes in a forward pass that a file names."""

    def __init__(self):
        super().__init__()
        self.calls, self.embedding, self.qkv = 0, torch.nn.Embedding(9, 8), torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 9)

    def forward(self, ids):
        self.calls += 1
        if os.path.exists("stop") and self.calls > 8:
            raise KeyboardInterrupt
        q, k, v = (x[:, None] for x in self.qkv(self.embedding(ids)).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), torch.randint(0, 9, (6, 12))
'''
WORDS = ("interrupted:build", "--kinds", "topk,random", "--figures", "none", "--out", "page")


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_is_refused(run_semdiag, refusal, here):
    (here / "interrupted.py").write_text(SOURCE)
    (here / "stop").touch()
    stopped = run_semdiag("k-sweep", *WORDS, "--k", "2,4,6")
    assert stopped.code == 130
    assert "finished runs are kept in" in stopped.err
    parts = here / "page" / "unfinished"
    assert list(parts.glob("*/runs-0.jsonl"))
    line = refusal("k-sweep", *WORDS, "--k", "2,4,8")
    assert "another masks (--kinds, --k)" in line
    assert "would delete" in refusal("dispersion", "interrupted:build", "--out", "page")
    (here / "stop").unlink()
    assert run_semdiag("k-sweep", *WORDS, "--k", "2,4,6").code == 0
    assert (here / "page" / "index.html").is_file()
    assert not parts.exists()
