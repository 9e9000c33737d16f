"""practical6_ddp with N ranks, from the same weights and on the same rows, must end with the weights and losses of
practical5_single and of PyTorch's DistributedDataParallel; and it must start in every way that is promised.

usage: practical6_parity.py BIN_FOLDER CASE
CASE: even, uneven, adamw, transformer, repeat, variables, alone, mpirun or peer.
Exits with 77 (skipped) where this Python has no torch, or for mpirun where that is not installed.
"""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print("SKIP: this python3 has no torch to compare with (apt-get install python3-torch)")
    sys.exit(77)

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import course_models  # noqa: E402
import safetensors_io  # noqa: E402

BIN = sys.argv[1]
PROGRAM = os.path.join(BIN, "practical6_ddp")
PEER = [sys.executable, os.path.join(FOLDER, "ddp_peer.py")]
MLP = {"--steps": 20, "--dim": 24, "--hidden": 40, "--depth": 2, "--lr": 0.05}
TRANSFORMER = {"--steps": 20, "--dim": 32, "--hidden": 128, "--depth": 2, "--lr": 0.005, "--model": "transformer"}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Job:
    """One set of flags, initial weights and rows, for as many ways to train as one likes."""

    def __init__(self, folder, batch, flags):
        self.folder, self.flags = folder, {**flags, "--batch": batch}
        torch.manual_seed(1)
        model = course_models.MODELS[flags.get("--model", "mlp")]
        self.initial = model(flags["--dim"], flags["--hidden"], flags["--depth"]).state_dict()
        # 150 rows: batches of 64 wrap round in the middle of a step.
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
        return ["--quiet"] + [str(word) for pair in flags.items() for word in pair]

    def result(self):
        """Weights and record of the last run. Files are taken away, so that no run can show another's."""
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


def under_lockstep(ranks, program=(PROGRAM,)):
    return [os.path.join(BIN, "lockstep"), "run", "--quiet", "-n", str(ranks), *program]


def check(what, result, expected):
    (weights, record), (expected_weights, expected_record) = result, expected
    if set(weights) != set(expected_weights):
        sys.exit(f"FAIL: {what}: other tensors: {sorted(weights)}, {sorted(expected_weights)}")
    for name, tensor in expected_weights.items():
        if not torch.allclose(weights[name], tensor, rtol=1e-4, atol=1e-6):
            worst = (weights[name] - tensor).abs().max().item()
            sys.exit(f"FAIL: {what}: {name} differs by up to {worst}")
    pairs = zip(record["losses"], expected_record["losses"], strict=True)
    for step, (loss, wanted) in enumerate(pairs):
        if not abs(loss - wanted) <= 1e-5 * max(1, abs(wanted)):
            sys.exit(f"FAIL: {what}: loss of step {step} is {loss}, not {wanted}")
    print(f"ok: {what}")


def require_trained(job, result):
    if any(torch.equal(result[0][name], tensor) for name, tensor in job.initial.items()):
        sys.exit("FAIL: the run to compare with did not train")
    losses = result[1]["losses"]
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        sys.exit(f"FAIL: the run to compare with diverged: {losses}")


def compare_over_ranks(job, numbers_of_ranks):
    """Every number of ranks against one, and against PyTorch with as many."""
    if job.flags.get("--model") == "transformer":
        single = job.run([PROGRAM])
    else:
        single = job.run([os.path.join(BIN, "practical5_single")])
    require_trained(job, single)
    for ranks in numbers_of_ranks:
        result = job.run(under_lockstep(ranks))
        batch = job.flags["--batch"]
        split = [len(piece) for piece in torch.arange(batch).tensor_split(ranks)]
        if result[1]["split"] != split or result[1]["world_size"] != ranks:
            sys.exit(f"FAIL: {ranks} ranks split {batch} rows as {result[1]['split']}, not {split}")
        check(f"{ranks} ranks against one", result, single)
        check(f"{ranks} ranks against PyTorch's", result, job.run_with_variables(PEER, ranks))


def repeat(job):
    for ranks in (2, 3):
        files = []
        for _ in range(2):
            job.run(under_lockstep(ranks))
            with open(job.path(f"out{job.runs}"), "rb") as file:
                files.append(file.read())
        if files[0] != files[1]:
            sys.exit(f"FAIL: two runs of {ranks} ranks differ")
        print(f"ok: two runs of {ranks} ranks are bitwise equal")


def mpirun(job):
    if shutil.which("mpirun") is None:
        print("SKIP: there is no mpirun here (apt-get install openmpi-bin)")
        sys.exit(77)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PROGRAM]
    check("under mpirun", job.run(command), job.run(under_lockstep(2)))


def main():
    case = sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        if case == "even":
            compare_over_ranks(Job(folder, 60, MLP), (1, 2, 3, 5))
        elif case == "uneven":
            compare_over_ranks(Job(folder, 64, MLP), (3, 5))
        elif case == "adamw":
            compare_over_ranks(Job(folder, 60, {**MLP, "--optimizer": "adamw", "--lr": 0.001}), (2,))
        elif case == "transformer":
            compare_over_ranks(Job(folder, 60, TRANSFORMER), (1, 2))
        elif case == "repeat":
            repeat(Job(folder, 64, MLP))
        elif case == "variables":
            job = Job(folder, 60, MLP)
            check("started by variables", job.run_with_variables([PROGRAM], 2), job.run(under_lockstep(2)))
        elif case == "alone":
            job = Job(folder, 60, MLP)
            result = job.run([PROGRAM])
            check("started alone", result, job.run([os.path.join(BIN, "practical5_single")]))
        elif case == "mpirun":
            mpirun(Job(folder, 60, MLP))
        elif case == "peer":
            job = Job(folder, 60, MLP)
            check("PyTorch under lockstep run", job.run(under_lockstep(2, PEER)), job.run(under_lockstep(2)))
        else:
            sys.exit(f"FAIL: there is no case {case}")


main()
