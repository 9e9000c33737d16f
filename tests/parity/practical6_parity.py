"""practical6_ddp with N ranks, from the same weights and on the same rows, must end with the weights and losses of
practical5_single and of PyTorch's DistributedDataParallel; and it must start in every way that is promised.

usage: practical6_parity.py BIN_FOLDER CASE
CASE: even, uneven, adamw, transformer, repeat, variables, alone, mpirun or peer.
Exits with 77 (skipped) where this Python has no torch, or for mpirun where that is not installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile

from oracle import torch
from course_job import MLP, PEER, TRANSFORMER, Job, check, require_trained

BIN = sys.argv[1]
PROGRAM = os.path.join(BIN, "practical6_ddp")


def under_lockstep(ranks, program=(PROGRAM,)):
    return [os.path.join(BIN, "lockstep"), "run", "--quiet", "-n", str(ranks), *program]


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
    os.environ["LSAN_OPTIONS"] = "detect_leaks=0"  # Open MPI leaks, in plugins that are gone when leaks are found
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    reference = job.run(under_lockstep(3))
    check("under mpirun", job.run([*command, PROGRAM]), reference)
    if not os.path.exists(os.path.join(BIN, "..", "lib", "lockstep", "lockstep-mpi.so")):
        print("note: this lockstep was built without MPI (apt-get install libopenmpi-dev)")
        return
    same_bits("over MPI", job.run([*command, PROGRAM, "--backend", "mpi"]), reference)
    # As on three hosts of which nobody said where rank 0 is: MPI tells. A token of any length may be set.
    apart = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0", "LOCKSTEP_TOKEN=" + 300 * "x"]
    same_bits("over MPI on three hosts", job.run([*command, *apart, PROGRAM, "--backend", "mpi"]), reference)
    refuse_lockstep_run(job)


def same_bits(what, result, reference):
    """MPI's ranks add in the order of shared memory's."""
    if result[1]["options"]["backend"] != "mpi":
        sys.exit(f"FAIL: {what}: the backend is not MPI")
    different = [name for name, weight in reference[0].items() if not torch.equal(weight, result[0][name])]
    if different or result[1]["world_size"] != reference[1]["world_size"]:
        sys.exit(f"FAIL: {what}: other bits than over shared memory in {different}")
    print(f"ok: {what}: the bits of shared memory")


def refuse_lockstep_run(job):
    """MPI begins only in ranks that MPI started: others are told so, and nothing waits."""
    for words, remedy in (([*under_lockstep(2)[:-1], "--backend", "mpi", PROGRAM], "use mpirun -n N PROGRAM"),
                          ([*under_lockstep(2), "--backend", "mpi"], "start them with mpirun -n N")):
        ended = subprocess.run([*words, "--steps", "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               timeout=120)
        if ended.returncode != 2 or remedy not in ended.stdout:
            sys.exit(f"FAIL: {words} ended with {ended.returncode}:\n{ended.stdout}")
    print("ok: lockstep run refuses MPI and says how to start it")


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
