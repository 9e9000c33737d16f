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
KILLS = 6
ENDLESS = 10_000_000  # no run comes to this step


def command(folder, *launcher, steps=STEPS):
    return [os.path.join(BIN, "lockstep"), "run", "-n", "2", *launcher, os.path.join(BIN, "tutorial_checkpoint"), folder,
            str(steps)]


def train(folder, steps=STEPS):
    return subprocess.run(command(folder, steps=steps), capture_output=True, text=True, timeout=300)


def start(folder, *launcher, steps=STEPS):
    return subprocess.Popen(command(folder, *launcher, steps=steps), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True)


def latest(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max([int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name)], default=0)


def wait_for_progress(run, folder, before):
    """Until a new checkpoint appears in the folder of a run that cannot end by itself."""
    deadline = time.monotonic() + 240
    while latest(folder) <= before:
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            raise AssertionError(f"no checkpoint after step {before} in {folder}: {run.communicate()[1]}")
        time.sleep(0.01)


def differences(first, second):
    done = subprocess.run([os.path.join(BIN, "lockstep"), "ckpt", "diff", "--json", first, second], capture_output=True,
                          text=True, timeout=120)
    return json.loads(done.stdout)["differences"]


class Checkpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def whole(self, steps):
        """The folder of a run of so many steps that nothing has disturbed."""
        folder = os.path.join(self.scratch.name, f"whole{steps}")
        if not os.path.exists(folder):
            self.assertEqual(train(folder, steps).returncode, 0)
        return folder

    def expect_same_end(self, folder, steps=STEPS):
        done = train(folder, steps)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(latest(folder), steps)
        self.assertEqual(differences(self.whole(steps), folder), [])
        self.assertEqual([name for name in os.listdir(folder) if name.startswith(".") and name != ".lock"], [])

    # An attempt is killed after at most 80 steps, so that none comes to the end. It is killed after 20 at least: the save
    # of its step 10 has ended when that of step 20 begins.
    def test_killed_at_random_steps(self):
        folder = os.path.join(self.scratch.name, "killed")
        chance = random.Random(5)
        for kill in range(KILLS):
            before, rank = latest(folder), chance.randrange(2)
            if kill % 2 == 0:
                fault = f"kill@rank={rank},step={chance.randint(21, 80)}"
                killed = subprocess.run(command(folder, "--inject", fault), capture_output=True, text=True, timeout=240)
                self.assertEqual(killed.returncode, 137, killed.stderr)
            else:  # the launcher, at a random time; its ranks end with it. A rank that stops keeps them from the end
                run = start(folder, "--inject", f"stop@rank={rank},step=80")
                wait_for_progress(run, folder, before)
                time.sleep(chance.random() * 0.05)
                run.kill()
                run.communicate()
            self.assertGreater(latest(folder), before)
        self.expect_same_end(folder)

    def test_ranks_need_the_same_folder(self):
        for rank in (0, 1):  # an earlier run has left a lock in both
            os.makedirs(os.path.join(self.scratch.name, f"rank{rank}", "runs", "a"))
            open(os.path.join(self.scratch.name, f"rank{rank}", "runs", "a", ".lock"), "w").close()
        line = f"cd {self.scratch.name}/rank$RANK && exec {os.path.abspath(BIN)}/tutorial_checkpoint runs/a 10"
        done = subprocess.run([os.path.join(BIN, "lockstep"), "run", "-n", "2", "sh", "-c", line], capture_output=True,
                              text=True, timeout=120)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("rank 1: it does not see rank 0's runs/a", done.stderr)

    def test_preempted(self):
        for number, sent in enumerate([signal.SIGTERM, signal.SIGUSR1]):
            folder = os.path.join(self.scratch.name, f"preempted{number}")
            run = start(folder, steps=ENDLESS)
            wait_for_progress(run, folder, 0)
            run.send_signal(sent)
            errors = run.communicate(timeout=120)[1]
            self.assertEqual(run.returncode, 75, errors)
            saved = re.search(r"asked to stop: saved step (\d+)", errors)
            self.assertTrue(saved, errors)
            self.assertEqual(latest(folder), int(saved.group(1)))
            self.expect_same_end(folder, max(STEPS, (int(saved.group(1)) + 19) // 10 * 10))


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[:1])
