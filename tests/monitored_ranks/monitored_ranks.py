"""Trainings of several processes, each with a monitor: python monitored_ranks.py RANKS FOLDER SCENARIO …

Each rank leaves FOLDER/SCENARIO-RANK.json: what it saw and what was said.
"""

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from semdiag import AlarmError, InputError, Monitor
from semdiag.measuring.calls import monitor_heads as monitor_ranks

PARTS = {2: (3, 2), 3: (2, 2, 1)}  # samples of each rank
LOOK = {"every": 1, "rows": "all", "k": [2]}


class Exact(nn.Module):
    """Attention with small whole numbers for queries and keys: scores are exact however they are summed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        q, k, v = (self.scale * x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Four heads of width 4."""

    def __init__(self, fused):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.fused = fused

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 2).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def whole_numbers(step=0):
    """All samples of a step, (5, 7, 24)."""
    return torch.randint(-3, 4, (5, 7, 24), generator=torch.Generator().manual_seed(step)).float()


def batch(step=0):
    """All samples of a step, (5, 6, 16)."""
    return torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(step))


def own(samples, rank, ranks):
    """Those of a rank."""
    return samples.split(PARTS[ranks])[rank]


def blocks():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Block(True), Block(False)).train()


def tables(monitor):
    return {"layers": monitor.table.to_dict("records"), "heads": monitor.heads.to_dict("records")}


def shared(rank, ranks, folder):
    sent = []
    path, log = folder / f"shared-{ranks}.csv", lambda numbers, step: sent.append(step)
    with Monitor(Exact().train(), **LOOK, path=path, log=log) as monitor:
        for step in range(2):
            monitor.model(own(whole_numbers(step), rank, ranks))
    return {**tables(monitor), "sent": sent}


def alone(rank, ranks, folder):
    with Monitor(Exact().train(), **LOOK, ranks="own", path=folder / f"alone-{rank}.csv") as monitor:
        monitor.model(own(whole_numbers(), rank, ranks))
    return tables(monitor)


def ddp(rank, ranks, folder):
    """An alarm ends the training of every rank alike, though the crossing head is another rank's."""
    model = nn.parallel.DistributedDataParallel(blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, steps = [], 0
    try:
        with Monitor(model, 2, rows="all", alarm={"max_logit": 50}, on_alarm="raise") as monitor:
            for steps in range(6):
                x = own(batch(steps), rank, ranks)
                x = x * 100 if (rank, steps) == (ranks - 1, 4) else x
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except AlarmError as error:
        told = [str(error)]
    return {**tables(monitor), "told": told, "steps": steps}


def fsdp(rank, ranks, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = blocks(), init_device_mesh("cpu", (ranks,))
    for block in model:
        fully_shard(block.q, mesh=mesh)  # put away again before attention runs
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Monitor(model, **LOOK) as monitor:
        model(own(batch(), rank, ranks)).sum().backward()
    return tables(monitor)


def tensor_parallel(rank, ranks, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"{i}.{name}": ColwiseParallel() for i in range(2) for name in "qkv"}
    model, plan = blocks(), plan | {f"{i}.out": RowwiseParallel() for i in range(2)}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    with Monitor(model, **LOOK) as monitor:
        for _ in range(2):
            model(batch())
    return tables(monitor)


def distributed_queries(rank, ranks, folder):
    """The second block's queries and keys are DTensors, which nobody can see."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, plan = blocks(), {f"1.{name}": ColwiseParallel(use_local_output=False) for name in "qkv"}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan | {"1.out": RowwiseParallel()})
    with torch.no_grad(), Monitor(model, **LOOK) as monitor:
        model(batch())
    return tables(monitor)


def joined(rank, ranks, folder):
    """The last rank has fewer batches; its monitor stops before it waits for the others."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(blocks())
    with Join([model]), Monitor(model, **LOOK) as monitor:
        for step in range(2 if rank == ranks - 1 else 4):
            model(own(batch(step), rank, ranks)).sum().backward()
    return tables(monitor)


def other_steps(rank, ranks, folder):
    with Monitor(Exact().train(), **LOOK) as monitor:
        for step in range(2):
            monitor.begin_step(step + 10 * (step * rank))
            monitor.model(own(whole_numbers(step), rank, ranks))
    return tables(monitor)


def failing(rank, ranks, folder):
    """The last rank's forward fails in a look, which it survives."""
    with Monitor(Exact().train(), **LOOK) as monitor:
        for step in range(3):
            x = own(whole_numbers(step), rank, ranks)
            try:
                monitor.model(x[..., :5] if (rank, step) == (ranks - 1, 1) else x)
            except RuntimeError:
                assert (rank, step) == (ranks - 1, 1)
    return tables(monitor)


def nothing_seen(rank, ranks, folder):
    """The last rank's monitor cannot look in the second step: the others do not wait for it."""
    model = Exact().train()
    with Monitor(model, **LOOK) as monitor:
        for step in range(3):
            if (rank, step) == (ranks - 1, 1):
                monitor._padding.watched, kept = None, monitor._padding.watched
            model(own(whole_numbers(step), rank, ranks))
            if (rank, step) == (ranks - 1, 1):
                monitor._padding.watched = kept
    return tables(monitor)


def often(rank, ranks, folder):
    """Monitors that stop right behind a look."""
    for step in range(30):
        with Monitor(Exact().train(), **LOOK) as monitor:
            monitor.model(own(whole_numbers(step), rank, ranks))
        assert monitor.heads["rows"].tolist() == [35, 35], step
    return {}


def other_settings(rank, ranks, folder):
    try:
        Monitor(Exact(), every=2 + rank).start()
    except InputError as error:
        return {"told": [str(error)]}
    return {}


def one_monitor(rank, ranks, folder):
    """Only rank 0 has a monitor."""
    monitor_ranks.PATIENCE = timedelta(seconds=2)
    if rank:
        return {}
    start = time.monotonic()
    try:
        Monitor(Exact()).start()
    except InputError as error:
        return {"told": [str(error)], "seconds": time.monotonic() - start}
    return {}


def lone(rank, ranks, folder):
    """Rank 0 runs the model once more than the others, which wait for it."""
    monitor_ranks.PATIENCE = timedelta(seconds=2)
    start = time.monotonic()
    with Monitor(Exact().train(), **LOOK) as monitor:
        for step in range(3):
            monitor.model(own(whole_numbers(step), rank, ranks))
            if not rank and step == 1:
                monitor.model(own(whole_numbers(step), rank, ranks))
            dist.barrier()
    return {**tables(monitor), "seconds": time.monotonic() - start}


def leaving(rank, ranks, end):
    """The last rank ends, or hangs, between two looks."""
    monitor_ranks.PATIENCE = timedelta(seconds=2)
    with Monitor(Exact().train(), **LOOK) as monitor:
        for step in range(3):
            if (rank, step) == (ranks - 1, 1):
                end()
            monitor.model(own(whole_numbers(step), rank, ranks))
    return tables(monitor)


def killed(rank, ranks, folder):
    return leaving(rank, ranks, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hanging(rank, ranks, folder):
    return leaving(rank, ranks, lambda: time.sleep(20))


def work(rank, ranks, folder, scenarios):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    for scenario in scenarios:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = globals()[scenario](rank, ranks, folder)
        found["said"] = [str(warning.message) for warning in said if "onitor" in str(warning.message)]
        (folder / f"{scenario}-{rank}.json").write_text(json.dumps(found), "utf-8")
    os._exit(0)  # without waiting for those that are gone


def main(ranks, folder, *scenarios):
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, int(ranks), Path(folder), scenarios))
        for rank in range(int(ranks))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])


if __name__ == "__main__":
    main(*sys.argv[1:])
