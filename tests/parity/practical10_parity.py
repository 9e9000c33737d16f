"""Data parallel ranks with stages and micro-batches must end with the weights and losses of PyTorch on one device.

usage: practical10_parity.py BIN_FOLDER CASE [cuda]
CASE: mlp, transformer or ranks. With cuda, all stages of all ranks share the first GPU.
Exits with 77 (skipped) where this Python has no torch.
"""

import os
import sys
import tempfile

from oracle import torch
from course_job import MLP, PEER, TRANSFORMER, Job, check, require_trained

BIN = sys.argv[1]
CUDA = sys.argv[3:] == ["cuda"]
ROWS = 61  # neither two ranks nor three micro-batches divide them


def devices(slots):
    return ["--devices", f"cuda:0*{slots}" if CUDA else f"cpu:{slots}"]


def hybrid(job, ranks, slots, more):
    command = [os.path.join(BIN, "lockstep"), "run", "--quiet", "-n", str(ranks)]
    return job.run(command + [os.path.join(BIN, "practical10_hybrid"), *devices(slots), *more])


def compare(job, ranks, slots, more):
    """Against PyTorch on one device, with the whole batch at once."""
    single = job.run_with_variables(PEER + devices(1), 1)
    require_trained(job, single)
    result = hybrid(job, ranks, slots, more)
    pipelines = ranks // 2 if "ranks" in more else ranks
    split = [len(piece) for piece in torch.arange(ROWS).tensor_split(pipelines)]
    if result[1]["split"] != split:
        sys.exit(f"FAIL: {ranks} ranks split {ROWS} rows as {result[1]['split']}, not {split}")
    check(f"{ranks} ranks, {' '.join(more)} against PyTorch on one device", result, single)


def main():
    case = sys.argv[2]
    in_stages = ["--stages", "2", "--micro-batches", "3"]
    with tempfile.TemporaryDirectory() as folder:
        if case == "mlp":
            compare(Job(folder, ROWS, MLP), 2, 4, in_stages)
        elif case == "transformer":
            compare(Job(folder, ROWS, TRANSFORMER), 2, 4, [*in_stages, "--schedule", "zero-bubble"])
        elif case == "ranks":
            compare(Job(folder, ROWS, MLP), 4, 4, [*in_stages, "--place", "ranks", "--schedule", "gpipe"])
        else:
            sys.exit(f"FAIL: there is no case {case}")


main()
