"""What this GPU can do at most: a large copy (bytes read plus bytes written) and a large product in fp16."""

import time

import torch

import serving

options = serving.settings()
device = torch.device(options.get("device", "cuda:0"))
on_gpu = device.type == "cuda"
elements, width = (1 << 30, 8192) if on_gpu else (1 << 22, 256)
dtype = torch.float16 if on_gpu else torch.float32
source = torch.randn(elements // 4, device=device)
target = torch.empty_like(source)
a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))


def seconds(work, count):
    work()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def measure(count):
    return {"copy_gbps": 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source), count) * 1e-9,
            "tflops": 2 * width**3 / seconds(lambda: a @ b, count) * 1e-12}


serving.serve(options, 0, {"name": torch.cuda.get_device_name() if on_gpu else "CPU", "version": torch.__version__},
              measure)
