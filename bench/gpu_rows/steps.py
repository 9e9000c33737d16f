"""Rows 6, 7 and 8: a training step of an MLP under AMP. Row 6: what DDP with one rank adds to a step of the bare model.
Rows 7 and 8: lockstep against PyTorch, with and without gradient accumulation."""

import contextlib

import workers
from gpu_rows import mlp, tables

SHAPES = {  # of a row: shape, and the steps in one measurement
    "7": [((1024, 1024, 2, 64), 40), ((1024, 4096, 2, 512), 40)],
    "8": [((4096, 4096, 4, 4096), 10)],
}
REFERENCE = "PyTorch AMP, eager, foreach SGD"

OVERHEAD_SHAPE = (1024, 4096, 2, 512)
BARE, WRAPPED = "bare model", "DDP, one rank"


def run_ddp_overhead(bench):
    with bench.running(overhead_cases(bench)) as started:
        problems = mlp.loss_problems(started, f"{BARE}, eager", bench.precision)
        answers = workers.take_turns(started, 2 * bench.repetitions, 4 if bench.dry else 60)
    found = {name: tables.values_of(value, "ms") for name, value in answers.items()}
    medians = tables.print_times(f"Row 6: DDP with one rank, {mlp.text(OVERHEAD_SHAPE)}, AMP fp16", found, problems,
                                 {"bare, eager": [f"{BARE}, eager"], "bare, captured": [f"{BARE}, captured"]},
                                 mlp.floor_ms(bench.rates, OVERHEAD_SHAPE))
    for mode in ("eager", "captured"):
        wrapped, bare = medians.get(f"{WRAPPED}, {mode}"), medians.get(f"{BARE}, {mode}")
        if wrapped and bare:
            print(f"\nOverhead of DDP, {mode}: {(wrapped / bare - 1) * 100:+.2f} % (target at most 0.5 %)")
    bench.record["Row 6"] = {"medians": medians, "problems": problems, "answers": found}


def overhead_cases(bench):
    return {f"{what}, {mode}": (bench.program("bench_step"), mlp.settings(bench, OVERHEAD_SHAPE, ddp=ddp, **more), 0)
            for mode, more in (("eager", {}), ("captured", {"capture": True}))
            for what, ddp in ((BARE, False), (WRAPPED, True))}


def run(bench, rows):
    """Starts all programs of all rows at once, since compiling takes longer than measuring. Only tuned ones start alone:
    they time kernels while they start, and need the GPU to themselves."""
    shapes = [(row, shape, steps) for row in rows for shape, steps in SHAPES[row]]
    for accumulate in (1,) if bench.flags.quick else (1, 4):
        with contextlib.ExitStack() as stack:
            groups = [stack.enter_context(bench.running(step_cases(bench, shape, accumulate)))
                      for _, shape, _ in shapes]
            wait_until_ready(groups)
            for (row, shape, steps), started in zip(shapes, groups):
                tuned = stack.enter_context(bench.running(tuned_case(bench, shape, accumulate)))
                wait_until_ready([tuned])
                time_steps(bench, row, shape, steps, accumulate, {**started, **tuned})


def wait_until_ready(groups):
    """No program compiles while others are timed. A program that failed is reported when its turn comes."""
    for started in groups:
        for worker in started.values():
            with contextlib.suppress(workers.Failed):
                worker.ready()


def our_case(bench, shape, accumulate, **more):
    return bench.program("bench_step"), mlp.settings(bench, shape, accumulate=accumulate, **more), 0


def tuned_case(bench, shape, accumulate):
    return {"lockstep, the same, tuned": our_case(bench, shape, accumulate, capture=True, masters=True, fused=True,
                                                  tuned=True)}


def step_cases(bench, shape, accumulate):
    def ours(**more):
        return our_case(bench, shape, accumulate, **more)

    def theirs(**more):
        return bench.peer("step.py"), mlp.settings(bench, shape, accumulate=accumulate, **more), 0

    cases = {REFERENCE: theirs(sgd="foreach"),
             "PyTorch AMP, eager, fused SGD": theirs(sgd="fused")}
    if not bench.dry:
        cases["PyTorch AMP, torch.compile, fused SGD"] = theirs(sgd="fused", compile=True)
        cases["PyTorch AMP, CUDA graph by hand, fused SGD"] = theirs(sgd="fused", graph=True)
    if accumulate == 1:
        cases["lockstep, eager"] = ours()
    cases["lockstep, captured"] = ours(capture=True)
    cases["lockstep, captured, master weights"] = ours(capture=True, masters=True)
    cases["lockstep, captured, master weights, fused layers"] = ours(capture=True, masters=True, fused=True)
    return cases


def time_steps(bench, row, shape, steps, accumulate, started):
    problems = mlp.loss_problems(started, REFERENCE, bench.precision)
    answers = workers.take_turns(started, bench.repetitions, max(2, steps // accumulate))
    found = {name: tables.values_of(value, "ms") for name, value in answers.items()}
    bases = {"eager": [name for name in found if "eager" in name and "PyTorch" in name]}
    if not bench.dry:
        bases["compiled"] = [name for name in found if "compile" in name]
        bases["CUDA graph"] = [name for name in found if "CUDA graph" in name]
    title = f"Row {row}: {mlp.text(shape)}" + (f", {accumulate} micro-steps" if accumulate > 1 else "")
    floor = mlp.floor_ms(bench.rates, shape, accumulate)
    medians = tables.print_times(f"{title}; AMP {bench.precision}, GradScaler, SGD; floor {floor:.3g} ms",
                                 found, problems, bases, floor)
    print_not_captured(started)
    bench.record[title] = {"medians": medians, "problems": problems, "floor_ms": floor, "answers": found}


def print_not_captured(started):
    for name, worker in started.items():
        if "captured" in name and not worker.failure:
            ready = worker.ready()
            if not ready["replayed"]:
                print(f"NOT CAPTURED, {name}: {ready['why_not']}")
