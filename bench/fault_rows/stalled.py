"""Ranks that do not come, or come late."""

import os
import re
import signal
import time

from . import jobs
from .peers import outcome
from .rows import row

TIMEOUT_S = 2.0
LATE_MOST_MS = 1500  # stacks of all ranks are taken, ranks are ended, logs are written


def expect_named(found, job, begin, rank, operation):
    """Waits for the end of a job whose rank does not come. Returns milliseconds past the deadline."""
    code = job.wait(30)
    if not found.check(code is not None, "a hang"):
        return 30e3
    late_ms = (job.ended - begin - TIMEOUT_S) * 1e3
    errors = job.errors
    found.check(code == 1, f"exit code {code}")
    found.check(re.search(rf"\nerror\[LS0021\]: rank {rank} (is stopped|did not come)", "\n" + errors),
                f"rank {rank} is not named: {errors[-800:]}")
    found.check(re.search(r"\nnote: it was at step \d+", errors), f"no step: {errors[-800:]}")
    found.check(f"{operation} #" in errors, f"no operation: {errors[-800:]}")
    found.check(late_ms < LATE_MOST_MS, f"{late_ms:.0f} ms past the deadline")
    found.check_nothing_left(job)
    return late_ms


@row(3, "SIGSTOP a rank", "named with step and operation at the deadline")
def stopped_rank(bench, found):
    late = {"all-reduces": [], "training": []}
    flags = ["--timeout", TIMEOUT_S]
    for turn in range(bench.times(10, 2)):
        with jobs.Scratch() as scratch, bench.run(3, *flags, bench.program("launch_worker"),
                                                f"all-reduce:{scratch.file('pids')}") as job:
            job.wait_for_lines(scratch.file("pids"), 3)
            time.sleep(0.05 + 0.007 * turn)
            begin = time.monotonic()
            os.kill(job.ranks()[turn % 3], signal.SIGSTOP)
            late["all-reduces"].append(expect_named(found, job, begin, turn % 3, "all_reduce"))
    for turn in range(bench.times(4, 1)):
        with bench.run(2, *flags, bench.program("practical6_ddp"), "--steps", "1000000", "--dim", "256", "--hidden",
                       "256") as job:
            job.wait_for_step(20)
            begin = time.monotonic()
            os.kill(job.ranks()[turn % 2], signal.SIGSTOP)
            late["training"].append(expect_named(found, job, begin, turn % 2, "all_reduce"))
    found.repetitions = sum(len(values) for values in late.values())
    found.figures = [
        f"ended {found.measured('late_ms', late['all-reduces'])} past a deadline of {TIMEOUT_S:g} s",
        f"practical6_ddp {found.measured('training_late_ms', late['training'])}",
        f"named {found.repetitions - len(found.broken)} of {found.repetitions}"
    ]

    def try_peer(peer):
        with jobs.Scratch() as scratch, peer.ranks(f"rendezvous:{TIMEOUT_S}", f"all-reduce:{scratch.file('pids')}") as job:
            job.wait_for_lines(scratch.file("pids"), 2)
            time.sleep(0.3)
            begin = time.monotonic()
            os.kill(job.ranks()[1], signal.SIGSTOP)
            said = outcome(job, 90, begin)
            return f"timeout {TIMEOUT_S:g} s: {said}{is_named(job, 1)}"

    bench.compare(found, try_peer)


def is_named(job, rank):
    """Whether a peer's output says which rank did not come."""
    return "" if re.search(rf"rank {rank} (is|was|did|stopped|absent|not)", job.errors,
                           re.I) else ", the rank is not named"


@row(4, "a rank loops outside any collective", "named with step and operation at the deadline")
def looping_rank(bench, found):
    late = []
    for turn in range(bench.times(6, 1)):
        with bench.run(3, "--timeout", TIMEOUT_S, bench.program("launch_worker"), "rendezvous", "barrier", f"{turn % 3}:loop",
                       "reduce") as job:
            late.append(expect_named(found, job, job.begun, turn % 3, "all_reduce"))
    found.repetitions = len(late)
    found.figures = [f"ended {found.measured('late_ms', late)} past a deadline of {TIMEOUT_S:g} s, start included"]

    def try_peer(peer):
        with peer.ranks(f"rendezvous:{TIMEOUT_S}", "barrier", "1:loop", "reduce") as job:
            return f"timeout {TIMEOUT_S:g} s: {outcome(job, 90)}{is_named(job, 1)}"

    bench.compare(found, try_peer)


@row(13, "a straggler", "named, with its ratio")
def straggler(bench, found):
    ratios = []
    for turn in range(bench.times(3, 1)):
        slow = turn % 2
        with bench.run(2, "--inject", f"slow@rank={slow},step=1,ms=40", bench.program("practical6_ddp"), "--steps",
                       "200", "--dim", "256", "--hidden", "256", "--batch", "256") as job:
            code = job.wait(120)
            said = re.search(r"rank (\d+) is slow: .* ([\d.]+) times the median", job.errors)
            named = said is not None and int(said.group(1)) == slow
            found.check(code == 0, f"exit code {code}: {job.errors[-500:]}")
            found.check(named, f"rank {slow} is not named: {job.errors[-500:]}")
            if named:
                ratios.append(float(said.group(2)))
            found.check_nothing_left(job)
        found.repetitions += 1
    found.numbers["ratios"] = ratios
    found.figures = [
        f"named {len(ratios)} of {found.repetitions} while it ran",
        f"ratio {', '.join(f'{ratio:g}' for ratio in ratios)}"
    ]
    bench.leave_out_peers(found, "torchrun reports no stragglers")
