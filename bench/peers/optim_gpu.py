"""The counterpart of bench_optim_gpu in PyTorch: torch.optim with the variant named in the settings."""

import time

import torch

import serving

options = serving.settings()
device = torch.device(options.get("device", "cuda:0"))


def synchronize():
    if device.type == "cuda":
        torch.cuda.synchronize()


torch.manual_seed(0)
parameters = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in options["shapes"]]
for parameter in parameters:
    parameter.grad = torch.randn(parameter.shape, device=device)
variant = {options["variant"]: True}  # foreach or fused
if options["optimizer"] == "adamw":
    optimizer = torch.optim.AdamW(parameters, **variant)
else:
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=options.get("momentum", 0.0), **variant)
scaler = torch.amp.GradScaler(device.type) if options.get("scaler") else None
if scaler:
    scaler.scale(torch.ones((), device=device))  # its tensors are made with the first loss


def step():
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def measure(steps):
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return {"ms": (time.perf_counter() - begin) * 1e3 / steps}


for _ in range(options.get("check_steps", 5)):
    step()
checksum = sum(parameter.detach().double().abs().sum().item() for parameter in parameters)
serving.serve(options, 0, {"checksum": checksum, "version": torch.__version__}, measure)
