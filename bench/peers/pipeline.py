"""One rank of a pipelined step in PyTorch (torch.distributed.pipelining); prints JSON from rank 0.

Settings as those of bench_pipeline with {"ranks": true}. Needs PyTorch 2.4 or later.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def main():
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = []
    for _ in range(settings["layers"]):
        layers += [torch.nn.Linear(settings["width"], settings["width"]), torch.nn.ReLU()]
    each = len(layers) // world
    module = torch.nn.Sequential(*layers[rank * each:(rank + 1) * each])
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[settings["schedules"][0]]
    schedule = kind(stage, settings["micro_batches"], loss_fn=torch.nn.functional.mse_loss)
    x = torch.randn(settings["batch"], settings["width"])
    y = torch.sin(x)
    times = []
    for step in range(settings["steps"]):
        module.zero_grad(set_to_none=True)
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=y)
        else:
            schedule.step()
        dist.barrier()
        if step >= settings["steps"] // 4:
            times.append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        print(json.dumps({"step_ms": statistics.median(times), "version": torch.__version__}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
