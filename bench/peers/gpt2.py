"""The counterpart of bench_gpt2 in PyTorch: the same model, weights and tokens, as PyTorch's users write it for speed: autocast, scaled_dot_product_attention, cross_entropy on the logits as they are, fused AdamW; eager or compiled.

"attention": "cudnn" puts cuDNN's attention first; "residual": "bf16" keeps the residual stream in bf16, as
lockstep's master weights do; "compile" may be a mode of torch.compile. The softmax includes the rows that pad the
vocabulary, as is usual: 47 of 50304, which learn not to be chosen.
"""

import contextlib
import json
import struct
import time

import torch
import torch.nn.functional as F

import serving

settings = serving.settings()
device = settings.get("device", "cuda:0")
layers, heads, width = settings.get("layers", 12), settings.get("heads", 12), settings.get("width", 768)
positions, vocabulary = settings.get("positions", 1024), settings.get("vocabulary", 50257)
padded = (vocabulary + 127) // 128 * 128
batch = settings.get("batch", 32)
bf16_residual = settings.get("residual") == "bf16"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.ln2 = torch.nn.LayerNorm(width)
        self.fc = torch.nn.Linear(width, 4 * width)
        self.out = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        rows, count, _ = x.shape
        q, k, v = (part.view(rows, count, heads, width // heads).transpose(1, 2)
                   for part in self.qkv(self.ln1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, count, width))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt2(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(padded, width)
        self.wpe = torch.nn.Embedding(positions, width)
        self.lnf = torch.nn.LayerNorm(width)
        for i in range(layers):
            self.add_module(f"h{i}", Block())

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        if bf16_residual:
            x = x.bfloat16()
        for i in range(layers):
            x = getattr(self, f"h{i}")(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, padded), targets.view(-1))


def load(path):
    """Tensors of a safetensors file of float32."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(data, dtype=torch.float32, offset=entry["data_offsets"][0],
                                   count=(entry["data_offsets"][1] - entry["data_offsets"][0]) // 4)
            .reshape(entry["shape"]) for name, entry in header.items()}


def batch_of(number):
    i = torch.arange(batch * (positions + 1))
    tokens = (((i * i) % 1009 * 31 + number * 17) % vocabulary).view(batch, positions + 1)
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


def chosen_attention():
    if settings.get("attention") != "cudnn":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)


def synchronize():
    if device != "cpu":
        torch.cuda.synchronize()


torch.manual_seed(0)
net = Gpt2()
if "weights" in settings:
    net.load_state_dict(load(settings["weights"]))
net.to(device)
torch.set_float32_matmul_precision("high")
mode = settings.get("compile")
model = torch.compile(net, mode=mode if isinstance(mode, str) else None) if mode else net
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
                              fused=device != "cpu")
batches = [batch_of(number) for number in range(4)]
steps_done = 0


def step():
    global steps_done
    tokens, targets = batches[steps_done % len(batches)]
    steps_done += 1
    with torch.autocast(torch.device(device).type, torch.bfloat16), chosen_attention():
        loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def memory():
    if device == "cpu":
        return None
    return {"allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30}


def measure(steps):
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    ms = (time.perf_counter() - begin) * 1e3 / steps
    return {"ms": ms, "tokens_per_s": batch * positions / ms * 1e3, "memory": memory()}


losses = [step().item() for _ in range(settings.get("check_steps", 20))]
serving.serve(settings, 0, {"losses": losses, "memory": memory(), "version": torch.__version__}, measure)
