"""PyTorch's all_reduce over Gloo, in microseconds by size. Started as ranks by `lockstep run`."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
dist.init_process_group("gloo")
table = {}
for size in (256, 4096, 65536, 1 << 20, 32 << 20, 64 << 20):
    tensor = torch.zeros(size // 4)
    calls = 1 if size >= 1 << 20 else 16
    times = []
    for _ in range(int(sys.argv[1])):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    table[str(size)] = sorted(times)[len(times) // 2]
if dist.get_rank() == 0:
    print(json.dumps({"times": table, "version": "PyTorch " + torch.__version__}))
dist.destroy_process_group()
