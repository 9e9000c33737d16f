"""Row 6: what DDP with one rank adds to a step of the bare model."""

import workers
from gpu_rows import losses, mlp, tables

SHAPE = (1024, 4096, 2, 512)
BARE, WRAPPED = "bare model", "DDP, one rank"


def run(bench):
    with bench.running(step_cases(bench)) as started:
        problems = losses.problems(started, f"{BARE}, eager", bench.precision)
        answers = workers.take_turns(started, 2 * bench.repetitions, 4 if bench.dry else 60)
    found = {name: tables.values_of(value, "ms") for name, value in answers.items()}
    medians = tables.print_times(f"Row 6: DDP with one rank, {mlp.text(SHAPE)}, AMP fp16", found, problems,
                                 {"bare, eager": [f"{BARE}, eager"], "bare, captured": [f"{BARE}, captured"]},
                                 mlp.floor_ms(bench.rates, SHAPE))
    for mode in ("eager", "captured"):
        wrapped, bare = medians.get(f"{WRAPPED}, {mode}"), medians.get(f"{BARE}, {mode}")
        if wrapped and bare:
            print(f"\nOverhead of DDP, {mode}: {(wrapped / bare - 1) * 100:+.2f} % (target at most 0.5 %)")
    bench.record["Row 6"] = {"medians": medians, "problems": problems, "answers": found}


def step_cases(bench):
    return {f"{what}, {mode}": (bench.program("bench_step"), mlp.settings(bench, SHAPE, ddp=ddp, **more), 0)
            for mode, more in (("eager", {}), ("captured", {"capture": True}))
            for what, ddp in ((BARE, False), (WRAPPED, True))}
