"""PyTorch's all_reduce over Gloo between ranks of several hosts: microseconds by size, as JSON from rank 0. As everybody
calls it, and as one may write it with process groups: reduce inside each host, all_reduce between the first ranks of the
hosts, broadcast inside.

usage: two_hosts.py REPETITIONS BYTES...    (as a rank, with GLOO_SOCKET_IFNAME)
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANKS, HERE = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
INSIDE = [dist.new_group(list(range(first, first + HERE))) for first in range(0, RANKS, HERE)][dist.get_rank() // HERE]
LEADERS = dist.new_group(list(range(0, RANKS, HERE)))
LEADER = dist.get_rank() // HERE * HERE


def by_groups(tensor):
    dist.reduce(tensor, LEADER, group=INSIDE)
    if dist.get_rank() == LEADER:
        dist.all_reduce(tensor, group=LEADERS)
    dist.broadcast(tensor, LEADER, group=INSIDE)


NAME = "PyTorch " + torch.__version__.split("+")[0]
CASES = {NAME: dist.all_reduce, NAME + ", by groups": by_groups}
table = {name: {} for name in CASES}
for size in sys.argv[2:]:
    tensor = torch.zeros(int(size) // 4)
    times = {name: [] for name in CASES}
    for _ in range(int(sys.argv[1])):
        for name, all_reduce in CASES.items():
            dist.barrier()
            begin = time.perf_counter()
            all_reduce(tensor)
            took = torch.tensor([(time.perf_counter() - begin) * 1e6], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)  # the slowest rank's
            times[name].append(took.item())
    for name in CASES:
        table[name][size] = sorted(times[name])[len(times[name]) // 2]
if dist.get_rank() == 0:
    print(json.dumps(table))
dist.destroy_process_group()
