"""Ranks that make different calls, or different numbers of them; gradients that are not finite."""

import re

from .peers import outcome
from .rows import row


@row(10, "operation, shape, dtype, order differ between ranks", "error before data moves, both sides named")
def different_calls(bench, found):
    kinds = ("operation", "shape", "dtype", "order")
    for _ in range(bench.times(2, 1)):
        for kind in kinds:
            for ranks in (2, 3):
                with bench.run(ranks, "--ranks", "all", "--timeout", "60", bench.program("bench_faults"), "mismatch",
                               kind) as job:
                    code = job.wait(90)
                    errors = job.errors
                    found.check(code == 1, f"{kind}: exit code {code}: {errors[-500:]}")
                    found.check("error[LS0020]" in errors, f"{kind}: {errors[-500:]}")
                    told = re.search(r"\nerror\[LS0020\]: .*", errors)
                    odd = ranks - 1
                    both = told and re.search(rf"rank {odd} called", told.group()) and re.search(
                        r"ranks? 0.* called", told.group())
                    found.check(both, f"{kind}: not both sides: {told.group() if told else errors[-500:]}")
                    found.check(job.output.count("unchanged") == ranks, f"{kind}: data moved: {job.output[-300:]}")
                    found.check_nothing_left(job)
                found.repetitions += 1
    for rank in (0, 1):
        with bench.run(2, "--inject", f"mismatch@rank={rank},step=5", bench.program("practical6_ddp"), "--steps", "50",
                       "--dim", "64", "--hidden", "64") as job:
            code = job.wait(90)
            found.check(code == 1 and "error[LS0020]" in job.errors,
                        f"practical6_ddp: exit code {code}: {job.errors[-500:]}")
            found.check_nothing_left(job)
        found.repetitions += 1
    found.numbers["refused"] = found.repetitions - len(found.broken)
    found.figures = [
        f"refused {found.repetitions - len(found.broken)} of {found.repetitions}, tensors unchanged, both calls quoted"
    ]

    def try_peer(peer):
        said = []
        for kind, words in {
                "operation": ["1:broadcast:0", "0:reduce"],
                "shape": ["0:reduce", "1:reduce:shape"],
                "dtype": ["0:reduce", "1:reduce:dtype"]
        }.items():
            with peer.ranks("rendezvous:5", "barrier", *words) as job:
                what = outcome(job, 40)
                silent = job.process.poll() == 0
                said.append(f"{kind}: {'wrong numbers, exit 0' if silent and ' changed' in job.output else what}")
        return "timeout 5 s: " + "; ".join(said)

    bench.compare(found, try_peer)


@row(11, "one rank has fewer batches", "joined, or a clear error")
def fewer_batches(bench, found):
    clear, joined = 0, 0
    for turn in range(bench.times(4, 1)):
        for ranks in (2, 3):
            with bench.run(ranks, "--ranks", "all", "--timeout", "60", bench.program("bench_faults"), "batches",
                           turn % 4) as job:
                code = job.wait(90)
                told = f"error[LS0022]: rank {ranks - 1} ended with exit code 0 while others needed it"
                right = code == 1 and told in job.errors
                found.check(right, f"exit code {code}: {job.errors[-500:]}")
                clear += right
                found.check_nothing_left(job)
            with bench.run(ranks, "--ranks", "all", "--timeout", "60", bench.program("bench_faults"), "batches",
                           turn % 4, "join") as job:
                code = job.wait(90)
                right = code == 0 and job.output.count("trained") == ranks
                found.check(right, f"join: exit code {code}: {job.errors[-500:]}")
                joined += right
                found.check_nothing_left(job)
            found.repetitions += 2
    found.numbers.update(clear=clear, joined=joined)
    found.figures = [
        f"clear error {clear} of {found.repetitions // 2}", f"joined {joined} of {found.repetitions // 2}",
        "hangs 0" if not found.broken else ""
    ]

    def try_peer(peer):
        with peer.ranks("rendezvous:5", "0:train:10", "1:train:3") as job:
            bare = outcome(job, 40)
        with peer.ranks("rendezvous:5", "0:train-joined:10", "1:train-joined:3") as job:
            return f"timeout 5 s: {bare}; in Join: {outcome(job, 40)}"

    bench.compare(found, try_peer)
