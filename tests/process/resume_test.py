#!/usr/bin/env python3
"""The course's programs with --checkpoint: killed, preempted and resumed, they end with the bits of a run that was not.

usage: resume_test.py BIN_FOLDER    LOCKSTEP_KILLS=20: kills of each program; LOCKSTEP_SEED=N: which ones
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

from scratch import ScratchTest

BIN = ""  # set by main
KILLS = int(os.environ.get("LOCKSTEP_KILLS", "3"))
SEED = int(os.environ.get("LOCKSTEP_SEED", str(random.randrange(1 << 31))))
STEPS = 40 * max(3, KILLS)
SIZES = ["--steps", str(STEPS), "--batch", "8", "--dim", "16", "--hidden", "32", "--optimizer", "adamw"]
EVERY = ["--checkpoint-every", "2"]

DDP = ["practical6_ddp", *SIZES]
ACCUMULATION_AMP = ["homework2_combined", *SIZES, "--accum-steps", "3", "--amp", "bf16", "--master-weights", "--overflow-at",
                    "41"]
PIPELINE = ["practical10_hybrid", *SIZES, "--place", "ranks", "--micro-batches", "2", "--accum-steps", "2"]
HYBRID = ["practical10_hybrid", *SIZES, "--devices", "cpu:4", "--micro-batches", "2", "--amp", "bf16"]


ENDLESS = 10_000_000  # no run comes to this step


def on_ranks(program, *launcher, ranks=2):
    return [os.path.join(BIN, "lockstep"), "run", "-n", str(ranks), *launcher, os.path.join(BIN, program[0]), *program[1:]]


def alone(program):
    return [os.path.join(BIN, program[0]), *program[1:]]


def run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def start(command):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def latest(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max([int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name)], default=0)


def wait_for_step(process, folder, step):
    """Whether a checkpoint of this step or a later one appeared before the process ended."""
    deadline = time.monotonic() + 120
    while latest(folder) < step:
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint of step {step} in {folder}")
        time.sleep(0.002)
    return True


def differences(first, second):
    """Of all tensors and values of the two runs' latest checkpoints."""
    return json.loads(run([os.path.join(BIN, "lockstep"), "ckpt", "diff", "--json", first, second]).stdout)["differences"]


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


class Resume(ScratchTest):
    def saving(self, program, name):
        return [*program, *EVERY, "--checkpoint", self.path(name), "--save", self.path(name + ".safetensors")]

    def train(self, command):
        done = run(command)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done

    def expect_same(self, name, steps=STEPS):
        self.assertEqual(latest(self.path(name)), steps)
        self.assertEqual(differences(self.path("whole"), self.path(name)), [])
        self.assertEqual(bytes_of(self.path("whole.safetensors")), bytes_of(self.path(name + ".safetensors")))
        left_over = [each for each in os.listdir(self.path(name)) if each.startswith(".") and each != ".lock"]
        self.assertEqual(left_over, [])

    def kill(self, program, *launcher, ranks=2):
        """Kills one run again and again: a rank in a random step, or the launcher at a random time."""
        chance = random.Random(f"{SEED} {program}")
        name = "killed"
        folder, killed = self.path(name), []
        self.train(on_ranks(self.saving(program, "whole"), *launcher, ranks=ranks))
        while len(killed) < KILLS:
            before = latest(folder)
            room = max(1, (STEPS - before) // (KILLS - len(killed) + 1))
            if len(killed) % 2 == 0:
                rank, step = chance.randrange(ranks), before + chance.randint(1, room)
                done = run(on_ranks(self.saving(program, name), "--inject", f"kill@rank={rank},step={step}", *launcher,
                                    ranks=ranks))
                self.assertEqual(done.returncode, 137, done.stdout + done.stderr)
                killed.append(f"rank {rank} in step {step}")
            else:
                # A rank that stops keeps it from its end. When it does, two saves after the step waited for have begun.
                stop = f"stop@rank={chance.randrange(ranks)},step={before + room + 5}"
                process = start(on_ranks(self.saving(program, name), "--inject", stop, *launcher, ranks=ranks))
                self.assertTrue(wait_for_step(process, folder, before + chance.randint(1, room)))
                time.sleep(chance.random() * 0.01)
                process.kill()  # the launcher; its ranks end with it
                process.communicate()
                killed.append(f"the launcher after step {latest(folder)}")
            self.assertGreaterEqual(latest(folder), before)
        done = self.train(on_ranks(self.saving(program, name), *launcher, ranks=ranks))
        if latest(folder) > 0:
            self.assertRegex(done.stdout, rf"resumed after step \d+ of {STEPS} from {folder}")
        self.expect_same(name)
        print(f"{program[0]} {' '.join(launcher)}: {len(killed)} kills, max |dw| = 0 ({', '.join(killed)})",
              file=sys.stderr)

    def test_ddp_is_killed(self):
        self.kill(DDP)

    def test_accumulation_with_amp_is_killed(self):
        self.kill(ACCUMULATION_AMP)

    def test_a_pipeline_over_ranks_is_killed(self):
        self.kill(PIPELINE)

    def test_ddp_over_gloo_is_killed(self):
        self.kill([*DDP, "--backend", "gloo"])

    def test_programs_of_one_process_are_killed(self):
        for program in (["practical5_single", *SIZES], ["practical5_dp", *SIZES, "--devices", "cpu:2"]):
            with self.subTest(program[0]), tempfile.TemporaryDirectory() as self.folder:
                self.train(alone(self.saving(program, "whole")))
                process = start(alone(self.saving(program, "killed")))
                self.assertTrue(wait_for_step(process, self.path("killed"), 20))
                process.kill()
                process.communicate()
                self.train(alone(self.saving(program, "killed")))
                self.expect_same("killed")

    def test_preempted_after_the_same_step(self):
        for program, sent in ((HYBRID, signal.SIGTERM), (ACCUMULATION_AMP, signal.SIGUSR1),
                              ([*DDP, "--backend", "gloo"], signal.SIGTERM)):
            with self.subTest(program=program[0], signal=sent.name), tempfile.TemporaryDirectory() as self.folder:
                process = start(on_ranks([*self.saving(program, "stopped"), "--steps", str(ENDLESS)]))
                self.assertTrue(wait_for_step(process, self.path("stopped"), 10))
                process.send_signal(sent)
                errors = process.communicate(timeout=120)[1]
                self.assertEqual(process.returncode, 75, errors)
                saved = re.search(r"asked to stop: saved step (\d+)", errors)
                self.assertTrue(saved, errors)
                self.assertEqual(latest(self.path("stopped")), int(saved[1]))
                steps = max(STEPS, int(saved[1]) // 2 * 2 + 20)
                for name in ("whole", "stopped"):
                    self.train(on_ranks([*self.saving(program, name), "--steps", str(steps)]))
                self.expect_same("stopped", steps)

    def test_a_restart_resumes_by_itself_and_its_record_says_so(self):
        self.train(on_ranks(self.saving(DDP, "whole")))
        done = self.train(on_ranks([*self.saving(DDP, "again"), "--json", self.path("job.json")], "--max-restarts", "1",
                                   "--inject", "kill@rank=1,step=52"))
        after = re.search(r"resumed after step (\d+) of", done.stdout)
        self.assertTrue(after, done.stdout)
        self.assertGreaterEqual(int(after[1]), 48)  # the save of step 50 may be under way when the rank is killed
        self.expect_same("again")
        with open(self.path("job.json"), encoding="utf-8") as file:
            record = json.load(file)
        self.assertEqual(record["resumed_after"], int(after[1]))
        self.assertEqual(len(record["losses"]), STEPS - int(after[1]))
        self.assertEqual(record["step_ms"]["n"] + record["warmup_steps"], len(record["losses"]))

    def test_a_mesh_of_four_ranks_resumes(self):
        for axes in (["--stages", "2"], ["--stages", "2", "--tensor-parallel", "2"]):
            with self.subTest(axes), tempfile.TemporaryDirectory() as self.folder:
                program = ["practical10_hybrid", *SIZES, "--place", "ranks", "--micro-batches", "2", *axes]
                self.train(on_ranks(self.saving(program, "whole"), ranks=4))
                done = self.train(on_ranks(self.saving(program, "again"), "--max-restarts", "1", "--inject",
                                           "kill@rank=2,step=52", ranks=4))
                self.assertRegex(done.stdout, "resumed after step (48|50) of")
                self.expect_same("again")

    def test_other_numbers_of_ranks_and_stages_resume(self):
        def last_loss(command):
            self.train([*command, "--json", self.path("job.json")])
            with open(self.path("job.json"), encoding="utf-8") as file:
                record = json.load(file)
            return record["losses"][-1], record.get("resumed_after")

        half = ["--steps", str(STEPS // 2)]
        for before, after in ((on_ranks(DDP), on_ranks(DDP, ranks=3)),
                              (on_ranks(PIPELINE), alone([*PIPELINE, "--place", "same", "--stages", "3"]))):
            with self.subTest(after=after[-5:]), tempfile.TemporaryDirectory() as self.folder:
                saved = ["--checkpoint", self.path("run")]
                whole, _ = last_loss(before)
                last_loss([*before, *half, *saved])
                loss, resumed_after = last_loss([*after, *saved])
                self.assertEqual(resumed_after, STEPS // 2)
                self.assertAlmostEqual(loss, whole, delta=1e-3 * whole)  # other divisions add in another order

    def test_a_finished_run_trains_no_further(self):
        self.train(on_ranks(self.saving(PIPELINE, "whole")))
        done = self.train(on_ranks([*PIPELINE, *EVERY, "--checkpoint", self.path("whole"), "--json", self.path("job.json"),
                                    "--save", self.path("again.safetensors")]))
        self.assertIn("nothing is left to train", done.stdout)
        self.assertEqual(bytes_of(self.path("whole.safetensors")), bytes_of(self.path("again.safetensors")))
        with open(self.path("job.json"), encoding="utf-8") as file:
            record = json.load(file)
        self.assertEqual((record["resumed_after"], record["losses"], record["step_ms"]["n"]), (STEPS, [], 0))

    def test_a_save_that_fails_does_not_stop_training_but_is_no_success(self):
        # The ranks cannot write files of more than 16 KiB, and the model has more; over Gloo they share no memory.
        def limited(*flags):
            program = alone([*DDP, "--hidden", "128", "--backend", "gloo", *flags])
            return run([os.path.join(BIN, "lockstep"), "run", "-n", "2", "bash", "-c", "ulimit -f 16; exec \"$@\"", "bash",
                        *program])

        done = limited("--save", self.path("weights"))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, "error\\[LS0033\\]: .*cannot write .*weights: File too large")
        self.assertEqual(os.listdir(self.path("")), [])
        done = limited(*EVERY, "--checkpoint", self.path("full"))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(f"step {STEPS}/{STEPS}", done.stdout)
        self.assertIn("no checkpoint of step 2: ", done.stderr)
        tries = STEPS // 2 + 1  # the last step is tried once more at the end
        self.assertRegex(done.stderr, rf"error\[LS0033\]: .*{tries} of {tries} checkpoints could not be saved")
        self.assertEqual(latest(self.path("full")), 0)

    def test_refused_before_training(self):
        self.train(on_ranks(self.saving(DDP, "whole")))
        with open(self.path("file"), "w", encoding="utf-8"):
            pass
        for flags, said in ((["--checkpoint", self.path("file")], "LS0007"),
                            (["--checkpoint", self.path("file/below")], "LS0007"),
                            (["--checkpoint", ""], "LS0001"),
                            (["--checkpoint-every", "5"], "--checkpoint"),
                            (["--checkpoint-keep", "5"], "--checkpoint"),
                            (["--checkpoint", self.path("new"), "--checkpoint-every", "0"], "--checkpoint-every 0"),
                            (["--checkpoint", self.path("whole"), "--lr", "0.25"], "lr \"0.001\", and this run has \"0.25\""),
                            (["--checkpoint", self.path("whole"), "--seed", "7"], "seed \"0\", and this run has \"7\""),
                            (["--checkpoint", self.path("whole"), "--hidden", "64"], "LS0006"),
                            (["--checkpoint", self.path("whole"), "--steps", "50"], f"has step {STEPS}")):
            with self.subTest(flags):
                done = run(on_ranks([*DDP, *flags]))
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(said, done.stderr)
                self.assertIn("help:", done.stderr)
                self.assertNotIn("step 1/", done.stdout)
        self.assertFalse(os.path.exists(self.path("new")))
        self.assertEqual(latest(self.path("whole")), STEPS)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv[1])
    print(f"LOCKSTEP_SEED={SEED} LOCKSTEP_KILLS={KILLS}", file=sys.stderr)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
