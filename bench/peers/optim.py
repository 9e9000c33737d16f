"""The counterpart of bench_optim in PyTorch: torch.optim with the variant named in the settings."""

import json
import sys
import time

import torch

settings = json.loads(sys.argv[1])
torch.set_num_threads(settings["threads"])
torch.manual_seed(0)
parameters = []
for count in settings["counts"]:
    parameters.append(torch.randn(count).requires_grad_())
    parameters[-1].grad = torch.randn(count)
variant = {settings["variant"]: True}  # foreach or fused
if settings["optimizer"] == "adamw":
    optimizer = torch.optim.AdamW(parameters, **variant)
else:
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-2, **variant)
times = []
for _ in range(settings["steps"]):
    begin = time.perf_counter()
    if settings.get("clip"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    times.append((time.perf_counter() - begin) * 1e3)
times = sorted(times[len(times) // 4:])
print(json.dumps({"ms": times[len(times) // 2]}))
