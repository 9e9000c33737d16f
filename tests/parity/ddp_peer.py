"""Practical 6 in PyTorch: DistributedDataParallel over Gloo. Takes its place among the ranks from RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, so that torchrun, `lockstep run` or plain variables
start it. Flags are those of practical6_ddp; --save and --json are written by rank 0.
"""

import argparse
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
    flags.add_argument("--quiet", action="store_true")
    return flags.parse_args()


def main():
    flags = read_flags()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not flags.quiet:
        print(f"Rank: {rank} | Local Rank: {os.environ['LOCAL_RANK']} | Device: cpu", flush=True)

    model = course_models.MODELS[flags.model](flags.dim, flags.hidden, flags.depth)
    model.load_state_dict(safetensors_io.load(flags.init))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[flags.optimizer]
    optimizer = make(model.parameters(), lr=flags.lr)
    data = safetensors_io.load(flags.data)

    losses = []
    for step in range(flags.steps):
        batch = (torch.arange(flags.batch) + step * flags.batch) % data["x"].shape[0]
        rows = batch.tensor_split(ranks)[rank]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(data["x"][rows]), data["y"][rows])
        # PyTorch divides by the ranks, whatever their rows: this makes the mean one over all rows.
        share = len(rows) / flags.batch
        (loss * share * ranks).backward()
        optimizer.step()
        of_batch = loss.detach() * share
        torch.distributed.all_reduce(of_batch)
        losses.append(of_batch.item())

    if rank == 0:
        safetensors_io.save(flags.save, model.state_dict())
        with open(flags.json, "w") as file:
            json.dump({"losses": losses, "world_size": ranks}, file)
    torch.distributed.destroy_process_group()


main()
