"""Jobs that cannot start as they were asked to: shared memory, flags, files, hosts, ports; and a NaN on one rank."""

import os
import re

from . import jobs
from .peers import outcome
from .rows import row

SMALL = ["--batch", "16", "--dim", "32", "--hidden", "32"]


class SharedMemory:
    """Another /dev/shm."""
    def __init__(self, size, full=False):
        jobs.mount_memory(jobs.SHM, size)
        self.filler = os.path.join(jobs.SHM, "filler")
        if full:
            with open(self.filler, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        jobs.unmount(jobs.SHM)

    def drain(self):
        if os.path.exists(self.filler):
            os.remove(self.filler)


@row(14, "tiny or full shared memory", "start-up error with need, have and remedy; SIGBUS 0")
def little_shared_memory(bench, found):
    codes, told, plenty = [], 0, []
    for _ in range(bench.times(2, 1)):
        for what, size, full in (("tiny", "4k", False), ("full", "1m", True)):
            with SharedMemory(size, full) as memory, bench.run(2, bench.program("practical6_ddp"), "--steps", "3",
                                                               *SMALL) as job:
                broken = len(found.broken)
                code = job.wait(60)
                errors = job.errors
                found.check(code == 2, f"{what}: exit code {code}: {errors[-500:]}")
                found.check("need " in errors and "have " in errors and "help: " in errors and "--shm-size" in errors,
                            f"{what}: {errors[-500:]}")
                found.check(not job.output, f"{what}: something was started: {job.output[-300:]}")
                told += found.kept(broken)
                memory.drain()
                found.check_nothing_left(job)
                codes.append(code)
            found.repetitions += 1
        # What ranks exchange is not in /dev/shm: as much as containers have by default is plenty.
        with SharedMemory("64m"), bench.run(2, bench.program("practical6_ddp"), "--steps", "3") as job:
            code = job.wait(60)
            plenty.append(code)
            found.check(code == 0, f"64 MiB: exit code {code}: {job.errors[-500:]}")
            found.check_nothing_left(job)
        found.repetitions += 1
    found.check(135 not in codes, "SIGBUS")
    found.numbers["codes"] = codes
    found.figures = [
        f"need, have and remedy named, nothing started {told} of {len(codes)}",
        f"exit {', '.join(sorted({str(code) for code in codes}))}", f"SIGBUS {codes.count(135)}",
        f"with 64 MiB exit {', '.join(sorted({str(code) for code in plenty}))}"
    ]

    def try_peer(peer):
        with SharedMemory("64k"), peer.torchrun("load-data", ranks=1) as job:
            said = outcome(job, 60)
            return f"DataLoader with a worker: {'SIGBUS, ' if 'bus error' in job.errors.lower() else ''}{said}"

    bench.compare(found, try_peer)


def bad_requests(bench, scratch):
    """{what: words of `lockstep run`}; worker is started by none of them."""
    with open(scratch.file("plain"), "w") as file:
        file.write("no program\n")
    worker = [bench.program("launch_worker"), f"pid:{scratch.file('started')}"]
    hosts = ["--nnodes", "2", "--node-rank", "1", "--rdzv-conf", "join_timeout=3"]
    return {
        "unknown flag": ["--nproc-per-nod", "2", *worker],
        "no number": ["-n", "many", *worker],
        "too many ranks": ["-n", "1000000000", *worker],
        "missing value": ["--grace"],
        "no program": ["-n", "2"],
        "missing program": ["-n", "2", scratch.file("nothing")],
        "not executable": ["-n", "2", scratch.file("plain")],
        "a folder": ["-n", "2", scratch.name],
        "unknown fault": ["--inject", "explode@rank=0,step=1", *worker],
        "fault in no rank": ["-n", "2", "--inject", "kill@rank=7,step=1", *worker],
        "log folder": ["--log-dir", "/proc/nowhere", *worker],
        "unknown host": [*hosts, "--rdzv-endpoint", "no-such-host.invalid:29400", *worker],
        "bad port": [*hosts, "--rdzv-endpoint", "127.0.0.1:99999", *worker],
        "nobody listens": [*hosts, "--rdzv-endpoint", "127.0.0.1:1", *worker],
        "unknown backend": ["--backend", "carrier-pigeon", *worker],
    }


def try_bad_requests(bench, found):
    lines, took_ms, refused = [], [], 0
    with jobs.Scratch() as scratch:
        for what, words in bad_requests(bench, scratch).items():
            with jobs.Job([bench.program("lockstep"), "run", *words],
                          {"LOCKSTEP_TOKEN": "0123456789abcdef" * 4}) as job:
                broken = len(found.broken)
                code = job.wait(30)
                found.check(code == 2, f"{what}: exit code {code}: {job.errors[-300:]}")
                found.check("error[LS" in job.errors and "help: " in job.errors,
                            f"{what}: no hint: {job.errors[-300:]}")
                found.check(not os.path.exists(scratch.file("started")), f"{what}: a rank was started")
                found.check_nothing_left(job)
                lines.append(job.printed)
                refused += found.kept(broken)
                if code is not None:
                    took_ms.append((job.ended - job.begun) * 1e3)
            found.repetitions += 1
    found.figures.append(f"exit 2 with a hint, nothing started {refused} of {len(lines)} bad requests, "
                         f"{min(lines)} to {max(lines)} lines, {found.measured('refusal_ms', took_ms)}")


def try_two_jobs(bench, found):
    """At once, over a network backend with its ports, and with one folder of checkpoints."""
    broken = len(found.broken)
    words = [2, "--backend", "gloo", bench.program("practical6_ddp"), "--steps", "20", *SMALL]
    with bench.run(*words) as first, bench.run(*words) as second:
        codes = [job.wait(90) for job in (first, second)]
        found.check(codes == [0, 0], f"two jobs at once: {codes}: {first.errors[-300:]}{second.errors[-300:]}")
        found.check_nothing_left(first)
        found.check_nothing_left(second)
    with jobs.Scratch() as scratch:
        saving = [2, bench.program("tutorial_checkpoint"), scratch.file("run")]
        with bench.run(*saving, "100000000") as first:
            first.wait_for_step(20)
            with bench.run(*saving, "100000000") as second:
                code = second.wait(60)
                found.check(code == 2 and "is in use" in second.errors,
                            f"two jobs, one folder: exit code {code}: {second.errors[-300:]}")
            found.check(first.process.poll() is None, f"the first job was disturbed: {first.errors[-300:]}")
    found.repetitions += 2
    if found.kept(broken):
        found.figures.append("two jobs at once: both end well; with one folder of checkpoints the second is refused")


def try_nan(bench, found):
    """The job stops in that step and names the rank, or all ranks skip the step together."""
    broken = len(found.broken)
    ddp = [bench.program("practical6_ddp"), "--steps", "20", *SMALL, "--nonfinite", "stop"]
    for rank in (0, 1):
        with bench.run(2, "--ranks", "all", "--inject", f"nan@rank={rank},step=5", *ddp) as job:
            code = job.wait(60)
            told = re.search(rf"rank {rank}, step 5: the gradient of \S+ is not finite", job.errors)
            found.check(code not in (0, None) and "LS0032" in job.errors and told,
                        f"NaN: exit code {code}: {job.errors[-500:]}")
            found.check_nothing_left(job)
        found.repetitions += 1
    with bench.run(2, "--ranks", "all", bench.program("practical7_amp"), "--steps", "10", *SMALL, "--overflow-at", "5",
                   "--check-replicas", "1") as job:
        code = job.wait(60)
        found.check(code == 0 and "step 5 skipped" in job.output + job.errors,
                    f"skipped step: exit code {code}: {job.errors[-500:]}")
        found.check_nothing_left(job)
    found.repetitions += 1
    if found.kept(broken):
        found.figures.append("NaN: the job stops in that step, rank named; with GradScaler all skip it, replicas equal")


@row(20, "bad flags, files, hosts, ports; two jobs at once; a NaN on one rank",
     "hint, exit 2, nothing started; stops or skips together")
def bad_requests_and_nan(bench, found):
    try_bad_requests(bench, found)
    try_two_jobs(bench, found)
    try_nan(bench, found)

    def try_peer(peer):
        said = []
        with peer.torchrun("exit:0", flags=("--standalone", "--nproc-per-nod", "2", "--bogus")) as job:
            said.append(f"unknown flag: {outcome(job, 60)}")
        with peer.torchrun("exit:0",
                           flags=("--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid",
                                  "--master-port", "29481")) as job:
            said.append(f"unknown host: {outcome(job, 90)}")
        with peer.torchrun("rendezvous:30", "barrier", "sleep:3", flags=()) as first, peer.torchrun("rendezvous:30",
                                                                                              "barrier",
                                                                                              "sleep:3",
                                                                                              flags=()) as second:
            said.append(f"two jobs at once: exits {first.wait(90)} and {second.wait(90)}")
        return "; ".join(said)

    bench.compare(found, try_peer)
