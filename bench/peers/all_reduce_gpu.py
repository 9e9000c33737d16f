"""The counterpart of bench_all_reduce_gpu in PyTorch: Gloo with CUDA tensors. Started as ranks by `lockstep run`."""

import time

import torch
import torch.distributed as dist

import serving

options = serving.settings()
on_gpu = options["devices"].startswith("cuda")
device = torch.device("cuda:0" if on_gpu else "cpu")
dist.init_process_group("gloo")


def synchronize():
    if on_gpu:
        torch.cuda.synchronize()


def correct(tensor):
    index = torch.arange(tensor.numel(), device=device, dtype=torch.float32).remainder(1000)
    tensor.copy_(index * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    ranks = dist.get_world_size()
    return torch.equal(tensor, index * (ranks * (ranks + 1) // 2))


def microseconds(tensor, repetitions):
    calls = 4 if tensor.numel() >= 1 << 22 else 8  # sums must stay finite
    times = []
    for _ in range(repetitions):
        tensor.normal_()
        synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    return times


tensors = [torch.zeros(size // 4, device=device) for size in options["sizes"]]
right = all([correct(tensor) for tensor in tensors])
for tensor in tensors:
    microseconds(tensor, 2)  # warm-up
serving.serve(options, dist.get_rank(), {"backend": "gloo", "correct": right, "version": torch.__version__},
              lambda repetitions: {"us": {str(tensor.nbytes): microseconds(tensor, repetitions) for tensor in tensors}})
dist.destroy_process_group()
