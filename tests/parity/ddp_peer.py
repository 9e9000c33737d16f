"""Practicals 6 and 7 in PyTorch: DistributedDataParallel over Gloo. Takes its rank from RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, so that torchrun, `lockstep run` or plain variables
start it. Flags are those of homework2_combined; --save and --json are written by rank 0.
"""

import argparse
import contextlib
import json
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import course_models  # noqa: E402
import safetensors_io  # noqa: E402


def read_flags():
    flags = argparse.ArgumentParser()
    for name, kind in (("steps", int), ("batch", int), ("dim", int), ("hidden", int), ("depth", int), ("lr", float)):
        flags.add_argument("--" + name, type=kind, required=True)
    for name in ("init", "data", "save", "json"):
        flags.add_argument("--" + name, required=True)
    flags.add_argument("--model", default="mlp", choices=sorted(course_models.MODELS))
    flags.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    flags.add_argument("--accum-steps", type=int, default=1)
    flags.add_argument("--amp", default="off", choices=("off", "bf16", "fp16"))
    flags.add_argument("--devices", default="cpu")
    for name in ("sync-every-step", "no-divide", "no-scaler", "quiet"):
        flags.add_argument("--" + name, action="store_true")
    return flags.parse_args()


class NoScaler:
    """Replaces the GradScaler that PyTorch lacks on the CPU before 2.3. bf16 needs none."""

    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass


def make_scaler(flags, device):
    if flags.amp == "off" or flags.no_scaler or not hasattr(torch.amp, "GradScaler"):
        return NoScaler()
    return torch.amp.GradScaler(device)


def train_step(flags, step, ddp, data, scaler, losses):
    """One window of micro-steps. Adds this rank's share of its mean loss to `losses`."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = data["x"].device.type
    dtype = {"off": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}[flags.amp]
    for micro in range(flags.accum_steps):
        first = (step * flags.accum_steps + micro) * flags.batch
        rows = ((torch.arange(flags.batch) + first) % data["x"].shape[0]).tensor_split(ranks)[rank]
        last = micro + 1 == flags.accum_steps
        with contextlib.nullcontext() if last or flags.sync_every_step else ddp.no_sync():
            with torch.autocast(device, dtype=dtype, enabled=flags.amp != "off"):
                loss = torch.nn.functional.mse_loss(ddp(data["x"][rows]), data["y"][rows])
            # PyTorch divides by the ranks, whatever their rows: this makes the mean one over all rows.
            share = len(rows) / flags.batch
            divisor = 1 if flags.no_divide else flags.accum_steps
            scaler.scale(loss * share * ranks / divisor).backward()
        losses += loss.detach().cpu() * share / flags.accum_steps


def main():
    flags = read_flags()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    device = "cuda" if flags.devices.startswith("cuda") else "cpu"
    if not flags.quiet:
        print(f"Rank: {rank} | Local Rank: {os.environ['LOCAL_RANK']} | Device: {device}", flush=True)

    model = course_models.MODELS[flags.model](flags.dim, flags.hidden, flags.depth)
    model.load_state_dict(safetensors_io.load(flags.init))
    model.to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[flags.optimizer]
    optimizer = make(model.parameters(), lr=flags.lr)
    scaler = make_scaler(flags, device)
    data = {name: tensor.to(device) for name, tensor in safetensors_io.load(flags.data).items()}

    losses = torch.zeros(flags.steps)
    for step in range(flags.steps):
        optimizer.zero_grad()
        train_step(flags, step, ddp, data, scaler, losses[step])
        scaler.step(optimizer)
        scaler.update()
    torch.distributed.all_reduce(losses)

    if rank == 0:
        safetensors_io.save(flags.save, {name: tensor.cpu() for name, tensor in model.state_dict().items()})
        with open(flags.json, "w") as file:
            json.dump({"losses": losses.tolist(), "world_size": torch.distributed.get_world_size()}, file)
    torch.distributed.destroy_process_group()


main()
