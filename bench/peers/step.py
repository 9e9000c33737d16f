"""The counterpart of bench_step in PyTorch: AMP with GradScaler and SGD; eager, compiled, or with forward and backward in
a CUDA graph that the program captures itself; alone or as a rank of DDP."""

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
optimizer = torch.optim.SGD(net.parameters(), lr=options["lr"], **{options.get("sgd", "foreach"): True})
scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")


parts = list(zip(x.chunk(micro_steps), y.chunk(micro_steps)))


def loss_of(rows, wanted):
    with torch.autocast(device.type, dtype, enabled=precision != "fp32"):
        loss = torch.nn.functional.mse_loss(model(rows), wanted)
    return loss / micro_steps if micro_steps > 1 else loss


if options.get("compile"):
    # Its CUDA graphs overwrite the gradients of the micro-step before, so that they serve one only.
    loss_of = torch.compile(loss_of, mode="reduce-overhead" if micro_steps == 1 else "default")


def forward_backward():
    """The gradients of all micro-steps; the loss of the step."""
    total = None
    for micro, (rows, wanted) in enumerate(parts):
        alone = options.get("world") and micro + 1 < micro_steps
        with model.no_sync() if alone else contextlib.nullcontext():
            loss = loss_of(rows, wanted)
            scaler.scale(loss).backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def capture():
    """Returns a function that replays forward and backward, as PyTorch's page on CUDA graphs shows it: warmed up on another
    stream, gradients made inside the graph, scaler and optimizer outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_backward()
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = forward_backward()

    def replay():
        graph.replay()
        return total

    return replay


gradients = capture() if options.get("graph") else forward_backward


def step():
    loss = gradients()
    scaler.step(optimizer)
    scaler.update()
    if not options.get("graph"):  # whose gradients stay where they are
        optimizer.zero_grad(set_to_none=True)
    return loss


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
