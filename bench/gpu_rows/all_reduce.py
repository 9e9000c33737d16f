"""Row 14: all_reduce of ranks that share the GPU, against Gloo."""

import statistics

import workers
from gpu_rows import tables

ALL_REDUCE_SIZES = [4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]  # bytes
GLOO = "PyTorch, Gloo"


def run(bench):
    sizes = [4096, 65536] if bench.dry else ALL_REDUCE_SIZES
    for ranks in (2, 4):
        with bench.running(all_reduce_cases(bench, ranks, sizes)) as started:
            answers = workers.take_turns(started, 1 if bench.dry else 5, 3)
            print(f"\nRow 14: all_reduce fp32, {ranks} ranks share the GPU; microseconds, median (range), "
                  "and against Gloo")
            print(f"| bytes | {' | '.join(started)} | floor |\n|---:|" + "---:|" * (len(started) + 1))
            for size in sizes:
                print_size(bench, ranks, size, started, answers)


def all_reduce_cases(bench, ranks, sizes):
    settings = dict(devices=f"cpu:{ranks}" if bench.dry else f"cuda:0*{ranks}", sizes=sizes)
    near = "shm" if bench.dry else "ipc"

    def ours(backend, registered):
        return (bench.ranks(ranks, bench.program("bench_all_reduce_gpu")),
                dict(settings, backend=backend, registered=registered), ranks)

    return {f"{near}, allocate()d": ours(near, True), f"{near}, any tensor": ours(near, False),
            "through host memory (shm)": ours("shm", False),
            GLOO: (bench.ranks(ranks, bench.peer("all_reduce_gpu.py")), settings, ranks)}


def print_size(bench, ranks, size, started, answers):
    """One line of the table, and a record of each case."""
    times = {name: [time for answer in found for time in answer["us"][str(size)]]
             for name, found in answers.items() if not isinstance(found, workers.Failed)}
    gloo = statistics.median(times[GLOO]) if GLOO in times else None
    cells = []
    for name, worker in started.items():
        if name not in times:
            cells.append(f"FAILED: {answers[name]}")
            continue
        median, ready = statistics.median(times[name]), worker.ready()
        ratio = "WRONG SUMS" if not ready["correct"] else (f"{gloo / median:.1f}x" if gloo else "-")
        cells.append(f"{median:.4g} ({tables.spread(times[name])}) {ratio}")
        bench.record[f"Row 14, {ranks} ranks, {size} bytes, {name}"] = {
            "us": times[name], "correct": ready["correct"], "backend": ready["backend"]}
    floor = 2 * ranks * size / (bench.rates["copy_gbps"] * 1e9) * 1e6  # every element is read and written once
    print(f"| {size} | {' | '.join(cells)} | {floor:.3g} |")
