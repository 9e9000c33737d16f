"""The signal by which a scheduler asks a job to end."""

import re
import signal
import time

from . import jobs
from .checkpoints import good_steps
from .rows import row


@row(6, "preemption signal in training, evaluation, warm-up", "all ranks stop after the same step, saved; exit 75")
def preempted(bench, found):
    phases = ("warm-up", "evaluation", "training")
    lost, stopped_ms = [], []
    for turn in range(bench.times(2, 1)):
        for phase in phases:
            for sent in (signal.SIGTERM, signal.SIGUSR1):
                with jobs.Scratch() as scratch, bench.run(2, "--ranks", "all",
                                                        bench.program("bench_faults"), "preempt", scratch.file("run"),
                                                        "100000") as job:
                    begun = 2 if phase == "warm-up" else 2 + 2 * turn  # on two ranks; there is one warm-up
                    job.wait_for(lambda: job.output.count(f"begins {phase}") >= begun, f"no {phase}")
                    time.sleep(0.1)
                    begin = time.monotonic()
                    job.process.send_signal(sent)
                    code = job.wait(60)
                    steps = [int(step) for step in re.findall(r"stopped after step (\d+)", job.output)]
                    found.check(code == 75, f"{phase}, {sent.name}: exit code {code}: {job.errors[-500:]}")
                    same = len(steps) == 2 and steps[0] == steps[1]
                    found.check(same, f"{phase}, {sent.name}: ranks stopped after steps {steps}")
                    saved = (good_steps(bench, scratch.file("run")) or [-1])[-1]
                    if same:
                        lost.append(steps[0] - saved)
                        stopped_ms.append((job.ended - begin) * 1e3)
                    found.check_nothing_left(job)
                found.repetitions += 1
    found.check(lost and not any(lost), f"steps lost: {lost}")
    found.numbers["lost"] = lost
    found.figures = [
        f"steps lost {sum(lost)}", f"exit 75 after {found.measured('stopped_ms', stopped_ms)}",
        f"same step on both ranks {len(lost)} of {found.repetitions}"
    ]
    bench.leave_out_peers(found, "saving is the program's own work")
