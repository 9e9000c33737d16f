"""Saves that are interrupted or that fail, and runs that go on after them."""

import os
import random
import re
import shutil
import subprocess

from . import jobs
from .checkpoints import differences, drafts, good_steps
from .power_loss import survivors_of_each_call
from .rows import NotRun, row


def need_strace():
    if not shutil.which("strace"):
        raise NotRun("strace is not installed")


def inject(what):
    """A prefix for a command whose system calls shall fail."""
    return ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={what}"]


def calls_of(command, first, scratch):
    """Every system call of `command FOLDER 2`: [(name, the how-manieth of this name)]."""
    folder, log = scratch.file("counted"), scratch.file("log")
    shutil.copytree(first, folder)
    subprocess.run(["strace", "-f", "-qq", "-o", log, *command, folder, "2"], check=True)
    with open(log) as file:
        names = [found.group(1) for line in file if (found := re.match(r"\d+\s+(\w+)\(", line))]
    return [(name, names[:index].count(name) + 1) for index, name in enumerate(names) if name != "exit_group"]


@row(15, "crash at every system call of a save; power loss", "the old or the new checkpoint loads")
def crashed_save(bench, found):
    need_strace()
    store = bench.program("bench_store")
    neither, left, crashes = 0, 0, 0
    with jobs.Scratch() as scratch:
        first, folder = scratch.file("first"), scratch.file("crashed")
        subprocess.run([store, "save", first, "1"], check=True)
        calls = calls_of([store, "save"], first, scratch)
        for name, nth in calls[::7 if bench.quick else 1]:
            shutil.copytree(first, folder)
            done = subprocess.run([*inject(f"{name}:signal=KILL:when={nth}"), store, "save", folder, "2"],
                                  capture_output=True)
            crashes += done.returncode != 0
            neither += (good_steps(bench, folder) or [0])[-1] not in (1, 2)
            subprocess.run([store, "save", folder, "3"], check=True)  # the next run cleans up and goes on
            left += len(drafts(folder)) + (good_steps(bench, folder) != [3])
            shutil.rmtree(folder)
        losses = 0
        for survivors in survivors_of_each_call([store, "save"], first, scratch):
            losses += 1
            neither += (good_steps(bench, survivors) or [0])[-1] not in (1, 2)
    found.check(crashes > (10 if bench.quick else 100) and losses > 20,
                f"only {crashes} crashes and {losses} power losses")
    found.check(neither == 0, f"neither loads: {neither} times")
    found.check(left == 0, f"leftovers: {left}")
    found.repetitions = crashes + losses
    found.numbers.update(crashes=crashes, power_losses=losses, neither=neither, leftovers=left)
    found.figures = [
        f"neither loads: {neither} of {crashes} crashes and {losses} power losses",
        f"leftovers after the next save {left}"
    ]
    bench.leave_out_peers(found, "torch.save promises nothing here")


class FullDisk:
    """A small file system that can be filled."""
    def __init__(self, folder):
        self.folder = folder
        os.mkdir(folder)
        jobs.mount_memory(folder, "4m")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        jobs.unmount(self.folder)

    def fill(self):
        with open(os.path.join(self.folder, "filler"), "wb", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass


STEPS = 500


def expect_failed_saves(bench, found, what, job, folder, before):
    """Training went on to its end, which says that saves failed; what was saved before is intact."""
    broken = len(found.broken)
    code = job.wait(240)
    found.check(code not in (0, None), f"{what}: exit code {code}")
    found.check(f"step {STEPS}: loss" in job.output, f"{what}: training did not go on: {job.errors[-800:]}")
    good = good_steps(bench, folder)
    found.check(good and good[-1] >= before, f"{what}: after step {before} was saved, only {good} are good")
    found.check(not good or good[-1] < STEPS, f"{what}: nothing failed")
    found.check("error[LS0033]" in job.errors, f"{what}: not reported: {job.errors[-800:]}")
    found.check_nothing_left(job)
    found.repetitions += 1
    found.numbers.setdefault("codes", []).append(code)
    found.numbers["well"] = found.numbers.get("well", 0) + found.kept(broken)


@row(16, "no space, I/O error, read-only file system while saving",
     "training goes on, previous intact, non-zero at the end")
def failing_saves(bench, found):
    need_strace()
    trainer = bench.program("tutorial_checkpoint")
    for _ in range(bench.times(1, 1)):
        with jobs.Scratch() as scratch, FullDisk(scratch.file("disk")) as disk:
            folder = os.path.join(disk.folder, "run")
            with bench.run(2, trainer, folder, STEPS) as job:
                job.wait_for_step(100)
                before = (good_steps(bench, folder) or [0])[-1]
                disk.fill()
                expect_failed_saves(bench, found, "no space", job, folder, before)
        # Every save is a thread of its own, which calls fsync five times; strace counts by thread. The main thread
        # calls it up to three times, to see whether the folder can be written to.
        for error, call, since in (("EIO", "fsync", 4), ("EROFS", "mkdir", 1), ("EROFS", "renameat2", 1)):
            with jobs.Scratch() as scratch:
                folder = scratch.file("run")
                with bench.run(2, trainer, folder, 10) as job:
                    found.check(job.wait(60) == 0, f"{error} of {call}: no first checkpoint: {job.errors[-500:]}")
                failing = inject(f"{call}:error={error}:when={since}+")
                with bench.run(2, *failing, trainer, folder, STEPS) as job:
                    expect_failed_saves(bench, found, f"{error} of {call}", job, folder, 10)
    found.figures = [
        f"training went on and earlier checkpoints are good {found.numbers['well']} of {found.repetitions}",
        f"exit {', '.join(sorted({str(code) for code in found.numbers['codes']}))}"
    ]
    bench.leave_out_peers(found, "going on is the program's own work")


SMALL = ["--batch", "16", "--dim", "32", "--hidden", "32", "--seed", "3"]
RESUMED_STEPS = 200
TRAININGS = {  # program and flags, on two ranks
    "DDP": ["practical6_ddp", *SMALL, "--optimizer", "adamw"],
    "pipeline": ["practical10_hybrid", *SMALL, "--place", "ranks", "--stages", "2", "--optimizer", "adamw"],
    "accumulation with AMP": ["homework2_combined", *SMALL, "--accum-steps", "2", "--amp", "bf16"],
}


@row(18, "kill at a random step and resume", "bit-identical weights")
def resumed(bench, found):
    chance = random.Random(18)
    kills, same = 0, 0
    for name, (program, *flags) in TRAININGS.items():
        with jobs.Scratch() as scratch:

            def start(run, *words):
                return bench.run(2, *words, bench.program(program), "--steps", RESUMED_STEPS, *flags, "--checkpoint",
                                 scratch.file(run), "--checkpoint-every", "10", "--save",
                                 scratch.file(f"{run}.safetensors"))

            with start("whole") as job:
                code = job.wait(300)
                found.check(code == 0, f"{name}: exit code {code}: {job.errors[-800:]}")
            for turn in range(bench.times(10, 1)):
                run = f"killed{turn}"
                for step in sorted(chance.sample(range(15, RESUMED_STEPS), 2)):
                    with start(run, "--inject", f"kill@rank={chance.randrange(2)},step={step}") as job:
                        code = job.wait(300)
                        found.check(code == 137, f"{name}: exit code {code} after the kill: {job.errors[-800:]}")
                        found.check_nothing_left(job)
                    kills += 1
                with start(run) as job:
                    code = job.wait(300)
                    found.check(code == 0, f"{name}: exit code {code}: {job.errors[-800:]}")
                    found.check_nothing_left(job)
                weights = [jobs.read(scratch.file(f"{each}.safetensors")) for each in ("whole", run)]
                differ = differences(bench, scratch.file("whole"), scratch.file(run))
                found.check(weights[0] and weights[0] == weights[1], f"{name}: other weights")
                found.check(not differ, f"{name}: differences in the last checkpoint: {differ}")
                same += weights[0] == weights[1] and not differ
                found.repetitions += 1
    found.numbers.update(kills=kills, same=same)
    found.figures = [f"bit-identical {same} of {found.repetitions} runs with {kills} kills ({', '.join(TRAININGS)})"]
    bench.leave_out_peers(found, "resuming is the program's own work")
