"""PyTorch is the oracle: practical5_single and practical5_dp, started from the same weights and fed the same
rows, must end with PyTorch's weights and losses, whatever the number of devices.

usage: practical5_parity.py BIN_FOLDER BATCH OPTIMIZER [SPEC ...]
A SPEC is a --devices text such as cuda:0*2; without any, cpu:1, 2, 3, 5 and 7 are tried.
Exits with 77 (skipped) where this Python has no torch.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile

from oracle import torch
import safetensors_io

STEPS, DIM, HIDDEN, DEPTH, LR = 20, 24, 40, 2, 0.05
SPECS = ("cpu:1", "cpu:2", "cpu:3", "cpu:5", "cpu:7")


def make_model():
    layers = [torch.nn.Linear(DIM, HIDDEN), torch.nn.ReLU()]
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU()]
    layers.append(torch.nn.Linear(HIDDEN, DIM))
    model = torch.nn.Module()
    model.layers = torch.nn.Sequential(*layers)
    return model


def train_in_pytorch(model, x, y, batch, optimizer_name, pieces=1):
    """With the gradient of each batch summed over that many pieces, as DataParallel sums it."""
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer_name]
    optimizer = make(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        rows = (torch.arange(batch) + step * batch) % x.shape[0]
        optimizer.zero_grad()
        loss = 0
        for piece in rows.chunk(pieces):
            part = torch.nn.functional.mse_loss(model.layers(x[piece]), y[piece]) * (len(piece) / batch)
            part.backward()
            loss += part.item()
        optimizer.step()
        losses.append(loss)
    return losses


def spread_of_rounding(model, x, y, batch, optimizer_name, trained):
    """How far PyTorch's own weights move if it adds the same gradients in another order. AdamW divides by the
    gradients' size, which magnifies the rounding of those near zero, by how much depends on the machine's BLAS."""
    spread = 0
    for pieces in (2, 3, 5, 7):
        other = copy.deepcopy(model)
        train_in_pytorch(other, x, y, batch, optimizer_name, pieces)
        weights = other.state_dict()
        spread = max(spread, *((weights[name] - trained[name]).abs().max().item() for name in trained))
    return spread


def run(binary, folder, batch, optimizer_name, spec):
    save, record = os.path.join(folder, "out.safetensors"), os.path.join(folder, "record.json")
    subprocess.run(
        [binary, "--quiet", "--devices", spec, "--steps", str(STEPS), "--batch", str(batch),
         "--dim", str(DIM), "--hidden", str(HIDDEN), "--depth", str(DEPTH), "--lr", str(LR),
         "--optimizer", optimizer_name, "--init", os.path.join(folder, "init.safetensors"),
         "--data", os.path.join(folder, "data.safetensors"), "--save", save, "--json", record],
        check=True)
    with open(record) as file:
        return safetensors_io.load(save), json.load(file)


def check(what, weights, losses, expected_weights, expected_losses, spread):
    atol = max(1e-6, 2 * spread)
    for name, expected in expected_weights.items():
        if not torch.allclose(weights[name], expected, rtol=1e-4, atol=atol):
            worst = (weights[name] - expected).abs().max().item()
            sys.exit(f"FAIL: {what}: {name} differs from PyTorch's by up to {worst}")
    if set(weights) != set(expected_weights):
        sys.exit(f"FAIL: {what}: other tensors than PyTorch's: {sorted(weights)}")
    for step, (loss, expected) in enumerate(zip(losses, expected_losses, strict=True)):
        if abs(loss - expected) > 1e-5 * max(1, abs(expected)):
            sys.exit(f"FAIL: {what}: loss of step {step} is {loss}, PyTorch's is {expected}")
    print(f"ok: {what} (atol {atol:.1e})")


def main():
    folder_of_programs, batch, optimizer_name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(1)
    model = make_model()
    # 150 rows: batches of 64 wrap round in the middle of a step.
    x, y = torch.randn(150, DIM), torch.randn(150, DIM)
    with tempfile.TemporaryDirectory() as folder:
        safetensors_io.save(os.path.join(folder, "init.safetensors"), model.state_dict())
        safetensors_io.save(os.path.join(folder, "data.safetensors"), {"x": x, "y": y})
        untrained = copy.deepcopy(model)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        losses = train_in_pytorch(model, x, y, batch, optimizer_name)
        trained = model.state_dict()
        if all(torch.equal(before[name], trained[name]) for name in before):
            sys.exit("FAIL: the oracle did not train")
        spread = spread_of_rounding(untrained, x, y, batch, optimizer_name, trained)
        if spread > 1e-4:
            sys.exit(f"FAIL: PyTorch's own weights depend on the order of sums by {spread}: nothing can be compared")

        binary = os.path.join(folder_of_programs, "practical5_single")
        specs = sys.argv[4:] or SPECS
        weights, record = run(binary, folder, batch, optimizer_name, specs[0])
        check(f"practical5_single on {specs[0]}", weights, record["losses"], trained, losses, spread)
        binary = os.path.join(folder_of_programs, "practical5_dp")
        for spec in specs:
            weights, record = run(binary, folder, batch, optimizer_name, spec)
            check(f"practical5_dp on {spec}", weights, record["losses"], trained, losses, spread)
            expected_split = [len(piece) for piece in torch.arange(batch).chunk(len(record["devices"]))]
            if record["split"] != expected_split:
                sys.exit(f"FAIL: {spec} split {record['split']}, torch.chunk {expected_split}")


main()
