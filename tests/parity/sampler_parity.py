"""PyTorch is the oracle: lockstep::DistributedSampler must give the indices of
torch.utils.data.DistributedSampler, for data sets larger and smaller than the ranks.

usage: sampler_parity.py SAMPLER_DUMP
Exits with 77 (skipped) where this Python has no torch.
"""

import itertools
import subprocess
import sys

import oracle  # noqa: F401
from torch.utils.data import DistributedSampler


def main():
    cases = [
        (rows, rank, ranks, shuffle, seed, drop_last, epoch)
        for rows in (1, 2, 7, 64, 101, 5000)
        for ranks in (1, 2, 3, 5, 8)
        for rank in range(ranks)
        for shuffle, seed, drop_last, epoch in itertools.product((True, False), (0, 41), (True, False), (0, 1, 7))
    ]
    lines = "".join(" ".join(str(int(value)) for value in case) + "\n" for case in cases)
    out = subprocess.run([sys.argv[1]], input=lines, capture_output=True, text=True, check=True).stdout
    answers = [[int(word) for word in line.split()] for line in out.splitlines()]
    if len(answers) != len(cases):
        sys.exit(f"FAIL: {len(cases)} cases, {len(answers)} answers")
    for (rows, rank, ranks, shuffle, seed, drop_last, epoch), answer in zip(cases, answers):
        oracle = DistributedSampler(range(rows), ranks, rank, shuffle, seed, drop_last)
        oracle.set_epoch(epoch)
        if answer != list(oracle):
            sys.exit(f"FAIL: {rows} rows, rank {rank} of {ranks}, shuffle {shuffle}, seed {seed}, drop_last "
                     f"{drop_last}, epoch {epoch}: {answer[:10]}…, PyTorch's {list(oracle)[:10]}…")
    print(f"ok: {len(cases)} cases")


main()
