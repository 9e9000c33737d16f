"""PyTorch is the oracle for what a training loop needs around it: recomputed activations, learning-rate schedules,
averages of weights, TorchScript modules. Event files are read by a reader written here.

usage: train_parity.py TRAIN_DUMP CASE
Exits with 77 (skipped) where this Python has no torch.
"""

import csv
import glob
import os
import struct
import subprocess
import sys
import tempfile

from oracle import torch

import safetensors_io

FOLDER = tempfile.TemporaryDirectory()


def path(name):
    return os.path.join(FOLDER.name, name)


def inputs():
    torch.manual_seed(1)
    first, second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
    return first, second, torch.randn(12, 6), torch.randn(12, 3)


def run(what, *more):
    """lockstep's results for the same weights and rows."""
    first, second, x, y = inputs()
    tensors = {"x": x, "y": y}
    for name, layer in (("first", first), ("second", second)):
        tensors[name + ".weight"], tensors[name + ".bias"] = layer.weight, layer.bias
    safetensors_io.save(path("in"), tensors)
    subprocess.run([sys.argv[1], what, path("in"), path("out"), *more], check=True, timeout=120)
    return safetensors_io.load(path("out"))


def expect_close(actual, expected, name, tolerance=1e-5):
    if actual.shape != expected.shape or not torch.allclose(actual, expected.detach().to(actual.dtype), tolerance, tolerance):
        sys.exit(f"FAIL: {name}: lockstep has {actual.flatten()[:6]}…, PyTorch {expected.flatten()[:6]}…")


def checkpointed():
    from torch.utils.checkpoint import checkpoint
    ours = run("checkpointed")
    first, second, x, _ = inputs()
    norm = torch.nn.BatchNorm1d(8)
    x.requires_grad_()
    torch.manual_seed(5)
    out = checkpoint(lambda rows: second(torch.dropout(torch.tanh(norm(first(rows))), 0.5, True)), x)
    after = torch.rand(4)
    out.square().sum().backward()
    theirs = {"out": out, "after": after, "x.grad": x.grad, "first.grad": first.weight.grad, "second.grad": second.weight.grad,
              "norm.grad": norm.weight.grad, "running_mean": norm.running_mean, "running_var": norm.running_var,
              "num_batches_tracked": norm.num_batches_tracked}
    for name, tensor in theirs.items():
        expect_close(ours[name], tensor, name)


def schedules():
    from torch.optim import lr_scheduler as lr
    ours = run("schedules")
    made = {
        "constant": lambda o: lr.LambdaLR(o, lambda _: 0.5),
        "linear": lambda o: lr.LinearLR(o, 0.25, 1, 7),
        "linear_down": lambda o: lr.LinearLR(o, 1, 0.1, 40),
        "cosine": lambda o: lr.CosineAnnealingLR(o, 30, 0.01),
        "step": lambda o: lr.StepLR(o, 6, 0.3),
        "lambda": lambda o: lr.LambdaLR(o, lambda done: 0.95 ** done),
        "warmup_cosine": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1, 8), lr.CosineAnnealingLR(o, 32)], [8]),
        "three": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.5, 1, 4), lr.ConstantLR(o, 1, 0), lr.StepLR(o, 3, 0.5)],
                                           [5, 20]),
    }
    assert set(made) == set(ours)
    for name, make in made.items():
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (0.4, 0.07)]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler = make(optimizer)
        rates = []
        for _ in range(40):
            rates += [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            scheduler.step()
        expect_close(ours[name], torch.tensor(rates, dtype=torch.float64), name, 1e-12)


def averages():
    from torch.optim.swa_utils import AveragedModel
    ours = run("averages")
    net, _, x, _ = inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    average = AveragedModel(net, avg_fn=lambda averaged, weight, count: 0.9 * averaged + 0.1 * weight)
    for _ in range(20):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(net)
    for name, tensor in average.module.named_parameters():
        expect_close(ours[name], tensor, name, 1e-6)


class Net(torch.nn.Module):
    def __init__(self, norm: bool):
        super().__init__()
        self.first, self.second, _, _ = inputs()
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


def train(net, x, y):
    losses = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train()
    for _ in range(6):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def scripts():
    _, _, x, y = inputs()
    torch.jit.script(Net(True)).save(path("script.pt"))
    ours = run("scripts", path("script.pt"), path("saved.pt"))
    eager = Net(True)
    losses = train(eager, x, y)
    eager.eval()
    state = dict(eager.state_dict())
    state.update(losses=losses, evaluated=eager(x))
    for how in ("alone", "ddp"):
        for name, tensor in state.items():
            expect_close(ours[f"{how}.{name}"], tensor, f"{how} {name}")
    saved = torch.jit.load(path("saved.pt"))
    assert not saved.training
    expect_close(saved(x), eager(x), "the saved script")

    # DataParallel: each replica normalises its own half of the rows, and the first half's statistics are kept.
    halves = Net(True)
    optimizer = torch.optim.SGD(halves.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        out = [halves(x[:6])]
        kept = {name: buffer.clone() for name, buffer in halves.named_buffers()}
        out.append(halves(x[6:]))
        for name, buffer in halves.named_buffers():
            buffer.data = kept[name]
        loss = torch.nn.functional.mse_loss(torch.cat(out), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expect_close(ours["dp.losses"], torch.tensor(losses), "dp losses")
    for name, tensor in halves.state_dict().items():
        expect_close(ours["dp." + name], tensor, "dp " + name)

    # Two ranks. Without BatchNorm they do what one process does on all rows.
    torch.jit.script(Net(False)).save(path("plain.pt"))
    ours = run("script_ranks", path("plain.pt"))
    eager = Net(False)
    train(eager, x, y)
    for rank in ("rank0", "rank1"):
        for name, tensor in eager.named_parameters():
            expect_close(ours[f"{rank}.{name}"], tensor, f"{rank} {name}")


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    while data:
        (length, head), body = struct.unpack("<QI", data[:12]), data[12:]
        assert masked(data[:8]) == head, "the checksum of a length"
        (crc,) = struct.unpack("<I", body[length:length + 4])
        assert masked(body[:length]) == crc, "the checksum of a record"
        yield body[:length]
        data = body[length + 4:]


def fields(data):
    """(number, value) of each field of a protocol buffer."""
    def varint():
        nonlocal data
        value, shift = 0, 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
    while data:
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield key >> 3, data[:size]
        data = data[size:]


def metrics():
    subprocess.run([sys.argv[1], "metrics", path("log")], check=True, timeout=60)
    expected = {("lr", step): 0.5 for step in range(1, 301)}
    expected.update({("loss/train", step): 1 / step for step in range(1, 301)})
    expected.update({("loss/train", step): -float(step) for step in range(301, 501)})

    seen = {}
    with open(path("log/metrics.csv"), newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["name"], int(row["step"])
            assert key not in seen, f"{key} occurs twice"
            assert float(row["time"]) > 1.6e9
            seen[key] = float(row["value"])
    assert seen == expected, "metrics.csv"

    seen, versions, restarts = {}, 0, []
    for name in sorted(glob.glob(path("log/events.out.tfevents.*"))):
        with open(name, "rb") as file:
            for record in records(file.read()):
                event = dict(fields(record))
                assert struct.unpack("<d", event[1])[0] > 1.6e9, "wall time"
                versions += event.get(3) == b"brain.Event:2"
                if 7 in event:
                    assert dict(fields(event[7])) == {1: 1}, "a session that starts"
                    restarts.append(event[2])
                for _, value in fields(event.get(5, b"")):
                    value = dict(fields(value))
                    key = value[1].decode(), event[2]
                    assert key not in seen, f"{key} occurs twice"
                    (seen[key],) = struct.unpack("<f", value[2])
    assert versions == 2 and restarts == [1, 301], (versions, restarts)
    assert seen.keys() == expected.keys()
    for key, value in expected.items():
        assert abs(seen[key] - value) <= 1e-6 * abs(value), key


{"checkpointed": checkpointed, "schedules": schedules, "averages": averages, "scripts": scripts, "metrics": metrics}[sys.argv[2]]()
print("ok")
