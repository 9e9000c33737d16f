"""The counterpart of bench_ddp in PyTorch: DistributedDataParallel over Gloo. Started as ranks by `lockstep run`."""

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist

settings = json.loads(sys.argv[1])
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if settings.get("only_start"):
    dist.destroy_process_group()
    sys.exit(0)


def resident_mib():
    with open("/proc/self/smaps_rollup") as file:
        return next(float(line.split()[1]) / 1024 for line in file if line.startswith("Pss:"))


before = resident_mib()
torch.manual_seed(0)
dim, hidden = settings["dim"], settings["hidden"]
layers = [torch.nn.Linear(dim, hidden), torch.nn.ReLU()]
for _ in range(settings["depth"]):
    layers += [torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, dim))
model = net
if not settings.get("bare"):
    model = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=settings.get("views", False))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
x = torch.randn(settings["batch"] // dist.get_world_size(), dim)
y = torch.sin(x)
times, off_times, peak = [], [], 0.0
weigh = settings.get("memory", False)
accumulate = settings.get("accumulate", 1)
for step in range(settings["steps"]):
    dist.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    for micro in range(accumulate):
        micro_begin = time.perf_counter()
        alone = micro + 1 < accumulate and not settings.get("bare")
        with model.no_sync() if alone else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.get("bf16", False)):
                loss = torch.nn.functional.mse_loss(model(x), y)
            if weigh:
                peak = max(peak, resident_mib())
            loss.backward()
        if weigh:
            peak = max(peak, resident_mib())
        if micro + 1 < accumulate:
            off_times.append((time.perf_counter() - micro_begin) * 1e3)
    optimizer.step()
    if weigh:
        peak = max(peak, resident_mib())
    times.append((time.perf_counter() - begin) * 1e3)


def settled_median(values):
    """The median without the first quarter, in which caches and allocators warm up."""
    values = sorted(values[len(values) // 4:])
    return values[len(values) // 2] if values else 0.0


if dist.get_rank() == 0:
    print(json.dumps({"ms": settled_median(times), "off_ms": settled_median(off_times), "mib": peak - before,
                      "version": "PyTorch " + torch.__version__}))
dist.destroy_process_group()
