"""PyTorch is the oracle for what ranks do together: collectives and messages over Gloo, DistributedDataParallel with a
sparse embedding, and batch norms of all ranks' rows.

usage: ranks_parity.py RANKS_DUMP CASE
Exits with 77 (skipped) where this Python has no torch.
"""

import os
import subprocess
import sys
import tempfile

from oracle import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import safetensors_io

RANKS = 3
ROWS = [[2, 0, 1], [1, 3, 0], [0, 2, 2]]  # that go from one rank to another


def wave(sizes, phase):
    count = 1
    for size in sizes:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.37 + phase).sin().view(sizes)


def collectives(rank):
    mine = wave((2, 3), rank)
    out = {}
    total = mine.clone()
    dist.reduce(total, 1)
    largest = mine.clone()
    dist.reduce(largest, 2, dist.ReduceOp.MAX)
    out.update({"sum_at_1": total} if rank == 1 else {}, **({"max_at_2": largest} if rank == 2 else {}))
    out["broadcast"] = mine.clone()
    dist.broadcast(out["broadcast"], 2)
    parts = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(RANKS)]
    dist.gather(mine, parts if rank == 2 else None, 2)
    if rank == 2:
        out["gathered"] = torch.cat(parts)
    out["scattered"] = torch.zeros_like(mine)
    dist.scatter(out["scattered"], list(wave((6, 3), rank).split(2)) if rank == 1 else None, 1)
    parts = [torch.zeros_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    out["all_gathered"] = torch.cat(parts)
    out["exchanged"] = torch.zeros(6, 3, dtype=torch.float64)
    dist.all_to_all_single(out["exchanged"], wave((6, 3), rank))
    come = [ROWS[peer][rank] for peer in range(RANKS)]
    out["exchanged_rows"] = torch.zeros(sum(come), 3, dtype=torch.float64)
    dist.all_to_all_single(out["exchanged_rows"], wave((sum(ROWS[rank]), 3), rank), come, ROWS[rank])
    out["received"] = torch.zeros_like(mine)
    for request in (dist.isend(mine, (rank + 1) % RANKS, tag=7), dist.irecv(out["received"], (rank - 1) % RANKS, tag=7)):
        request.wait()
    return out


def sparse(rank):
    table = torch.nn.Embedding(10, 4, sparse=True).double()
    table.weight.data = wave((10, 4), 0.5)
    ddp = DistributedDataParallel(table)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    for step in range(4):
        optimizer.zero_grad()
        ddp(torch.tensor([rank, 2 * rank + step, 5, 5])).pow(2).sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
    return {"weight": table.weight.detach()}


def normed(_):
    """One process on all rows: SyncBatchNorm of PyTorch 1.13 wants a GPU."""
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)).double()
    with torch.no_grad():
        phase = 0
        for each in net.parameters():
            phase += 0.7
            each.copy_(wave(each.shape, phase))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        net(wave((9, 5), step)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net.state_dict()


CASES = {"collectives": collectives, "sparse": sparse, "normed": normed}


def run_rank(rank, folder, case):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(CASES[case](rank), f"{folder}/rank{rank}")
    dist.destroy_process_group()


def main(program, case):
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        subprocess.run([program, case, f"{folder}/ours"], check=True, timeout=60)
        ours = safetensors_io.load(f"{folder}/ours")
        mp.spawn(run_rank, args=(folder, case), nprocs=RANKS)
        count = 0
        for rank in range(RANKS):
            for name, tensor in torch.load(f"{folder}/rank{rank}").items():
                mine = ours[f"rank{rank}.{name}"]
                count += 1
                if mine.shape != tensor.shape or not torch.allclose(mine.double(), tensor.double(), 1e-12, 1e-12):
                    sys.exit(f"FAIL: {name} on rank {rank}: lockstep has {mine}, PyTorch {tensor}")
        assert count == len(ours) > 0, (count, len(ours))
        print(f"{count} tensors agree")


if __name__ == "__main__":
    main(*sys.argv[1:])
