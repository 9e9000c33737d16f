"""Accumulation and mixed precision: N ranks with ACCUM_STEPS = k on B/k rows must end with the weights and losses of one
process on B rows, and of PyTorch's DistributedDataParallel with no_sync and autocast.

usage: practical7_parity.py BIN_FOLDER CASE [cuda]
CASE: accumulation, variants, amp or combined. With cuda, all ranks share the first GPU, and fp16 is compared too.
Exits with 77 (skipped) where this Python has no torch.
"""

import os
import sys
import tempfile

import oracle  # noqa: F401
from course_job import MLP, PEER, Job, check, require_trained

BIN = sys.argv[1]
CUDA = sys.argv[3:] == ["cuda"]
ROWS = 60  # of one optimizer step
# A rounding to bf16 or fp16 in the other direction moves a weight by one step of that type.
LOOSE = {"bf16": {"rtol": 2e-2, "atol": 2e-3}, "fp16": {"rtol": 3e-3, "atol": 3e-4}}


def job(folder, batch, more=None):
    return Job(folder, batch, {**MLP, **(more or {})})


def devices(ranks):
    return ["--devices", f"cuda:0*{ranks}" if CUDA else f"cpu:{ranks}"]


def ranks_of(program, ranks):
    command = [os.path.join(BIN, "lockstep"), "run", "--quiet", "-n", str(ranks), os.path.join(BIN, program)]
    return command + devices(ranks)


def peers(trained, ranks):
    return trained.run_with_variables(PEER + devices(ranks), ranks)


def accumulation(folder):
    """k micro-steps on B/k rows against one step on B rows."""
    whole = job(folder, ROWS).run([os.path.join(BIN, "practical6_ddp"), *devices(1)])
    for accum_steps in (1, 2, 4):
        trained = job(folder, ROWS // accum_steps, {"--accum-steps": accum_steps})
        require_trained(trained, whole)
        for ranks in (1, 2, 3):
            result = trained.run(ranks_of("practical7_accumulation", ranks))
            what = f"{accum_steps} micro-steps on {ranks} ranks"
            check(f"{what} against one batch", result, whole)
            if result[1]["effective_batch"] != ROWS:
                sys.exit(f"FAIL: {what}: effective batch {result[1]['effective_batch']}, not {ROWS}")
        check(f"{what} against PyTorch's", result, peers(trained, 3))


def variants(folder):
    """Synchronised in every micro-step, and with an undivided loss: as in PyTorch."""
    for flag in ("--sync-every-step", "--no-divide"):
        trained = job(folder, 12, {"--accum-steps": 4, flag: None, "--lr": 0.01})
        result = trained.run(ranks_of("practical7_accumulation", 2))
        require_trained(trained, result)
        check(f"{flag} against PyTorch's", result, peers(trained, 2))


def amp(folder, program, more):
    for precision in ("bf16", "fp16") if CUDA else ("bf16",):
        trained = job(folder, 12, {"--amp": precision, **more})
        alone = trained.run(ranks_of(program, 1))
        for ranks in (1, 2):
            result = trained.run(ranks_of(program, ranks))
            require_trained(trained, result)
            if result[1]["amp"] != precision or result[1]["scale"] != 65536:
                sys.exit(f"FAIL: ran in {result[1]['amp']} with scale {result[1]['scale']}")
            check(f"{precision} on {ranks} ranks against PyTorch's", result, peers(trained, ranks), **LOOSE[precision])
            check(f"{precision} on {ranks} ranks against one", result, alone, **LOOSE[precision])
        # The lower precision must show, or nothing was tested.
        trained.flags["--amp"] = "off"
        exact = trained.run(ranks_of(program, 2))
        if exact[1]["losses"] == result[1]["losses"]:
            sys.exit(f"FAIL: {precision} gives the losses of full precision")


def main():
    case = sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        if case == "accumulation":
            accumulation(folder)
        elif case == "variants":
            variants(folder)
        elif case == "amp":
            amp(folder, "practical7_amp", {})
        elif case == "combined":
            amp(folder, "homework2_combined", {"--accum-steps": 4})
        else:
            sys.exit(f"FAIL: there is no case {case}")


main()
