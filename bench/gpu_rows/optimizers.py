"""Row 10: optimizer steps over the weights of GPT-2, as a share of what a copy moves."""

import math
import statistics

import workers
from gpu_rows import tables

GPT2_BLOCK = [[768], [768], [2304, 768], [2304], [768, 768], [768], [768], [768], [3072, 768], [3072], [768, 3072],
              [768]]
GPT2_SHAPES = [[50257, 768], [1024, 768], *(GPT2_BLOCK * 12), [768], [768]]
WEIGHTS = sum(math.prod(shape) for shape in GPT2_SHAPES)


def run(bench):
    for title, optimizer, momentum in (("AdamW", "adamw", 0.0), ("SGD with momentum", "sgd", 0.9),
                                       ("SGD", "sgd", 0.0)):
        if bench.flags.quick and title == "SGD":
            continue
        cases = optimizer_cases(bench, optimizer, momentum)
        with bench.running({name: case for name, (case, _, _) in cases.items()}) as started:
            problems = {name: checksum_problem(started, name, peer) for name, (_, _, peer) in cases.items()}
            answers = workers.take_turns({**started, "copy": bench.ceilings}, bench.repetitions, 2 if bench.dry else 20)
        copy_gbps = statistics.median(tables.values_of(answers.pop("copy"), "copy_gbps"))
        found = {name: tables.values_of(value, "ms") for name, value in answers.items()}
        sizes = {name: size for name, (_, size, _) in cases.items()}
        title = f"Row 10: {title}, {WEIGHTS / 1e6:.0f} M weights in {len(GPT2_SHAPES)} tensors"
        print_rates(title, found, problems, sizes, copy_gbps)
        bench.record[title] = {"answers": found, "problems": problems, "copy_gbps": copy_gbps, "bytes": sizes}


def optimizer_cases(bench, optimizer, momentum):
    """{name: (case, bytes a weight, the peer whose numbers it must have)}"""
    settings = dict(optimizer=optimizer, momentum=momentum,
                    shapes=[[64, 32], [64], [7]] if bench.dry else GPT2_SHAPES)

    def ours(whose="lockstep", **more):
        return bench.program("bench_optim_gpu"), dict(settings, whose=whose, **more), 0

    def theirs(variant, **more):
        return bench.peer("optim_gpu.py"), dict(settings, variant=variant, **more), 0

    state = 16 if optimizer == "adamw" else (8 if momentum else 0)  # bytes of state read and written a weight
    plain, masters = 12 + state, 2 + 8 + 2 + state
    return {"PyTorch, foreach": (theirs("foreach"), plain, ""),
            "PyTorch, fused": (theirs("fused"), plain, "PyTorch, foreach"),
            "torch::optim": (ours("torch"), plain, "PyTorch, foreach"),
            "lockstep": (ours(), plain, "PyTorch, foreach"),
            "PyTorch, fused, scaler": (theirs("fused", scaler=True), plain + 4, ""),
            "lockstep, scaler": (ours(scaler=True), plain + 4, "PyTorch, fused, scaler"),
            "lockstep, master weights": (ours(masters=True), masters, "PyTorch, foreach"),
            "lockstep, master weights, scaler": (ours(masters=True, scaler=True), masters + 2,
                                                 "PyTorch, fused, scaler")}


def checksum_problem(started, name, peer):
    try:
        ours = started[name].ready()["checksum"]
        theirs = started[peer].ready()["checksum"] if peer else ours
    except workers.Failed as failure:
        return str(failure)
    tolerance = 2e-3 if "master" in name else 1e-5  # weights rounded to fp16, or not
    return "" if abs(ours - theirs) <= tolerance * abs(theirs) else f"sum of weights {ours!r}, PyTorch's {theirs!r}"


def print_rates(title, found, problems, sizes, copy_gbps):
    print(f"\n{title}; a copy moves {copy_gbps:.0f} GB/s")
    print("| set-up | ms | range | bytes a weight | GB/s | of a copy |\n|---|---:|---:|---:|---:|---:|")
    for name, values in found.items():
        if isinstance(values, workers.Failed):
            print(f"| {name} | FAILED: {values} |")
            continue
        median = statistics.median(values)
        gbps = WEIGHTS * sizes[name] / median * 1e-6
        share = "numbers differ" if problems[name] else f"{gbps / copy_gbps:.0%}"
        print(f"| {name} | {median:.4g} | {tables.spread(values)} | {sizes[name]} | {gbps:.0f} | {share} |")
    tables.print_problems(problems)
