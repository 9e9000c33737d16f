"""What several rows ask of a folder of checkpoints."""

import json
import os
import re
import subprocess


def good_steps(bench, folder):
    """Steps whose every byte is right, ascending; None if the folder has no checkpoint at all."""
    done = subprocess.run([bench.program("lockstep"), "ckpt", "verify", "--json", folder],
                          capture_output=True,
                          text=True)
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        return None
    return sorted(int(entry["path"][-8:]) for entry in json.loads(done.stdout)["checkpoints"] if entry["good"])


def differences(bench, first, second):
    """Names of the tensors and values in which the latest checkpoints of two runs differ."""
    done = subprocess.run([bench.program("lockstep"), "ckpt", "diff", "--json", first, second],
                          capture_output=True,
                          text=True)
    return json.loads(done.stdout)["differences"] if done.stdout.startswith("{") else [done.stderr]


def drafts(folder):
    """What a save that did not end has left there."""
    return [name for name in os.listdir(folder) if not re.fullmatch(r"step-\d{8}(\.damaged-\d+)?|\.lock", name)]
