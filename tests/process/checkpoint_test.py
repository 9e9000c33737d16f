#!/usr/bin/env python3
"""Runs that are killed or preempted, and resumed, end with the bits of one that was not: checkpoint_test.py BIN_FOLDER.

The program is tutorial_checkpoint on two ranks: DDP, dropout, AdamW, a sampler in the middle of an epoch.
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = ""  # set by main
STEPS = 600  # a save every ten
KILLS = 5


def command(folder, *launcher):
    return [os.path.join(BIN, "lockstep"), "run", "-n", "2", *launcher, os.path.join(BIN, "tutorial_checkpoint"), folder,
            str(STEPS)]


def start(folder):
    return subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def latest(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max([int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name)], default=0)


def wait_for_progress(run, folder, before):
    """Whether a new checkpoint appeared before the run ended."""
    deadline = time.monotonic() + 120
    while latest(folder) <= before:
        if run.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint after step {before} in {folder}")
        time.sleep(0.01)
    return True


def differences(first, second):
    done = subprocess.run([os.path.join(BIN, "lockstep"), "ckpt", "diff", "--json", first, second], capture_output=True,
                          text=True, timeout=120)
    return json.loads(done.stdout)["differences"]


class Checkpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.whole = os.path.join(cls.scratch.name, "whole")
        subprocess.run(command(cls.whole), check=True, capture_output=True, timeout=300)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def expect_same_end(self, folder):
        done = subprocess.run(command(folder), capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(latest(folder), STEPS)
        self.assertEqual(differences(self.whole, folder), [])
        self.assertEqual([name for name in os.listdir(folder) if name.startswith(".") and name != ".lock"], [])

    def test_killed_at_random_steps(self):
        folder = os.path.join(self.scratch.name, "killed")
        chance = random.Random(5)
        killed = subprocess.run(command(folder, "--inject", "kill@rank=1,step=35"), capture_output=True, text=True, timeout=120)
        self.assertEqual(killed.returncode, 137, killed.stderr)
        for _ in range(KILLS):  # a fast machine may reach the end before the last of them
            before = latest(folder)
            run = start(folder)
            if wait_for_progress(run, folder, before):
                time.sleep(chance.random() * 0.05)
            run.kill()  # the launcher; its ranks end with it
            run.communicate()
            self.assertGreaterEqual(latest(folder), before)
        self.expect_same_end(folder)

    def test_ranks_need_the_same_folder(self):
        for rank in (0, 1):
            os.makedirs(os.path.join(self.scratch.name, f"rank{rank}"))
        line = f"cd {self.scratch.name}/rank$RANK && exec {os.path.abspath(BIN)}/tutorial_checkpoint runs/a 10"
        done = subprocess.run([os.path.join(BIN, "lockstep"), "run", "-n", "2", "sh", "-c", line], capture_output=True,
                              text=True, timeout=120)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("rank 1: it does not see rank 0's runs/a", done.stderr)

    def test_preempted(self):
        for number, sent in enumerate([signal.SIGTERM, signal.SIGUSR1]):
            folder = os.path.join(self.scratch.name, f"preempted{number}")
            run = start(folder)
            self.assertTrue(wait_for_progress(run, folder, 0))
            run.send_signal(sent)
            errors = run.communicate(timeout=120)[1]
            self.assertEqual(run.returncode, 75, errors)
            saved = re.search(r"asked to stop: saved step (\d+)", errors)
            self.assertTrue(saved, errors)
            self.assertEqual(latest(folder), int(saved.group(1)))
            self.expect_same_end(folder)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[:1])
