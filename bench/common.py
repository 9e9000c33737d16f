"""What benchmarks share: starting ranks, interleaving, printing."""

import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.join(HERE, "peers")
for tests in ("parity", "process"):
    sys.path.insert(0, os.path.join(HERE, "..", "tests", tests))
import hidden_amx  # noqa: E402

hidden_amx.avoid()  # lockstep does so by itself; without this the peers would die


class NotRun(Exception):
    """Something is missing here that a measurement needs."""


def arguments():
    """BIN_FOLDER and the Pythons whose torch is the peer."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "build/release/bin"
    require_programs(folder)
    return folder, sys.argv[2:] or ["/usr/bin/python3"]


def require_programs(folder):
    """Ends a benchmark that was given another folder than one with lockstep's programs, or --help."""
    if os.path.exists(os.path.join(folder, "lockstep")):
        return
    print(f"{folder} is no folder with lockstep's programs: build them (cmake --preset release && cmake --build "
          f"build/release), or name the folder\n\n{sys.modules['__main__'].__doc__}", file=sys.stderr)
    sys.exit(2)


# How ranks are bound to cores, {end of a case's name: flags}. Pinning slows Gloo's threads, which then share the one
# core of their rank, and speeds up products; torchrun does not pin. A peer is measured both ways, and the faster counts.
PLACEMENTS = {"": (), ", not pinned": ("--no-pin",)}


def launch(folder, ranks, command, flags=()):
    """Runs a command as ranks, on cores of their own unless flags say otherwise. Returns the JSON that rank 0 printed."""
    run = subprocess.run([os.path.join(folder, "lockstep"), "run", "--quiet", "-n", str(ranks), *flags, *command],
                         capture_output=True, text=True)
    return printed_json(command, run)


START = '{"only_start": true}'  # for bench_ddp and its peer: one all_reduce, and nothing else


def seconds(command):
    """How long a command takes that must end well."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def launch_by_mpi(ranks, command):
    """The same under mpirun, which binds each rank to a core."""
    allowed = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return printed_json(command, subprocess.run(["mpirun", "--bind-to", "core", "-n", str(ranks), *command],
                                                capture_output=True, text=True, env=allowed))


def printed_json(command, run):
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    lines = [line for line in run.stdout.splitlines() if "{" in line]
    return json.loads(lines[-1][lines[-1].index("{"):]) if lines else None


def peer(name):
    return os.path.join(PEERS, name)


def interleave(rounds, cases):
    """cases: {name: function that returns a number}. Runs A B A B, so that a slow minute affects all alike."""
    values = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            values[name].append(measure())
    return values


def print_table(title, unit, values, base):
    """Prints a row for each case, with its ratio to the case `base` (how many times longer it takes)."""
    print(f"\n{title}")
    print(f"| set-up | {unit} | range | times the first |\n|---|---:|---:|---:|")
    reference = statistics.median(values[base])
    for name, numbers in values.items():
        median = statistics.median(numbers)
        print(f"| {name} | {median:.3g} | {min(numbers):.3g} to {max(numbers):.3g} | {median / reference:.2f} |")
