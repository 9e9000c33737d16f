"""Row 11: the peak memory of a rank, with DDP on two ranks that share the GPU."""

import subprocess

import workers
from gpu_rows import mlp, tables

SHAPE = (2048, 4096, 4, 128)
DEFAULT, VIEWS = "PyTorch DDP over Gloo", "PyTorch DDP, bucket views"


def run(bench):
    with bench.running(ddp_cases(bench)) as started:
        print(f"\nRow 11: peak memory of a rank, MiB; two ranks share the GPU, {mlp.text(SHAPE)}, fp32, SGD")
        print("| set-up | lockstep's account | allocator's peak | by nvidia-smi | against default | against views |")
        print("|---|---:|---:|---:|---:|---:|")
        problems = mlp.loss_problems(started, DEFAULT, "fp32")
        peaks = {}
        for name, worker in started.items():
            try:
                answer = worker.go(10)
            except workers.Failed as failure:
                print(f"| {name} | FAILED: {failure} |")
                continue
            print_peak(name, answer, worker.ready()["pid"], peaks, problems[name])
            bench.record[f"Row 11, {name}"] = dict(answer, backend=worker.ready().get("backend"),
                                                   problems={name: problems[name]})
        tables.print_problems(problems)
        print("(By nvidia-smi: with CUDA's context and what the allocator keeps. The ratios take the larger of account "
              "and allocator.)")


def ddp_cases(bench):
    settings = dict(mlp.settings(bench, SHAPE), precision="fp32", world=True,
                    devices="cpu:2" if bench.dry else "cuda:0*2")

    def ours(**more):
        return bench.ranks(2, bench.program("bench_step")), dict(settings, **more), 2

    def theirs(**more):
        return bench.ranks(2, bench.peer("step.py")), dict(settings, **more), 2

    return {DEFAULT: theirs(), VIEWS: theirs(views=True),
            "lockstep DDP": ours(), "lockstep DDP, captured": ours(capture=True)}


def print_peak(name, answer, pid, peaks, problem):
    """Prints one line of the table and adds to `peaks`, {name: MiB}."""
    allocated = (answer["memory"] or {"allocated_mib": 1.0})["allocated_mib"]  # the CPU has no such allocator
    # Backends allocate buckets without libtorch's allocator: only the account has both.
    peaks[name] = max(allocated, answer.get("account_mib", 0.0))
    ratios = [f"{peaks[name] / peaks[base]:.2f}" if base in peaks and not problem else "-"
              for base in (DEFAULT, VIEWS)]
    account = f"{answer['account_mib']:.1f}" if "account_mib" in answer else "-"
    print(f"| {name} | {account} | {allocated:.1f} | {process_mib(pid)} | {' | '.join(ratios)} |")


def process_mib(pid):
    """The GPU memory that a process holds, by the driver's account."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "-"
    return next((line.split(",")[1].strip() for line in lines if line.split(",")[0].strip() == str(pid)), "-")
