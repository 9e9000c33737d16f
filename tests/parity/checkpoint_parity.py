"""PyTorch is the oracle: checkpoints go both ways between it and lockstep, optimizer state included, and the next five
steps are those that the other would have done.

usage: checkpoint_parity.py CHECKPOINT_TRAIN LOCKSTEP SOURCE_FOLDER
Exits with 77 (skipped) where this Python has no torch.
"""

import glob
import os
import subprocess
import sys
import tempfile

from oracle import torch

TRAIN, LOCKSTEP, SOURCE = sys.argv[1:]
sys.path.insert(0, os.path.join(SOURCE, "scripts"))
import lockstep_checkpoint

OPTIMIZERS = {
    "Sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "torch.SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "torch.Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "torch.Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "torch.RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


def make(name):
    # BatchNorm comes first: after a linear layer, the gradient of its bias would be nothing but rounding.
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    net.double()
    return net, OPTIMIZERS[name](net.parameters())


def train(net, optimizer, first, last):
    for step in range(first, last + 1):
        x = torch.sin(torch.arange(60, dtype=torch.float64).reshape(10, 6) * step)
        y = torch.cos(torch.arange(30, dtype=torch.float64).reshape(10, 3) * step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"FAIL: {' '.join(command)} exits with {done.returncode}\n{done.stdout}{done.stderr}")


def tensors_of(folder, step):
    path = os.path.join(folder, f"step-{step:08}")
    return {**lockstep_checkpoint.read_part(path, "model"), **lockstep_checkpoint.read_part(path, "optimizer")}


def compare(what, ours, theirs):
    """The largest relative difference, after checking that the same tensors are there."""
    if set(ours) != set(theirs):
        sys.exit(f"FAIL: {what}: {sorted(set(ours) ^ set(theirs))} are on one side only")
    worst = 0.0
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            sys.exit(f"FAIL: {what}: {name} is {tensor.dtype} {tensor.shape} and {other.dtype} {other.shape}")
        difference = (tensor.double() - other.double()).abs().max().item() if tensor.numel() else 0.0
        worst = max(worst, difference / max(1e-3, tensor.double().abs().max().item()))
    if not worst < 1e-13:
        sys.exit(f"FAIL: {what}: relative difference {worst}")
    return worst


def as_files(net, optimizer, folder):
    lockstep_checkpoint.save(folder, net, optimizer)
    tensors = {}
    for path in glob.glob(os.path.join(folder, "*.safetensors")):
        tensors.update(lockstep_checkpoint.read_file(path))
    return tensors


def from_pytorch(name, scratch):
    """Three steps here, five there; against eight here."""
    net, optimizer = make(name)
    train(net, optimizer, 1, 3)
    files, runs = os.path.join(scratch, "files"), os.path.join(scratch, "run")
    lockstep_checkpoint.save(files, net, optimizer)
    run(LOCKSTEP, "ckpt", "import", runs, "--step", "3", os.path.join(files, "model.safetensors"),
        os.path.join(files, "optimizer.safetensors"), "--values", os.path.join(files, "values.json"))
    run(LOCKSTEP, "ckpt", "verify", runs)
    run(TRAIN, runs, name, "8")
    train(net, optimizer, 4, 8)
    return compare(f"{name} from PyTorch", tensors_of(runs, 8), as_files(net, optimizer, os.path.join(scratch, "again")))


def to_pytorch(name, scratch):
    """Three steps there, five here; against eight there."""
    runs = os.path.join(scratch, "run")
    run(TRAIN, runs, name, "8")
    net, optimizer = make(name)
    lockstep_checkpoint.load(os.path.join(runs, "step-00000003"), net, optimizer)
    train(net, optimizer, 4, 8)
    return compare(f"{name} to PyTorch", tensors_of(runs, 8), as_files(net, optimizer, os.path.join(scratch, "files")))


for optimizer_name in OPTIMIZERS:
    for way in (from_pytorch, to_pytorch):
        with tempfile.TemporaryDirectory() as folder:
            worst_difference = way(optimizer_name, folder)
        print(f"ok: {optimizer_name} {way.__name__}: relative difference {worst_difference:.1e} after five steps")
