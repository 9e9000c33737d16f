#!/usr/bin/env python3
"""`lockstep verify` on the course's programs, on planted bugs and on models without one: verify_test.py BIN_FOLDER CASE..."""
import csv
import os
import signal
import subprocess
import sys
import time
import unittest

from scratch import ScratchTest

BIN = ""  # set by main


class Verified(ScratchTest):
    def verify(self, *words, code=0):
        done = subprocess.run([os.path.join(BIN, "lockstep"), "verify", "--out", self.path("out"), *words], capture_output=True,
                              text=True, timeout=900)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def table(self, name):
        with open(self.path(f"out/{name}.csv"), encoding="utf-8") as file:
            return list(csv.DictReader(file))


class Programs(Verified):
    def test_ddp_is_the_serial_run(self):
        said = self.verify("--quick", os.path.join(BIN, "practical6_ddp"))
        verdicts = {row["run"]: row["verdict"] for row in self.table("runs")}
        for run, verdict in (("1 rank, twice", "same bits"), ("2 ranks", "reordered sums"), ("3 ranks", "reordered sums")):
            self.assertEqual(verdicts.pop(run), verdict, run)
        # Virtual shards, and nothing else: every bit.
        self.assertGreaterEqual(len(verdicts), 2)
        self.assertEqual(set(verdicts.values()), {"same bits"})
        self.assertIn("Yes, for ", said)
        for name in ("report.html", "report.pdf", "tables.json"):
            self.assertTrue(os.path.exists(self.path("out/" + name)), name)
        self.assertFalse(os.path.exists(self.path("out/recordings")))

    def test_stages_schedules_and_devices_are(self):
        self.verify("--quick", os.path.join(BIN, "practical10_hybrid"))
        rows = self.table("runs")
        self.assertGreaterEqual(len(rows), 8)
        self.assertLessEqual({row["verdict"] for row in rows}, {"same bits", "reordered sums"})

    def test_data_parallel_and_a_resumed_run_are(self):
        self.verify("--ranks", "3", os.path.join(BIN, "practical5_dp"))
        verdicts = {row["run"]: row["verdict"] for row in self.table("runs")}
        self.assertEqual(verdicts["3 devices"], "reordered sums")
        self.assertIn(verdicts["killed and resumed"], ("same bits", "reordered sums"))

    def script(self, line):
        """A program that is one rank's verify_models, and this line on several."""
        path = self.path("train")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\nset -- {BIN}/verify_models --steps 2\n[ $WORLD_SIZE = 1 ] && exec \"$@\"\n{line}\n")
        os.chmod(path, 0o755)
        return path

    def test_nothing_compared_is_not_right(self):
        said = self.verify("--quick", self.script("echo no; exit 2"), code=1)
        self.assertIn("Nothing could be compared", said)
        self.assertEqual([row["verdict"] for row in self.table("runs")], ["same bits", "not offered", "not offered"])

    def test_processes_that_train_alone_are_wrong(self):
        self.verify("--quick", self.script('unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; exec "$@"'), code=1)
        self.assertEqual({row["likely_cause"] for row in self.table("findings")}, {"rank-missing"})

    def test_processes_that_end_without_an_update_are_wrong_and_the_rest_is_judged(self):
        self.verify("--quick", self.script('[ $WORLD_SIZE = 2 ] && exit 0; exec "$@"'), code=1)
        self.assertEqual([row["likely_cause"] for row in self.table("findings")], ["nothing-recorded"])
        self.assertEqual([row["verdict"] for row in self.table("runs")], ["same bits", "WRONG", "reordered sums"])

    def test_a_recording_that_cannot_be_written_is_not_judged(self):
        said = self.verify("--quick", self.script('mkdir -p "$LOCKSTEP_VERIFY_DIR/step-2.rank-1.update-0.safetensors/x"; exec "$@"'), code=1)
        self.assertIn("Not shown: 2 runs could not be judged", said)
        self.assertEqual({row["verdict"] for row in self.table("runs")}, {"same bits", "not judged"})

    def test_the_users_flags_may_exclude_virtual_shards(self):
        self.verify("--ranks", "2", os.path.join(BIN, "practical6_ddp"), "--compress", "fp16", "--steps", "4")
        verdicts = {row["run"]: row["verdict"] for row in self.table("runs")}
        self.assertEqual(verdicts["2 ranks"], "reordered sums")
        self.assertEqual(verdicts["virtual shards: 1 rank"], "not offered")

    def test_updates_of_torch_optim_are_noticed_and_nothing_compared_is_not_yes(self):
        said = self.verify("--ranks", "2", os.path.join(BIN, "tutorial_distributed"), code=1)
        self.assertIn("Not shown", said)
        rows = {row["run"]: (row["verdict"], row["steps"], row["tensors"]) for row in self.table("runs")}
        self.assertEqual(rows, {"1 rank, twice": ("same bits", "10", ""), "2 ranks": ("explained", "10", "")})

    def test_ranks_that_take_whole_batches_are_compared_with_a_larger_one(self):
        path = self.path("train")
        with open(path, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\n[ \"$1\" = --help ] && echo '  --batch INT [12]  rows of each rank' && exit 0\n"
                       "[ \"$1\" = --batch ] && batch=$2\n"
                       f"exec {BIN}/verify_models --steps 2 --batch $((${{batch:-12}} * WORLD_SIZE))\n")
        os.chmod(path, 0o755)
        said = self.verify("--ranks", "2", path)
        self.assertIn("Yes, for 1 run compared", said)
        self.assertEqual([(row["run"], row["verdict"]) for row in self.table("runs")],
                         [("1 rank, twice", "same bits"), ("2 ranks, against 24 rows on one", "reordered sums")])

    def test_a_program_of_one_process_is_not_offered_ranks(self):
        self.verify("--ranks", "2", os.path.join(BIN, "tutorial_data_parallel"), code=1)
        self.assertEqual([row["verdict"] for row in self.table("runs")], ["same bits", "not offered"])

    def test_recordings_are_kept_by_name_and_go_on_an_interrupt(self):
        self.verify("--quick", "--keep", self.script('exec "$@"'))
        kept = set(os.listdir(self.path("out/recordings")))
        self.assertLessEqual({"1-rank", "1-rank-again", "2-ranks", "3-ranks"}, kept)
        self.assertTrue(any(name.startswith("step-2.rank-1.") for name in os.listdir(self.path("out/recordings/2-ranks"))))
        hanging = subprocess.Popen([os.path.join(BIN, "lockstep"), "verify", "--out", self.path("stopped"),
                                    self.script('[ -z "$WORLD_SIZE" ] || exec sleep 600')], stderr=subprocess.DEVNULL)
        self.addCleanup(hanging.kill)
        while not os.path.exists(self.path("stopped/recordings/2-ranks")):
            self.assertIsNone(hanging.poll())
            time.sleep(0.05)
        hanging.send_signal(signal.SIGINT)
        self.assertEqual(hanging.wait(timeout=60), 130)
        self.assertFalse(os.path.exists(self.path("stopped/recordings")))

    def test_mistakes_are_named(self):
        for words, said in ((["no-such-program"], "no-such-program"), ([], "no program was given"),
                            (["--mutate", "mean-not-divded"], "did you mean mean-not-divided?"),
                            (["--mutate", "all", "practical6_ddp"], "--mutate runs lockstep's own programs"),
                            (["--clean", "2", "--mutate", "all"], "--mutate and --clean were both given"),
                            (["--ranks", "1", "practical6_ddp"], "--ranks")):
            with self.subTest(words=words):
                self.assertIn(said, self.verify(*words, code=2))


class Bugs(Verified):
    def test_planted_bugs_are_caught_and_named(self):
        bugs = ["ranks-counted-alike", "bucket-tail-dropped", "initial-broadcast-missing", "samples-duplicated", "shards-stale",
                "kept-gradient-overwritten", "tied-masters-keep-start"]
        self.verify("--mutate", ",".join(bugs))
        rows = self.table("mutations")
        self.assertEqual([(row["bug"], row["caught"]) for row in rows], [(bug, "yes") for bug in bugs])

    def test_nothing_is_found_where_nothing_is(self):
        self.verify("--clean", "6")
        self.assertEqual({row["false_alarms"] for row in self.table("clean")}, {"0"})


if __name__ == "__main__":
    BIN = sys.argv.pop(1)
    unittest.main(verbosity=2)
