#!/usr/bin/env python3
"""`lockstep run --inject` of a NaN and of a cut network, in the course's programs: inject_test.py BIN_FOLDER."""
import json
import os
import re
import subprocess
import sys
import unittest

from scratch import ScratchTest

BIN = ""  # set by main
STEPS = 30
SIZES = ["--steps", str(STEPS), "--batch", "8", "--dim", "16", "--hidden", "32"]


def lockstep(*words):
    return subprocess.run([os.path.join(BIN, "lockstep"), *words], capture_output=True, text=True, timeout=300)


def on_two_ranks(program, *launcher):
    return lockstep("run", "-n", "2", *launcher, os.path.join(BIN, program[0]), *program[1:])


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


class Injected(ScratchTest):
    def record(self, program, *launcher):
        done = on_two_ranks([*program, "--json", self.path("job.json")], *launcher)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(self.path("job.json"), encoding="utf-8") as file:
            return json.load(file), done.stdout + done.stderr

    def test_a_scaler_skips_the_step_on_all_ranks(self):
        for program in (["homework2_combined", *SIZES, "--accum-steps", "2", "--amp", "bf16", "--check-replicas", "1"],
                        ["practical10_hybrid", *SIZES, "--amp", "bf16", "--place", "ranks"],
                        ["practical10_hybrid", *SIZES, "--amp", "bf16", "--devices", "cpu:4"]):
            with self.subTest(program=program):
                record, _ = self.record(program, "--inject", "nan@rank=1,step=7")
                self.assertEqual([skipped["step"] for skipped in record["skipped_steps"]], [7])
                self.assertEqual(len(record["losses"]), STEPS)
                self.assertNotIn("nonfinite", record)  # no loss: the NaN reached no weight of any rank

    def test_without_a_scaler_all_ranks_stop_and_one_is_blamed(self):
        for program in (["practical6_ddp", *SIZES], ["practical10_hybrid", *SIZES, "--devices", "cpu:4"]):
            with self.subTest(program[0]):
                done = on_two_ranks([*program, "--nonfinite", "stop", "--save", self.path("spoiled.safetensors")], "--inject",
                                    "nan@rank=1,step=7")
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"error\[LS0032\]: rank 1, step 7: .*is not finite")
                self.assertNotIn("rank 1: rank 1", done.stderr)
                self.assertFalse(os.path.exists(self.path("spoiled.safetensors")))

    def test_a_mismatch_is_refused_in_pipelines_too(self):
        for program in (["practical10_hybrid", *SIZES, "--place", "ranks"], ["practical10_hybrid", *SIZES, "--devices", "cpu:4"]):
            with self.subTest(program=program[-1]):
                done = on_two_ranks(program, "--inject", "mismatch@rank=1,step=7")
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"error\[LS\d+\]: .*different")
                self.assertIn("injected mismatch", done.stderr)

    def test_a_resumed_run_names_its_own_step(self):
        program = ["practical6_ddp", *SIZES, "--checkpoint", self.path("run"), "--checkpoint-every", "5"]
        done = on_two_ranks(program, "--inject", "kill@rank=1,step=13")
        self.assertEqual(done.returncode, 137, done.stderr)
        done = on_two_ranks(program, "--inject", "nan@rank=1,step=17")
        self.assertIn("warning[LS0032]: rank 1, step 17", done.stderr)

    def test_a_warning_names_rank_and_step(self):
        record, said = self.record(["practical6_ddp", *SIZES], "--inject", "nan@rank=1,step=7")
        self.assertIn("warning[LS0032]: rank 1, step 7", said)
        self.assertEqual(record["nonfinite"], STEPS - 7)  # the next losses tell it, to the end

    def test_a_cut_network_stops_all_and_a_restart_resumes(self):
        def train(name, *launcher):
            return on_two_ranks(["practical6_ddp", *SIZES, "--optimizer", "adamw", "--checkpoint",
                                 self.path(name), "--checkpoint-every", "2", "--save", self.path(name + ".safetensors")],
                                *launcher)

        self.assertEqual(train("whole", "--backend", "gloo").returncode, 0)
        cut = ["--backend", "gloo", "--inject", "netcut@rank=1,step=13", "--timeout", "20"]
        done = train("cut", *cut)
        self.assertNotIn(done.returncode, (0, 2), done.stderr)
        self.assertIn("error[LS", done.stderr)
        self.assertEqual(lockstep("ckpt", "verify", self.path("cut")).returncode, 0)
        saved = [int(name[5:]) for name in os.listdir(self.path("cut")) if name.startswith("step-")]
        self.assertGreaterEqual(max(saved), 8)
        self.assertLessEqual(max(saved), 12)
        done = train("again", *cut, "--max-restarts", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(re.search(r"resumed after step (8|10|12) of 30", done.stdout), done.stdout)
        self.assertEqual(bytes_of(self.path("whole.safetensors")), bytes_of(self.path("again.safetensors")))


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
