"""Checkpoints whose bytes were changed."""

import json
import os
import shutil
import subprocess

from . import jobs
from .rows import row

PEER_SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "peers", "fault_damage.py")


@row(17, "every byte flip and truncation of a checkpoint; fuzzed headers", "refused: silent accepts 0, crashes 0")
def damaged(bench, found):
    with jobs.Scratch() as scratch:
        trained = subprocess.run(
            [bench.program("tutorial_checkpoint"), scratch.file("run"), "10"], capture_output=True, text=True)
        found.check(trained.returncode == 0, f"tutorial_checkpoint: {trained.stderr[-500:]}")
        checkpoint = os.path.join(jobs.SHM, "step-00000010")
        shutil.copytree(scratch.file("run/step-00000010"), checkpoint)
        try:
            stride, mutations = (29, 300) if bench.quick else (1, 5000)
            done = subprocess.run(
                [bench.program("bench_store"), "damage", checkpoint,
                 str(stride), str(mutations)],
                capture_output=True,
                text=True)
        finally:
            shutil.rmtree(checkpoint)
    if not found.check(done.returncode == 0, f"bench_store: {done.stderr[-500:]}"):
        return
    kinds = json.loads(done.stdout)
    found.numbers.update(kinds)
    found.repetitions = sum(kind["damages"] for kind in kinds.values())
    accepted = sum(kinds[name]["same"] + kinds[name]["wrong"]
                   for name in ("flips", "truncations")) + kinds["mutations"]["wrong"]
    crashes, hangs = (sum(kind[what] for kind in kinds.values()) for what in ("crashes", "hangs"))
    found.check(accepted == 0, f"{accepted} silent accepts")
    found.check(crashes == 0, f"{crashes} crashes")
    found.check(hangs == 0, f"{hangs} hangs")
    found.figures = [
        f"silent accepts {accepted}, crashes {crashes}, hangs {hangs}",
        f"{kinds['flips']['damages']} flips, {kinds['truncations']['damages']} truncations, "
        f"{kinds['mutations']['damages']} fuzzed files, {kinds['sealed']['damages']} fuzzed manifests with a right checksum"
    ]

    def try_peer(peer):
        tried = subprocess.run([peer.python, PEER_SCRIPT, "17" if bench.quick else "1"],
                               capture_output=True,
                               text=True,
                               timeout=540,
                               env={
                                   **os.environ, "OMP_NUM_THREADS": "1"
                               })
        if tried.returncode != 0:
            return f"not run: {tried.stderr[-200:]}"
        ends = json.loads(tried.stdout.splitlines()[-1])
        found.numbers[peer.name] = ends
        return (f"silent accepts {ends['wrong']}, crashes {ends['crashes']}, hangs {ends['hangs']} "
                f"of {ends['damages']} flips")

    bench.compare(found, try_peer)
