"""Processes that end: ranks, launchers, descendants, by signals, exit codes and the kernel."""

import os
import random
import signal
import time

from . import jobs
from .peers import outcome, survivors
from .rows import NotRun, row

LINES_MOST = 16  # a start line, and a report of at most 15


def kill_a_rank(bench, found, program, come_to_training, size, victim, pause_s):
    """One SIGKILL in mid-training. Returns (milliseconds to the launcher's exit, whether the right rank was named)."""
    with bench.run(size, *program) as job:
        come_to_training(job)
        time.sleep(pause_s)
        pid = job.ranks()[victim]
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        code = job.wait(60)
        if not found.check(code is not None, "the launcher did not end"):
            return 60e3, False
        took_ms = (job.ended - begin) * 1e3
        right = f"rank {victim} was killed by signal 9" in job.errors
        found.check(right, f"rank {victim} was killed, but the report is: {job.errors[-500:]}")
        found.check(code == 137, f"exit code {code}")
        found.check_nothing_left(job)
        return took_ms, right


@row(1, "SIGKILL a rank in an all-reduce", "named, exit 137")
def killed_rank(bench, found):
    sizes = (2, 3, 4)
    chance = random.Random(1)
    times, right = {"all-reduces": [], "training": []}, 0
    with jobs.Scratch() as scratch:
        for turn in range(bench.times(100, 6)):
            path = scratch.file(f"pids{turn}")
            size = sizes[turn % len(sizes)]
            took, named = kill_a_rank(
                bench, found,
                ["--timeout", "30", bench.program("launch_worker"), f"all-reduce:{path}"],
                lambda job: job.wait_for_lines(path, size), size, turn // 3 % size, chance.uniform(0, 0.05))
            times["all-reduces"].append(took)
            right += named
    for turn in range(bench.times(12, 2)):
        size = sizes[turn % len(sizes)]
        took, named = kill_a_rank(bench, found, [bench.program("practical6_ddp"), "--steps", "1000000"],
                                  lambda job: job.wait_for_step(20), size, turn // 3 % size, chance.uniform(0, 0.1))
        times["training"].append(took)
        right += named
    found.repetitions = sum(len(values) for values in times.values())
    found.figures = [
        f"exit after {found.measured('all_reduce_ms', times['all-reduces'])}",
        f"practical6_ddp {found.measured('training_ms', times['training'])}",
        f"right blame {right} of {found.repetitions}"
    ]
    found.numbers["right"] = right

    def try_peer(peer):
        with jobs.Scratch() as scratch, peer.torchrun("rendezvous", f"all-reduce:{scratch.file('pids')}") as job:
            job.wait_for_lines(scratch.file("pids"), 2)
            time.sleep(0.3)
            begin = time.monotonic()
            os.kill(job.ranks()[1], signal.SIGKILL)
            said = outcome(job, 60, begin)
            return said + ("" if "Signal 9 (SIGKILL)" in job.errors else ", signal not named")

    bench.compare(found, try_peer)


@row(2, "SIGKILL the launcher", "everything dies")
def killed_launcher(bench, found):
    gone_ms = []
    for _ in range(bench.times(20, 3)):
        with jobs.Scratch() as scratch, bench.run(2, bench.program("launch_worker"), "ignore-term",
                                                f"1:descendants:{scratch.file('more')}", f"pid:{scratch.file('ready')}",
                                                "loop") as job:
            job.wait_for_lines(scratch.file("more"), 2)
            job.wait_for_lines(scratch.file("ready"), 2)
            begin = time.monotonic()
            os.kill(job.pid, signal.SIGKILL)
            job.wait(10)
            jobs.wait_until(lambda: not job.processes(), 10)
            gone_ms.append((time.monotonic() - begin) * 1e3)
            found.check_nothing_left(job)
    found.repetitions = len(gone_ms)
    found.figures = [f"2 ranks and 2 descendants that ignore SIGTERM gone after {found.measured('gone_ms', gone_ms)}"]

    def try_peer(peer):
        with jobs.Scratch() as scratch, peer.torchrun(f"pid:{scratch.file('ready')}", "loop") as job:
            pids = job.wait_for_lines(scratch.file("ready"), 2)
            os.kill(job.pid, signal.SIGKILL)
            job.wait(10)
            jobs.wait_until(lambda: not survivors(pids), 10)
            return f"{survivors(pids)} of 2 workers orphaned"

    bench.compare(found, try_peer)


@row(5, "workers ignore SIGTERM", "SIGKILL at the end of the grace period")
def deaf_workers(bench, found):
    grace_s = 1.0
    late_ms = []
    for _ in range(bench.times(5, 2)):
        with bench.run(3, "--grace", grace_s, bench.program("launch_worker"), "ignore-term", "1:sleep:0.2", "1:exit:3",
                       "sleep:100") as job:
            code = job.wait(30)
            found.check(code == 3, f"exit code {code}")
            if code is not None:
                late_ms.append((job.ended - job.begun - 0.2 - grace_s) * 1e3)
            found.check_nothing_left(job)
    found.repetitions = len(late_ms)
    found.check(max(late_ms) < 1000, "a second later than the grace period")
    found.figures = [
        f"ended {found.measured('late_ms', late_ms)} after a grace period of {grace_s:g} s, start included"
    ]

    def try_peer(peer):
        with peer.torchrun("ignore-term", "1:sleep:1", "1:exit:3", "sleep:100") as job:
            return outcome(job, 60)

    bench.compare(found, try_peer)


@row(7, "exit 3, exception, segmentation fault, abort", "code kept, at most 15 lines")
def bad_ends(bench, found):
    ends = {
        "exit:3": (3, "ended with exit code 3"),
        "throw:too-wide": (1, "threw std::runtime_error: too-wide"),
        "segfault": (139, "killed by signal 11"),
        "abort": (134, "killed by signal 6")
    }
    codes, lines = [], []
    for _ in range(bench.times(3, 1)):
        for action, (expected, words) in ends.items():
            with bench.run(3, bench.program("launch_worker"), f"1:{action}", "sleep:100") as job:
                code = job.wait(30)
                found.check(code == expected, f"{action}: exit code {code}")
                found.check("rank 1" in job.errors and words in job.errors, f"{action}: {job.errors[-500:]}")
                found.check(job.printed <= LINES_MOST, f"{action}: {job.printed} lines")
                found.check_nothing_left(job)
                codes.append(code)
                lines.append(job.printed)
    found.repetitions = len(codes)
    found.numbers.update(codes=codes, lines=lines)
    found.figures = [
        f"exit {', '.join(str(code) for code in codes[:len(ends)])}",
        f"{min(lines)} to {max(lines)} lines with the start line"
    ]

    def try_peer(peer):
        said = []
        for action in ends:
            with peer.torchrun(f"1:{action}", "sleep:100") as job:
                code = job.wait(60)
                said.append((code, job.printed))
        codes, lines = zip(*said)
        return f"exit {', '.join(str(code) for code in codes)}; {min(lines)} to {max(lines)} lines"

    bench.compare(found, try_peer)


@row(8, "a worker with grandchildren dies", "survivors 0")
def grandchildren(bench, found):
    ends = ("kill:9", "exit:0", "exit:3")
    survived = 0
    for _ in range(bench.times(5, 1)):
        for end in ends:
            with jobs.Scratch() as scratch, bench.run(2, bench.program("launch_worker"),
                                                    f"1:descendants:{scratch.file('more')}", f"1:{end}",
                                                    *([] if end == "exit:0" else ["sleep:100"])) as job:
                code = job.wait(30)
                pids = [int(word) for word in jobs.read(scratch.file("more")).split()]
                found.check(len(pids) == 2 and code is not None, f"{end}: {job.errors[-500:]}")
                jobs.wait_until(lambda: not survivors(pids), 1)
                survived += survivors(pids)
                found.check_nothing_left(job)
                found.repetitions += 1
    found.check(survived == 0, f"{survived} descendants survived")
    found.numbers["survivors"] = survived
    found.figures = [f"survivors {survived} of {2 * found.repetitions}, half of them in sessions of their own"]

    def try_peer(peer):
        with jobs.Scratch() as scratch, peer.torchrun(f"1:descendants:{scratch.file('more')}", "1:kill:9",
                                                    "sleep:100") as job:
            said = outcome(job, 60)
            time.sleep(1)
            pids = [int(word) for word in jobs.read(scratch.file("more")).split()]
            return f"{survivors(pids)} of {len(pids)} survive; {said}"

    bench.compare(found, try_peer)


class MemoryLimit:
    """A cgroup with a limit; a command can be started in it."""
    def __init__(self, size_bytes):
        lines = jobs.read("/proc/self/cgroup").decode().splitlines()
        fields = [line.split(":", 2) for line in lines]
        version_1 = [path for _, kind, path in fields if kind == "memory"]
        root = "/sys/fs/cgroup/memory" + version_1[0] if version_1 else "/sys/fs/cgroup" + fields[-1][2]
        self.folder = os.path.join(root, f"lockstep-fault-{os.getpid()}")
        limit = "memory.limit_in_bytes" if version_1 else "memory.max"
        try:
            os.makedirs(self.folder)
            with open(os.path.join(self.folder, limit), "w") as file:
                file.write(str(size_bytes))
        except OSError as error:
            raise NotRun(f"no cgroup with a limit of memory: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        jobs.wait_until(lambda: not jobs.read(os.path.join(self.folder, "cgroup.procs")), 5)
        os.rmdir(self.folder)

    def inside(self, command):
        return ["sh", "-c", f"echo $$ > {self.folder}/cgroup.procs && exec \"$@\"", "sh", *command]


@row(9, "out-of-memory kill", "classified as such, exit 137")
def out_of_memory(bench, found):
    eater = ("import os, time\nkept = []\n"
             "while os.environ['RANK'] == '1': kept.append(bytearray(b'x') * (1 << 20))\ntime.sleep(60)")
    python = bench.peers[0].python if bench.peers else "python3"
    told = 0
    for _ in range(bench.times(3, 1)):
        with MemoryLimit(256 << 20) as limit:
            with jobs.Job(
                    limit.inside([bench.program("lockstep"), "run", "-n", "2", "--no-python", python, "-c",
                                  eater])) as job:
                code = job.wait(60)
                classified = "rank 1 was killed by the system (signal 9): out of memory" in job.errors
                found.check(classified, f"not classified: {job.errors[-500:]}")
                found.check(code == 137, f"exit code {code}")
                told += classified
                found.check_nothing_left(job)
        found.repetitions += 1
    found.numbers["classified"] = told
    found.figures = [f"classified {told} of {found.repetitions}, exit 137"]

    def try_peer(peer):
        with MemoryLimit(1 << 30) as limit:
            with peer.torchrun("exit:0"):
                pass
            with jobs.Job(limit.inside(peer.command(2, ("--standalone", ), ["1:eat", "sleep:100"])),
                          {"OMP_NUM_THREADS": "1"}) as job:
                said = outcome(job, 90)
                return said + ("" if "out of memory" in job.errors.lower() or "oom" in job.errors.lower() else
                               ", memory not mentioned")

    bench.compare(found, try_peer)
