"""What every row needs: where programs are, how long to measure, the GPU's ceilings, the results so far."""

import contextlib
import os

import common
import workers


class Bench:
    def __init__(self, flags):
        self.flags = flags
        self.dry = flags.dry_run
        self.repetitions = 2 if flags.dry_run else (10 if flags.quick else 14)
        self.precision = "bf16" if flags.dry_run else "fp16"  # of autocast, which has no fp16 on the CPU
        self.device = {"device": "cpu"} if flags.dry_run else {}  # programs choose the GPU by themselves
        self.ceilings = None  # the Worker that measures them
        self.rates = {}  # of measure_ceilings(): copy_gbps and tflops
        self.record = {}  # title: numbers, for --out

    def program(self, name):
        return [os.path.join(self.flags.folder, name)]

    def peer(self, name):
        return [self.flags.python, common.peer(name)]

    def ranks(self, count, command):
        return [*self.program("lockstep"), "run", "--quiet", "-n", str(count), *command]

    @contextlib.contextmanager
    def running(self, cases):
        """{name: (command, settings, ranks)} -> {name: Worker}, all started at once, closed at the end."""
        with contextlib.ExitStack() as stack:
            started = {}
            for name, (command, settings, ranks) in cases.items():
                started[name] = workers.Worker(command, {**self.device, **settings}, ranks)
                stack.callback(started[name].close)
            yield started

    def measure_ceilings(self):
        self.ceilings = workers.Worker(self.peer("ceilings.py"), self.device)
        about = self.ceilings.ready()
        print(f"{about['name']}, PyTorch {about['version']}, {self.repetitions} repetitions in turns"
              f"{', DRY RUN: the numbers mean nothing' if self.dry else ''}")
        for what in ("copy_gbps", "tflops"):
            self.rates[what] = max(self.ceilings.go(5)[what] for _ in range(2))
        print(f"Ceilings: copy {self.rates['copy_gbps']:.0f} GB/s (read and written), fp16 product "
              f"{self.rates['tflops']:.0f} TFLOP/s")
