"""What the benchmarks of ranks share: starting ranks, interleaving, printing."""

import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.join(HERE, "peers")
sys.path.insert(0, os.path.join(HERE, "..", "tests", "parity"))
import hidden_amx  # noqa: E402

hidden_amx.avoid()  # lockstep does so by itself; the peers must not die


def arguments():
    """BIN_FOLDER and the Pythons whose torch is the peer."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "build/release/bin"
    return folder, sys.argv[2:] or ["/usr/bin/python3"]


# How ranks are placed, {what a case's name ends with: flags}. Gloo's threads suffer where they share the one core of a
# pinned rank, and matrix products gain; torchrun does not pin. A peer is measured in both ways and the faster counts.
PLACEMENTS = {"": (), ", not pinned": ("--no-pin",)}


def launch(folder, ranks, command, flags=()):
    """Runs a command as ranks, on cores of their own unless flags say otherwise; what rank 0 printed, as JSON."""
    run = subprocess.run([os.path.join(folder, "lockstep"), "run", "--quiet", "-n", str(ranks), *flags, *command],
                         capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    lines = [line for line in run.stdout.splitlines() if "{" in line]
    return json.loads(lines[-1][lines[-1].index("{"):]) if lines else None


def peer(name):
    return os.path.join(PEERS, name)


def interleave(rounds, cases):
    """cases: {name: function giving a number}. A B A B, so that a slow minute hits all alike."""
    values = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            values[name].append(measure())
    return values


def print_table(title, unit, values, base):
    """One row a case with its ratio to the case `base` (how many times longer it takes)."""
    print(f"\n{title}")
    print(f"| set-up | {unit} | range | times the first |\n|---|---:|---:|---:|")
    reference = statistics.median(values[base])
    for name, numbers in values.items():
        median = statistics.median(numbers)
        print(f"| {name} | {median:.3g} | {min(numbers):.3g} to {max(numbers):.3g} | {median / reference:.2f} |")
