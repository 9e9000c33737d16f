"""Every example on the GPU: the CPU's loss curve and weights in fp32, PyTorch's in AMP, from the same weights and
rows, captured and not captured; ranks that share the GPU, through ipc and NCCL, against one rank; the same run twice,
bit by bit.

usage: gpu_parity.py BIN_FOLDER [--jobs N] [--cpu] [CASE ...]
CASE: fp32, amp, ranks, nccl or repeat, or how the names of some lines begin; without any, all.
One line for each comparison: what, the largest deviation, what is allowed, ok or FAILED. Exits with 1 where one
failed, and with 77 (skipped) where there is no GPU or this Python has no torch. --cpu tries the script on the CPU.
"""

import argparse
import concurrent.futures
import itertools
import math
import os
import subprocess
import sys
import tempfile

from oracle import torch
from course_job import MLP, PEER, TRANSFORMER, Job

ROWS = 60
# A weight may differ by rtol of itself plus atol; a loss by a tenth of rtol. The tolerances are what another order of
# additions does to fp32 in 20 steps, and what a rounding to bf16 or fp16 in the other direction does.
TOLERANCE = {"fp32": (1e-4, 2e-6), "bf16": (2e-2, 2e-3), "fp16": (3e-3, 3e-4)}
CAPTURED = ("practical5_single", "practical6_ddp", "practical7_accumulation", "practical7_amp", "homework2_combined")
# Flags that make a program train as one process does on ROWS rows, and the devices as which it shares the GPU.
PROGRAMS = {
    "practical5_single": ({}, 1),
    "practical5_dp": ({}, 2),
    "practical6_ddp": ({}, 1),
    "practical7_accumulation": ({"--accum-steps": 4}, 1),
    "practical7_amp": ({"--amp": "off"}, 1),
    "homework2_combined": ({"--amp": "off", "--accum-steps": 4}, 1),
    "practical10_hybrid": ({"--stages": 2, "--micro-batches": 3}, 2),
}


class Broken(Exception):
    """A run that failed, or did not do what it was asked for."""


class Parity:
    def __init__(self, flags):
        self.folder = flags.folder
        self.on_gpu = not flags.cpu
        self.cases = []  # (name, function that gives deviation and tolerance)

    def program(self, name):
        return os.path.join(self.folder, name)

    def devices(self, count, gpu=True):
        if gpu and self.on_gpu:
            return ["--devices", f"cuda:0*{count}" if count > 1 else "cuda:0"]
        return ["--devices", f"cpu:{count}"]

    def capture(self, wanted):
        """--capture on if there is something to capture."""
        return ["--capture", "on" if wanted else "off"] if self.on_gpu else []

    def add(self, name, function):
        self.cases.append((name, function))


def new_job(folder, flags):
    """In a folder of its own, so that jobs can run side by side. Rows of one optimizer step stay the same."""
    flags = dict(flags)
    model = flags.pop("--shapes", MLP)
    own = tempfile.mkdtemp(dir=folder)
    return Job(own, ROWS // flags.get("--accum-steps", 1), {**model, **flags})


def train(job, command, captured=None, backend=None, amp=None):
    try:
        weights, record = job.run(command)
    except subprocess.CalledProcessError as error:
        words = " ".join(os.path.basename(word) for word in command[:6])
        raise Broken(f"{words} ended with {error.returncode}") from None
    if captured is not None and (record.get("capture") or {}).get("captured", False) != captured:
        raise Broken(f"captured is not {captured}: {record.get('capture')}")
    if backend is not None and record.get("backend", backend) != backend:
        raise Broken(f"ran with backend {record['backend']}, not {backend}")
    if amp is not None and record.get("amp") != amp:
        raise Broken(f"ran in {record.get('amp')}, not {amp}")
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in record["losses"]):
        raise Broken(f"losses are not finite: {record['losses']}")
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        raise Broken("weights are not finite")
    if all(torch.equal(weights[name], tensor) for name, tensor in job.initial.items()):
        raise Broken("no weight has changed")
    return weights, record["losses"]


def deviation(result, expected, precision):
    """The largest, as a share of what may be: (|a - b| / (|b| + atol / rtol), rtol), losses ten times as strict."""
    (weights, losses), (wanted_weights, wanted_losses) = result, expected
    rtol, atol = TOLERANCE[precision]
    if set(weights) != set(wanted_weights) or len(losses) != len(wanted_losses):
        raise Broken("other tensors, or another number of steps")
    worst = 0.0
    for name, wanted in wanted_weights.items():
        worst = max(worst, ((weights[name] - wanted).abs() / (wanted.abs() + atol / rtol)).max().item())
    for loss, wanted in zip(losses, wanted_losses):
        worst = max(worst, 10 * abs(loss - wanted) / max(1.0, abs(wanted)))
    return worst, rtol


def add_fp32(parity, folder):
    """Programs on the GPU against themselves on the CPU."""
    variants = [(name, flags, slots, name) for name, (flags, slots) in PROGRAMS.items()]
    variants.append(("practical6_ddp", {"--shapes": TRANSFORMER}, 1, "practical6_ddp transformer"))
    variants.append(("practical6_ddp", {"--optimizer": "adamw", "--lr": 0.001}, 1, "practical6_ddp adamw"))
    for program, flags, slots, title in variants:
        for captured in (False, True) if program in CAPTURED else (None,):
            def compare(program=program, flags=flags, slots=slots, captured=captured):
                job = new_job(folder, flags)
                # The CPU has as many devices, so that both do the same sums in the same parts.
                reference = train(job, [parity.program(program), *parity.devices(slots, gpu=False)])
                more = [] if captured is None else parity.capture(captured)
                result = train(job, [parity.program(program), *parity.devices(slots), *more],
                               captured if parity.on_gpu else None)
                return deviation(result, reference, "fp32")

            how = {None: "", False: ", not captured", True: ", captured"}[captured]
            parity.add(f"fp32 {title}{how}, GPU against CPU", compare)
        if program in CAPTURED and parity.on_gpu:
            def both(program=program, flags=flags, slots=slots):
                job = new_job(folder, flags)
                results = [train(job, [parity.program(program), *parity.devices(slots), *parity.capture(captured)],
                                 captured) for captured in (True, False)]
                return deviation(*results, "fp32")

            parity.add(f"fp32 {title}, captured against not captured", both)


def add_amp(parity, folder):
    """Mixed precision against PyTorch's on the same device."""
    for program, flags in (("practical7_amp", {}), ("homework2_combined", {"--accum-steps": 4})):
        for precision in ("fp16", "bf16") if parity.on_gpu else ("bf16",):
            for captured in (False, True):
                for masters in (False, True) if parity.on_gpu else (False,):
                    def compare(program=program, flags=flags, precision=precision, captured=captured, masters=masters):
                        job = new_job(folder, {**flags, "--amp": precision})
                        weights, record = job.run_with_variables(PEER + parity.devices(1), 1)
                        command = [parity.program(program), *parity.devices(1), *parity.capture(captured)]
                        result = train(job, command + (["--master-weights"] if masters else []),
                                       captured if parity.on_gpu else None, amp=precision)
                        return deviation(result, (weights, record["losses"]), precision)

                    parity.add(f"amp {program} {precision}{', captured' if captured else ', not captured'}"
                               f"{', master weights' if masters else ''}, against PyTorch", compare)


def rank_command(parity, ranks, program, more, start=()):
    launcher = [os.path.join(parity.folder, "lockstep"), "run", "--quiet", "-n", str(ranks), *start]
    return launcher + [parity.program(program), *parity.devices(ranks), *more]


def add_nccl(parity, folder):
    """Ranks that use NCCL against one rank. NCCL refuses two ranks of one host on one GPU, so each claims to be a host."""
    host = 'NCCL_HOSTID=host$RANK NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo exec "$0" "$@"'
    start = ["--backend", "nccl", "/bin/sh", "-c", host]

    def compare():
        job = new_job(folder, {})
        one = train(job, [parity.program("practical6_ddp"), *parity.devices(1), *parity.capture(False)])
        many = train(job, rank_command(parity, 2, "practical6_ddp", parity.capture(False), start), False, "nccl")
        return deviation(many, one, "fp32")

    if parity.on_gpu:
        parity.add("nccl practical6_ddp fp32, 2 ranks share the GPU, not captured, against one rank", compare)


def add_ranks(parity, folder):
    """Ranks that share the GPU through ipc against one rank; --backend ipc fails if that is impossible."""
    ipc = ["--backend", "ipc"] if parity.on_gpu else []
    cases = [("practical6_ddp", {}, "fp32"), ("practical7_accumulation", {"--accum-steps": 4}, "fp32")]
    if parity.on_gpu:
        cases.append(("homework2_combined", {"--amp": "fp16", "--accum-steps": 2}, "fp16"))
    for program, flags, precision in cases:
        for ranks in (2, 4):
            for captured in (False, True):
                def compare(program=program, flags=flags, precision=precision, ranks=ranks, captured=captured):
                    job = new_job(folder, flags)
                    one = train(job, [parity.program(program), *parity.devices(1), *parity.capture(False)])
                    many = train(job, rank_command(parity, ranks, program, [*parity.capture(captured), *ipc]),
                                 captured if parity.on_gpu else None, "ipc" if parity.on_gpu else None)
                    return deviation(many, one, precision)

                parity.add(f"ranks {program} {precision}, {ranks} ranks share the GPU"
                           f"{', captured' if captured else ', not captured'}, against one rank", compare)

    def automatic():
        """By default, ranks share the GPU and use ipc."""
        job = new_job(folder, {})
        command = [parity.program("lockstep"), "run", "-n", "2", parity.program("practical6_ddp"),
                   *job.arguments()[1:]]  # without --quiet
        output = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True).stdout
        weights, record = job.result()
        if parity.on_gpu and record.get("backend", output).count("ipc") == 0:
            raise Broken(f"neither the record nor the output names ipc: {output[:200]!r}")
        one = train(job, [parity.program("practical6_ddp"), *parity.devices(1)])
        return deviation((weights, record["losses"]), one, "fp32")

    parity.add("ranks practical6_ddp, without --devices and --backend: on the GPU, ipc", automatic)


def add_repeat(parity, folder):
    """Two runs of one command write the same file."""
    def alone(program, slots=1, more=()):
        return [parity.program(program), *parity.devices(slots), *more]

    on = parity.capture(True)
    amp = ["--amp", "fp16", "--master-weights"] if parity.on_gpu else ["--amp", "bf16"]
    commands = {"practical5_dp": alone("practical5_dp", 2),
                "practical10_hybrid": alone("practical10_hybrid", 2, ["--micro-batches", "3"]),
                "practical6_ddp, captured": alone("practical6_ddp", 1, on),
                "practical7_amp, captured": alone("practical7_amp", 1, [*on, *amp]),
                "practical6_ddp, 2 ranks": rank_command(parity, 2, "practical6_ddp", parity.capture(False)),
                "homework2_combined, 4 ranks, captured": rank_command(parity, 4, "homework2_combined", [*on, *amp])}
    for name, command in commands.items():
        def compare(command=command):
            job = new_job(folder, {})
            files = []
            for _ in range(2):
                train(job, command)
                with open(job.path(f"out{job.runs}"), "rb") as file:
                    files.append(file.read())
            return float(sum(a != b for a, b in zip(*files)) + abs(len(files[0]) - len(files[1]))), 0.0

        parity.add(f"repeat {name}, two runs: bytes that differ", compare)


def judge(case):
    name, function = case
    try:
        worst, allowed = function()
        return f"{name}: {worst:.3g}, allowed {allowed:.3g}", worst <= allowed
    except (Broken, subprocess.SubprocessError, OSError, KeyError, SystemExit) as error:
        return f"{name}: {error}", False


def main():
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("folder", metavar="BIN_FOLDER")
    flags.add_argument("case", nargs="*", metavar="CASE")
    flags.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 3), help="comparisons at a time")
    flags.add_argument("--cpu", action="store_true", help="the same on the CPU, without captures: to try the script")
    flags = flags.parse_intermixed_args()
    if not flags.cpu and not torch.cuda.is_available():
        print("SKIP: there is no GPU here that PyTorch can use")
        sys.exit(77)
    parity = Parity(flags)
    with tempfile.TemporaryDirectory() as folder:
        for add in (add_fp32, add_amp, add_ranks, add_nccl, add_repeat):
            add(parity, folder)
        cases = [case for case in parity.cases if not flags.case or case[0].startswith(tuple(flags.case))]
        if not cases:
            sys.exit(f"FAIL: no comparison is called {' or '.join(flags.case)}")
        failed = 0
        # NCCL's kernels wait on the GPU itself and leave little of it to others.
        alone = [case for case in cases if case[0].startswith("nccl")]
        together = [case for case in cases if case not in alone]
        with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
            for text, good in itertools.chain(pool.map(judge, together), map(judge, alone)):
                print(f"{text}  {'ok' if good else 'FAILED'}", flush=True)
                failed += not good
    print(f"{len(cases)} comparisons, {failed} failed")
    sys.exit(1 if failed else 0)


main()
