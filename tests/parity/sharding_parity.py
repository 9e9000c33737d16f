"""PyTorch is the oracle: every stage has the losses of DistributedDataParallel with ZeroRedundancyOptimizer.

usage: sharding_parity.py SHARDING_TRAIN LOCKSTEP
Exits with 77 (skipped) where this Python has no torch.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys

from oracle import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 8
# Where lockstep's ranks run: their number, flags of `lockstep run`, and whose the weights are. The mean over all rows does
# not depend on the number of ranks.
LAYOUTS = {
    "one copy": (2, ["--backend", "shm"], "shared"),
    "own copies": (3, ["--backend", "shm"], "copies"),
    "Gloo": (2, ["--backend", "gloo"], "shared"),
}
RANKS = 2  # of PyTorch
OPTIMIZERS = {
    "sgd": dict(optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": dict(optimizer_class=torch.optim.AdamW, lr=0.01),
    "clipped": dict(optimizer_class=torch.optim.AdamW, lr=0.01),
}
MICRO_STEPS = {"sgd": 2}  # of accumulation, for each update
MAX_NORM = 0.05


def wave(sizes, phase):
    count = 1
    for size in sizes:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.37 + phase).sin().view(sizes)


def train(rank, port, name, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    with torch.no_grad():
        phase = 0
        for each in net.parameters():
            phase += 0.7
            each.copy_(wave(each.shape, phase) * 0.3)
    ddp = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), **OPTIMIZERS[name])
    micro_steps = MICRO_STEPS.get(name, 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = torch.zeros((), dtype=torch.float64)
        for micro in range(micro_steps):
            x = wave((12, 6), 0.2 + step + 0.1 * micro).chunk(RANKS)[rank]
            y = wave((12, 3), 0.5 + step + 0.1 * micro).chunk(RANKS)[rank]
            with ddp.no_sync() if micro + 1 < micro_steps else contextlib.nullcontext():
                loss = nn.functional.mse_loss(ddp(x), y) / micro_steps
                loss.backward()
            mean += loss.detach()
        if name == "clipped":
            assert torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM) > MAX_NORM
        optimizer.step()
        dist.all_reduce(mean)
        results[step] = mean.item() / RANKS
    dist.destroy_process_group()


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def losses_of_pytorch(name):
    results = torch.zeros(STEPS, dtype=torch.float64).share_memory_()
    mp.spawn(train, args=(free_port(), name, results), nprocs=RANKS)
    return results.tolist()


def losses_of_lockstep(program, lockstep, stage, name, place):
    ranks, flags, weights = LAYOUTS[place]
    command = [lockstep, "run", "-n", str(ranks), *flags, program, str(stage), name, str(MICRO_STEPS.get(name, 1)), weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"FAIL: {' '.join(command)} exits with {done.returncode}\n{done.stdout}{done.stderr}")
    return [float(line.split("]")[-1]) for line in done.stdout.split("\n") if line.strip()]


def main(program, lockstep):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    others = itertools.cycle(place for place in LAYOUTS if place != "one copy")
    for name in OPTIMIZERS:
        wanted = losses_of_pytorch(name)
        if not wanted[-1] < wanted[0]:
            sys.exit(f"FAIL: PyTorch's loss does not fall: {wanted}")
        for stage, place in [(stage, place) for stage in (1, 2, 3) for place in ("one copy", next(others))]:
            losses = losses_of_lockstep(program, lockstep, stage, name, place)
            off = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted)) if len(losses) == STEPS else float("inf")
            print(f"{name}, stage {stage}, {place}: losses differ by {off:.1e}")
            if off > 1e-10:
                sys.exit(f"FAIL: {losses} instead of {wanted}")


if __name__ == "__main__":
    main(*sys.argv[1:])
