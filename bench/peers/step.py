"""The twin of bench_step in PyTorch: AMP with GradScaler and SGD, eager or compiled, alone or as a rank of DDP."""

import contextlib
import math
import os
import sys
import time

import torch

import serving

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "parity"))
import course_models  # noqa: E402
import safetensors_io  # noqa: E402

options = serving.settings()
device = torch.device(options.get("device", "cuda:0"))
on_gpu = device.type == "cuda"
precision = options.get("precision", "fp16")
dtype = torch.float16 if precision == "fp16" else torch.bfloat16
micro_steps = options.get("accumulate", 1)
ranks, rank = 1, 0
if options.get("world"):
    torch.distributed.init_process_group("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()


def synchronize():
    if on_gpu:
        torch.cuda.synchronize()


torch.manual_seed(0)
net = course_models.Mlp(options["dim"], options["hidden"], options["depth"])
torch.manual_seed(0)
net.to(device)
if "init" in options:
    net.load_state_dict(safetensors_io.load(options["init"]))
else:
    with torch.no_grad():
        for parameter in net.parameters():
            scale = math.sqrt(2.0 / parameter.shape[1]) if parameter.dim() == 2 else 0.01
            parameter.copy_(torch.randn(parameter.shape, device=device) * scale)
if "data" in options:
    data = safetensors_io.load(options["data"])
    x, y = data["x"].to(device), data["y"].to(device)
else:
    x = torch.randn(options["batch"] // ranks * micro_steps, options["dim"], device=device)
    y = torch.sin(x)
if on_gpu:
    torch.cuda.reset_peak_memory_stats()

model = net
if options.get("world"):
    model = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=options.get("views", False))
if options.get("compile"):
    # Its CUDA graphs overwrite the gradients of the micro-step before, so that they serve one only.
    model = torch.compile(net, mode="reduce-overhead" if options.get("accumulate", 1) == 1 else "default")
optimizer = torch.optim.SGD(net.parameters(), lr=options["lr"], **{options.get("sgd", "foreach"): True})
scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step():
    rows = x.shape[0] // micro_steps
    total = 0
    for micro in range(micro_steps):
        alone = options.get("world") and micro + 1 < micro_steps
        with model.no_sync() if alone else contextlib.nullcontext():
            with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
                out = model(x[micro * rows:(micro + 1) * rows])
                loss = torch.nn.functional.mse_loss(out, y[micro * rows:(micro + 1) * rows])
            if micro_steps > 1:
                loss = loss / micro_steps
            scaler.scale(loss).backward()
        total = total + loss.detach()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total


def memory():
    if not on_gpu:
        return None
    return {"allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
            "reserved_mib": torch.cuda.max_memory_reserved() / 2**20}


def measure(steps):
    if options.get("world"):
        torch.distributed.barrier()
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        loss = step()
    synchronize()
    return {"ms": (time.perf_counter() - begin) * 1e3 / steps, "loss": loss.item(), "memory": memory()}


losses = [step().item() for _ in range(options.get("check_steps", 20))]
serving.serve(options, rank, {"pid": os.getpid(), "losses": losses, "version": torch.__version__}, measure)
if options.get("world"):
    torch.distributed.destroy_process_group()
