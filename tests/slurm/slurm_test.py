#!/usr/bin/env python3
"""lockstep under a real SLURM: a controller and two nodes on this machine (cluster.py), and jobs as people submit them.

usage: slurm_test.py BIN_FOLDER [CASE ...]    (skips, by name, where no cluster can be started)

LOCKSTEP_SLURM_LONG=1 adds the cases that wait for a time limit, which SLURM counts in minutes.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import unittest

import cluster as slurm
from cluster import SCRATCH, Cluster

BIN = pathlib.Path(sys.argv[1]).resolve()
PATH = {"PATH": f"{BIN}:{os.environ['PATH']}"}
MODEL = ["--batch", "12", "--dim", "16", "--hidden", "32", "--seed", "3"]
SHORT = ["practical6_ddp", "--steps", "6", *MODEL]
ENDLESS = ["practical6_ddp", "--steps", "1000000", *MODEL]
LONG = "LOCKSTEP_SLURM_LONG"

CLUSTER = None


def lockstep(*words):
    return subprocess.run([BIN / "lockstep", *map(str, words)], capture_output=True, text=True, check=True).stdout


def ranks():
    """The processes of ranks, on both hosts."""
    return [pid for pid, words in slurm.processes().items() if os.path.basename(words.split()[0]) == "practical6_ddp"]


def launchers():
    return [pid for pid, words in slurm.processes().items() if os.path.basename(words.split()[0]) == "lockstep"]


def left_behind():
    """What is neither the test nor SLURM: daemons, steps and their clients end with the job."""
    own = ("python", "munged", "slurmctld", "slurmd", "slurmstepd", ":", "srun", "sh", "scontrol", "sinfo")
    return [words for pid, words in slurm.processes().items()
            if pid != os.getpid() and not os.path.basename(words.split()[0]).startswith(own)]


def losses(name):
    return json.loads((SCRATCH / name).read_text())["losses"]


class SlurmCase(unittest.TestCase):
    def setUp(self):
        self.cluster = CLUSTER
        self.started = time.monotonic()

    def tearDown(self):
        """Whatever a case did, its job is over, and nothing of it is left on either host."""
        self.cluster.wait_for(lambda: not left_behind(), f"end of {left_behind()}", 15)
        print(f"{self.id().split('.')[-1]}: {time.monotonic() - self.started:.1f} s", file=sys.stderr)

    def start(self, *words):
        return self.cluster.start(*words, variables=PATH)

    def succeeds(self, *words):
        program = self.start(*words)
        self.assertEqual(program.wait(), 0, program.out() + program.err())
        return program

    def submit(self, script, *flags):
        return self.cluster.submit(script, *flags, variables=PATH)

    def text(self, name):
        path = SCRATCH / name
        return path.read_text() if path.exists() else ""

    def await_text(self, read, pattern, seconds=40):
        self.cluster.wait_for(lambda: re.search(pattern, read()), f'"{pattern}"', seconds)

    def assert_losses_of_one_process(self, name):
        found = losses(name)
        self.assertEqual(len(found), 6)
        for ours, alone in zip(found, losses("one.json")):
            self.assertAlmostEqual(ours, alone, delta=1e-5 * abs(alone))

    def assert_saved(self, folder):
        """The only checkpoint is that of the signal, and it is whole."""
        self.assertEqual(len(list((SCRATCH / folder).glob("step-*"))), 1)
        lockstep("ckpt", "verify", SCRATCH / folder)

    def await_end(self, program, seconds=20):
        """Seconds until no rank and no launcher is left on either host."""
        begin = time.monotonic()
        self.cluster.wait_for(lambda: not ranks() and not launchers(), "end of all ranks", seconds)
        took = time.monotonic() - begin
        program.wait(seconds)
        return took


class Starting(SlurmCase):
    def test_srun_starts_ranks_on_one_node_and_on_two(self):
        self.succeeds("srun", "-n", "4", "-N", "1", "--overcommit", *SHORT, "--json", "srun1.json")
        self.assert_losses_of_one_process("srun1.json")
        program = self.succeeds("srun", "-n", "4", "-N", "2", *SHORT, "--json", "srun2.json")
        self.assert_losses_of_one_process("srun2.json")
        self.assertIn("backend: two_level", program.out())
        self.assertIn("of n2", program.out())

    def test_lockstep_run_in_salloc_and_in_a_batch_script(self):
        program = self.succeeds("salloc", "-N", "2", "--ntasks-per-node=2", "lockstep", "run", *SHORT, "--json", "salloc.json")
        self.assertIn("srun starts a launcher on each of 2 hosts, since this host is not part of the job", program.err())
        self.assertIn("host 1 of 2 (n2)", program.err())
        self.assert_losses_of_one_process("salloc.json")
        words = " ".join([*SHORT, "--json", "batch.json"])
        job = self.submit(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --output=batch.log\nlockstep run {words}\n")
        self.assertEqual(self.cluster.await_state(job, "COMPLETED", "FAILED")["JobState"], "COMPLETED", self.text("batch.log"))
        self.assertIn("srun starts a launcher on each of 2 hosts", self.text("batch.log"))
        self.assert_losses_of_one_process("batch.json")

    def test_a_step_has_a_token_of_its_own(self):
        """srun copies it to all hosts, in an environment that others may read."""
        program = self.succeeds("salloc", "-N", "2", "lockstep", "run", "-n", "1", "printenv", "LOCKSTEP_TOKEN")
        tokens = set(re.findall("[0-9a-f]{64}", program.out()))
        self.assertEqual(len(tokens), 1, program.out() + program.err())
        self.assertNotIn(tokens.pop(), self.text(".config/lockstep/token"))

    def test_sbatch_takes_what_slurm_script_prints(self):
        for name, flags in (("all", []), ("some", ["--cpus", "2", "--gpus", "1", "--partition", "all"])):
            with self.subTest(flags=flags):
                script = lockstep("slurm-script", "--nodes", 2, "-n", 2, "--time", "00:05:00", *flags, *SHORT, "--json",
                                  name + ".json")
                job = self.submit(script)
                log = f"practical6_ddp-{job}.log"
                state = self.cluster.await_state(job, "COMPLETED", "FAILED")
                self.assertEqual((state["JobState"], state["ExitCode"]), ("COMPLETED", "0:0"), self.text(log))
                self.assertEqual(state["TimeLimit"], "00:05:00")
                self.assertIn("2 ranks on each of 2 hosts, 1 thread and 1 core each", self.text(log))
                self.assert_losses_of_one_process(name + ".json")
                logs = sorted(path.name for path in (SCRATCH / f"logs-{job}").glob("*/0/rank?.out"))
                self.assertEqual(logs, [f"rank{rank}.out" for rank in range(4)])

    def test_jobs_of_an_array_never_connect(self):
        words = "practical6_ddp --steps 6 --batch 12 --dim 16 --hidden 32 --json array-$SLURM_ARRAY_TASK_ID.json --seed $SLURM_ARRAY_TASK_ID"
        job = self.submit("#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=array-%a.log\n"
                          f"export LOCKSTEP_TOKEN=one-secret-for-both\nsrun lockstep run -n 1 {words}\n", "--array=3-4")
        self.cluster.wait_for(lambda: self.cluster.controller("squeue", "-h", "-j", job).strip() == "", "end of the array", 60)
        for task in (3, 4):
            log = self.text(f"array-{task}.log")
            self.assertEqual(len(losses(f"array-{task}.json")), 6, log)
            self.assertEqual(len(re.findall(r"host \d of 2 \(n\d\)", log)), 2, log)
        for ours, alone in zip(losses("array-3.json"), losses("one.json")):
            self.assertAlmostEqual(ours, alone, delta=1e-5 * abs(alone))
        self.assertNotEqual(losses("array-3.json"), losses("array-4.json"), "the other seed")

    def test_gpus_that_slurm_counts_and_no_driver_has(self):
        program = self.succeeds("srun", "-N", "1", "--gres=gpu:2", "lockstep", "run", "-n", "1", "env")
        self.assertIn("CUDA_VISIBLE_DEVICES=0,1", program.out())
        self.assertIn("SLURM gives it 2 GPUs here, but the NVIDIA driver shows none: `lockstep doctor` tells why", program.err())
        program = self.start("srun", "-N", "1", "--gres=gpu:2", "lockstep", "run", "-n", "gpu", "true")
        self.assertEqual(program.wait(), 2)
        self.assertIn("error[LS0003]: --nproc-per-node gpu: this machine has no GPU", program.err())


class Ending(SlurmCase):
    def endless(self, *words):
        """A job that is in its loop."""
        program = self.start(*words, *ENDLESS)
        self.await_text(program.out, "step 1/")
        time.sleep(0.5)
        return program

    def test_a_killed_rank_is_named_on_both_nodes(self):
        program = self.endless("srun", "-N", "2", "lockstep", "run", "-n", "2")
        slurm.kill_quietly(self.rank(3))
        took = self.await_end(program)
        self.assertEqual(program.wait(), 137, program.err())
        self.assertIn("]: rank 3 was killed by signal 9", program.err())
        print(f"killed rank: all gone after {took:.2f} s", file=sys.stderr)

    def test_a_killed_task_of_srun_is_named_by_the_others(self):
        program = self.endless("srun", "-n", "4", "-N", "2", "--kill-on-bad-exit=0")
        slurm.kill_quietly(self.rank(3))
        took = self.await_end(program)
        self.assertNotEqual(program.wait(), 0)
        self.assertRegex(program.err(), r"error\[LS0022\]: .*rank 3")
        print(f"killed task: all gone after {took:.2f} s", file=sys.stderr)

    def rank(self, number):
        """The process of a rank that srun or a launcher started."""
        for pid in ranks():
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            names = [b"RANK="] if any(entry.startswith(b"RANK=") for entry in variables) else [b"SLURM_PROCID="]
            if names[0] + str(number).encode() in variables:
                return pid
        self.fail(f"there is no rank {number}")

    def test_scancel_saves_and_leaves_nothing(self):
        """SLURM sends SIGTERM to ranks and launchers, and launchers pass it on."""
        job = self.submit(lockstep("slurm-script", "--nodes", 2, "-n", 2, "--cpus", 2, *ENDLESS, "--checkpoint", SCRATCH / "t",
                                   "--checkpoint-every", "1000000"))
        log = f"practical6_ddp-{job}.log"
        self.await_text(lambda: self.text(log), "step 1/")
        begin = time.monotonic()
        self.cluster.controller("scancel", job)
        self.cluster.wait_for(lambda: not ranks() and not launchers(), "end of all ranks", 15)
        took = time.monotonic() - begin
        state = self.cluster.await_state(job, "CANCELLED")
        self.assertEqual(state["ExitCode"], "75:0", self.text(log))
        self.assertRegex(self.text(log), "Terminated: stopping all ranks")
        self.assert_saved("t")
        print(f"scancel: all gone after {took:.2f} s", file=sys.stderr)

    def test_a_node_that_is_cut_off(self):
        program = self.endless("srun", "-N", "2", "lockstep", "run", "-n", "2", "--host-timeout", "3", "--grace", "1",
                               "--timeout", "5")
        begin = time.monotonic()
        self.cluster.cut("n2")
        try:
            self.cluster.wait_for(lambda: not ranks() and not launchers(), "end on both nodes", 20)
            took = time.monotonic() - begin
        finally:
            self.cluster.cut("n2", down=False)
        program.process.terminate()
        self.assertLess(took, 10)
        self.assertIn("host n2 (node 1) was lost: it was silent for 3.00 s", program.err())
        print(f"cut node: both sides gone after {took:.2f} s", file=sys.stderr)
        program.wait(60)

    @unittest.skipUnless(os.environ.get(LONG), f"waits until SLURM gives a node up; {LONG}=1 runs it")
    def test_an_elastic_job_goes_on_without_a_lost_node(self):
        job = self.submit("#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --no-kill --output=elastic.log\n"
                          "lockstep run -n 1 --nnodes 1:2 --max-restarts 1 --last-call 2 --host-timeout 3 --grace 1 "
                          f"tutorial_checkpoint {SCRATCH}/elastic 3000\n")
        self.await_text(lambda: self.text("elastic.log"), "step 10:")
        self.cluster.cut("n2")
        try:
            state = self.cluster.await_state(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", seconds=90)
        finally:
            self.cluster.cut("n2", down=False)
        self.assertEqual(state["JobState"], "COMPLETED", self.text("elastic.log"))
        self.assertIn("host n2 (node 1) was lost: it was silent for 3.00 s; restart 1 of 1", self.text("elastic.log"))
        self.assertIn("step 3000:", self.text("elastic.log"))
        self.cluster.wait_for(lambda: self.cluster.controller("sinfo", "-h", "-n", "n2", "-o", "%T").strip() == "idle",
                              "return of n2", 60)

    @unittest.skipUnless(slurm.limits_memory(), "limits on memory need version 1 of control groups")
    def test_a_job_out_of_memory_says_so(self):
        program = self.start("srun", "-N", "1", "--mem=300", "lockstep", "run", "-n", "2", "python3", "-c",
                             "import os, time\nif os.environ['RANK'] == '1':\n  hog = b'x' * (1 << 30)\ntime.sleep(20)")
        self.assertNotEqual(program.wait(), 0, program.err())  # srun says 1, since SLURM saw the same
        self.assertIn("]: rank 1 was killed by the system (signal 9): out of memory", program.err())


class Preemption(SlurmCase):
    STEPS = 400

    def train(self, name, *flags):
        return ["practical6_ddp", "--steps", str(self.STEPS), *MODEL, "--checkpoint", str(SCRATCH / name), "--checkpoint-every",
                "100000", "--save", name + ".safetensors", *flags]

    def whole(self):
        """The weights of a run that nobody interrupted."""
        if not (SCRATCH / "whole.safetensors").exists():
            self.succeeds("srun", "-N", "2", "lockstep", "run", "-n", "1", *self.train("whole"))
        return (SCRATCH / "whole.safetensors").read_bytes()

    def resumed_step(self, log, after):
        match = re.search(rf"resumed after step (\d+) of {self.STEPS}", log)
        self.assertTrue(match, log)
        self.assertIn(f"asked to stop: saved step {match[1]}", log)
        self.assertGreaterEqual(int(match[1]), after)

    def test_the_signal_before_a_limit_saves_and_requeues(self):
        """What --signal=USR1@60 sends is sent here at once: the limit itself is a case of the long ones."""
        script = lockstep("slurm-script", "--nodes", 2, "-n", 1, "--cpus", 1, "--requeue", 60, "--time", "00:05:00",
                          *self.train("cut"))
        job = self.submit(script)
        log = f"practical6_ddp-{job}.log"
        self.await_text(lambda: self.text(log), "step 1/")
        self.cluster.controller("scancel", "--signal=USR1", job)
        whole = self.whole()  # meanwhile
        state = self.cluster.await_state(job, "COMPLETED", "FAILED", seconds=60)
        self.assertEqual((state["JobState"], state["Restarts"]), ("COMPLETED", "1"), self.text(log))
        self.assertIn("all ranks stopped as requested (exit code 75)", self.text(log))
        self.resumed_step(self.text(log), 1)
        self.assertEqual((SCRATCH / "cut.safetensors").read_bytes(), whole)

    def test_the_signal_to_the_batch_shell_reaches_the_ranks(self):
        """--signal=B:USR1@60: the shell has become srun, which passes the signal on."""
        job = self.submit(lockstep("slurm-script", "--nodes", 2, "-n", 1, "--cpus", 1, *ENDLESS, "--checkpoint", SCRATCH / "b"))
        log = f"practical6_ddp-{job}.log"
        self.await_text(lambda: self.text(log), "step 1/")
        self.cluster.controller("scancel", "--batch", "--signal=USR1", job)
        state = self.cluster.await_state(job, "COMPLETED", "FAILED", seconds=30)
        self.assertEqual(state["ExitCode"], "75:0", self.text(log))
        self.assertIn("asked to stop: saved step", self.text(log))

    @unittest.skipUnless(os.environ.get(LONG), f"waits for a time limit; {LONG}=1 runs it")
    def test_a_time_limit_requeues(self):
        """The batch file as printed: SLURM itself sends the signal, and the job starts again."""
        script = lockstep("slurm-script", "--nodes", 2, "-n", 1, "--cpus", 1, "--requeue", 30, "--time", "00:01:00",
                          *ENDLESS, "--checkpoint", SCRATCH / "limit", "--checkpoint-every", "1000000")
        begin = time.monotonic()
        job = self.submit(script)
        log = f"practical6_ddp-{job}.log"
        self.await_text(lambda: self.text(log), "resumed after step", 150)
        print(f"requeued and resumed {time.monotonic() - begin:.0f} s after the start", file=sys.stderr)
        self.assertEqual(self.cluster.job(job)["Restarts"], "1")
        self.cluster.controller("scancel", job)
        self.cluster.await_state(job, "CANCELLED")


def main():
    global CLUSTER
    if why := slurm.missing():
        print("skipped:", why)
        return 77
    slurm.enter()
    names = sys.argv[2:]
    suite = unittest.TestSuite(test for case in (Starting, Ending, Preemption)
                               for test in unittest.defaultTestLoader.loadTestsFromTestCase(case)
                               if not names or any(name in test.id() for name in names))
    with Cluster() as CLUSTER:
        single = subprocess.run([BIN / "practical5_single", *SHORT[1:], "--devices", "cpu:1", "--quiet", "--json",
                                 SCRATCH / "one.json"], capture_output=True, text=True)
        if single.returncode != 0:
            sys.exit(single.stderr)
        return 0 if unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
