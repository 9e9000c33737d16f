"""PyTorch's all_reduce over Gloo between ranks of several hosts: microseconds by size, as JSON from rank 0.

usage: two_hosts.py REPETITIONS BYTES...    (as a rank, with GLOO_SOCKET_IFNAME)
"""

import json
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
table = {}
for size in sys.argv[2:]:
    tensor = torch.ones(int(size) // 4)
    times = []
    for _ in range(int(sys.argv[1])):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        took = torch.tensor([(time.perf_counter() - begin) * 1e6], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)  # the slowest rank's
        times.append(took.item())
    table[size] = sorted(times)[len(times) // 2]
if dist.get_rank() == 0:
    print(json.dumps({"PyTorch " + torch.__version__.split("+")[0]: table}))
dist.destroy_process_group()
