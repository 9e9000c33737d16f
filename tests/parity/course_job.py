"""Trains one model on the same rows in several ways, and compares what comes out."""

import json
import math
import os
import socket
import subprocess
import sys

import torch

import course_models
import hidden_amx
import safetensors_io

FOLDER = os.path.dirname(os.path.abspath(__file__))
PEER = [sys.executable, os.path.join(FOLDER, "ddp_peer.py")]
MLP = {"--steps": 20, "--dim": 24, "--hidden": 40, "--depth": 2, "--lr": 0.05}
TRANSFORMER = {"--steps": 20, "--dim": 32, "--hidden": 128, "--depth": 2, "--lr": 0.005, "--model": "transformer"}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

hidden_amx.avoid()  # before any product of bf16


class Job:
    """One set of flags, initial weights and rows, for any number of ways to train."""

    def __init__(self, folder, batch, flags):
        self.folder, self.flags = folder, {**flags, "--batch": batch}
        torch.manual_seed(1)
        model = course_models.MODELS[flags.get("--model", "mlp")]
        self.initial = model(flags["--dim"], flags["--hidden"], flags["--depth"]).state_dict()
        # 150 rows: batches of 64 wrap around in the middle of a step.
        data = {"x": torch.randn(150, flags["--dim"]), "y": torch.randn(150, flags["--dim"])}
        safetensors_io.save(self.path("init"), self.initial)
        safetensors_io.save(self.path("data"), data)
        self.runs = 0

    def path(self, name):
        return os.path.join(self.folder, name + ".safetensors")

    def arguments(self):
        self.runs += 1
        flags = {**self.flags, "--init": self.path("init"), "--data": self.path("data"),
                 "--save": self.path(f"out{self.runs}"), "--json": os.path.join(self.folder, "record.json")}
        return ["--quiet"] + [str(word) for pair in flags.items() for word in pair if word is not None]

    def result(self):
        """Weights and record of the last run. The record is removed, so that no run can show another's."""
        record = os.path.join(self.folder, "record.json")
        with open(record) as file:
            content = json.load(file)
        os.remove(record)
        return safetensors_io.load(self.path(f"out{self.runs}")), content

    def run(self, command):
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        subprocess.run(command + self.arguments(), check=True, timeout=240, env=environment)
        return self.result()

    def run_with_variables(self, command, ranks):
        """Starts every rank by hand, with nothing but torchrun's variables."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        arguments = self.arguments()
        processes = []
        for rank in range(ranks):
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            processes.append(subprocess.Popen(command + arguments, env=environment))
        for rank, process in enumerate(processes):
            if process.wait(timeout=240) != 0:
                sys.exit(f"FAIL: rank {rank} of {command[-1]} ended with {process.returncode}")
        return self.result()


def check(what, result, expected, rtol=1e-4, atol=1e-6):
    (weights, record), (expected_weights, expected_record) = result, expected
    if set(weights) != set(expected_weights):
        sys.exit(f"FAIL: {what}: other tensors: {sorted(weights)}, {sorted(expected_weights)}")
    for name, tensor in expected_weights.items():
        if not torch.allclose(weights[name], tensor, rtol=rtol, atol=atol):
            worst = (weights[name] - tensor).abs().max().item()
            sys.exit(f"FAIL: {what}: {name} differs by up to {worst}")
    pairs = zip(record["losses"], expected_record["losses"], strict=True)
    for step, (loss, wanted) in enumerate(pairs):
        if not abs(loss - wanted) <= rtol / 10 * max(1, abs(wanted)):
            sys.exit(f"FAIL: {what}: loss of step {step} is {loss}, not {wanted}")
    print(f"ok: {what}")


def require_trained(job, result):
    if any(torch.equal(result[0][name], tensor) for name, tensor in job.initial.items()):
        sys.exit("FAIL: the run to compare with did not train")
    losses = result[1]["losses"]
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        sys.exit(f"FAIL: the run to compare with diverged: {losses}")
