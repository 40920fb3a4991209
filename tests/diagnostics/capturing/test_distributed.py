"""Distributed models, run for real: two processes with gloo on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch knows no processes"),
]

PROGRAM = """
import sys, warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import semdiag
from semdiag import Monitor


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=fused) for _ in range(4))
        self.fused = fused

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 2).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def built():
    torch.manual_seed(0)
    return nn.Sequential(Block(True), Block(False))


def sharded(mesh, x):
    from torch.distributed.fsdp import fully_shard

    plain, model = built(), built()
    with semdiag.capture(plain) as reference:
        plain(x)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(run):
        output = run(x)
        output.sum().backward()
        gradients = [p.grad.to_local().clone() for p in model.parameters()]
        model.zero_grad()
        return [output, *gradients]

    alone = step(model)
    with semdiag.capture(model) as calls:
        output = model(x)
    output.sum().backward()
    watched = [output, *(p.grad.to_local() for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert calls.dispersion().equals(reference.dispersion())
    assert calls.audit.empty and len(calls) == 2
    with Monitor(model.train(), every=1) as monitor:
        step(model)
    assert monitor.table["layer"].tolist() == [0, 1]


def split(mesh, x, local):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(Block(False))
    parts = {f"0.{name}": ColwiseParallel(use_local_output=local) for name in "qkv"}
    parallelize_module(model, mesh, {**parts, "0.out": RowwiseParallel()})
    with torch.no_grad():
        alone = model(x)
        with semdiag.capture(model) as calls:
            watched = model(x)
    assert torch.equal(alone, watched)
    if local:
        assert calls.audit.empty
        assert calls.residual[["heads", "calls"]].values.tolist() == [[2, 1]]
    else:
        assert len(calls) == 0
        assert calls.audit["reason"].str.contains("DTensor").any(), calls.audit


def work(rank, port):
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = torch.randn(2, 5, 16)
    sharded(mesh, x)
    split(mesh, x, True)
    split(mesh, x, False)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]),), nprocs=2)
    print("right")
"""


def test_sharded_models_are_captured_and_distributed_queries_refused_by_name(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root / "diagnostics"), str(root / "models")])
    done = subprocess.run(
        [sys.executable, program, str(port)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == "right", done.stderr[-2000:]
