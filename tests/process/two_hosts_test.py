#!/usr/bin/env python3
"""Two network namespaces as two hosts: one job over both, by two `lockstep run`, ranks in two levels.

usage: two_hosts_test.py BIN_FOLDER    (skips, by name, without root or network namespaces)
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

from scratch import ScratchTest
from slow_link import SlowLink

BIN = pathlib.Path(sys.argv.pop(1))
NAMES = (f"ls{os.getpid()}a", f"ls{os.getpid()}b")
ADDRESSES = ("10.77.13.1", "10.77.13.2")
SLOW_ADDRESSES = ("10.77.14.1", "10.77.14.2")
# Seconds after which an absent rank is missed. With a sanitizer a busy machine delays the others that long too.
PATIENCE = "10" if {"ASAN_OPTIONS", "TSAN_OPTIONS"} & os.environ.keys() else "2"
# Gradients of 290 KiB: more than travels with a fingerprint or through one rank of a host.
TRAIN = ["--steps", "6", "--batch", "12", "--dim", "16", "--hidden", "256", "--seed", "3"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def make_hosts():
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", NAMES[0], "netns", NAMES[0], "type", "veth", "peer", "name", NAMES[1], "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES):
        ip("-n", name, "addr", "add", address + "/24", "dev", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", name, "up")


def on_host_named(host, hosts_file, command):
    """The words that start a program on a host that has this name and this /etc/hosts."""
    inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
    return ["nsenter", f"--net=/run/netns/{NAMES[host]}", "unshare", "--mount", "--uts", "sh", "-c", inside, NAMES[host],
            hosts_file, *command]


def remove_hosts():
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on_host(host, program, token, *flags, ranks=2, nnodes="2", endpoint=ADDRESSES[0]):
    """Starts one host's half of a job of two hosts with as many ranks each. Each host has a name of its own."""
    command = ["ip", "netns", "exec", NAMES[host], "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', NAMES[host],
               str(BIN / "lockstep"), "run", "--nnodes", nnodes, "--node-rank", str(host),
               "--rdzv-endpoint", endpoint + ":29477", "-n", str(ranks), *flags, *program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=dict(os.environ, LOCKSTEP_TOKEN=token), start_new_session=True)


class TwoHosts(ScratchTest):
    def setUp(self):
        super().setUp()
        self.jobs = []
        self.addCleanup(self.stop)

    def stop(self):
        for job in self.jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()

    def start(self, program, *flags, tokens=("0123456789abcdef",) * 2, **more):
        self.jobs = [on_host(host, program, tokens[host], *flags, **more) for host in (0, 1)]
        return self.jobs

    def wait(self, jobs):
        results = []
        for job in jobs:
            out, err = job.communicate(timeout=90)
            results.append((job.returncode, out, err))
        return results

    def test_the_numbers_are_those_of_one_process(self):
        self.train_as_one_process()

    def test_ranks_without_a_launcher_whose_hosts_are_127_0_1_1_to_themselves(self):
        """As Debian writes /etc/hosts: on rank 0's host MASTER_ADDR stands for an address that others cannot reach."""
        for host in (0, 1):
            known = [f"{'127.0.1.1' if host == other else ADDRESSES[other]} {NAMES[other]}\n" for other in (0, 1)]
            hosts_file = pathlib.Path(self.path(f"hosts{host}"))
            hosts_file.write_text("127.0.0.1 localhost\n" + "".join(known))
            variables = dict(RANK=host, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR=NAMES[0],
                             MASTER_PORT=29478, LOCKSTEP_TOKEN="0123456789abcdef", LOCKSTEP_TIMEOUT_S=30)
            command = on_host_named(host, str(hosts_file), [str(BIN / "practical6_ddp"), *TRAIN])
            self.jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                              env=dict(os.environ, **{k: str(v) for k, v in variables.items()}),
                                              start_new_session=True))
        for code, out, err in self.wait(self.jobs):
            self.assertEqual(code, 0, out + err)

    def test_the_numbers_over_a_slow_link_are_those_of_one_process(self):
        link = SlowLink(BIN, NAMES, SLOW_ADDRESSES, delay_ms=50, loss_percent=1)
        self.addCleanup(link.close)
        if link.why_not:
            self.skipTest(link.why_not)
        self.train_as_one_process(endpoint=SLOW_ADDRESSES[0])

    def train_as_one_process(self, **more):
        jobs = self.start([str(BIN / "practical6_ddp"), *TRAIN, "--json", self.path("ddp.json")], **more)
        results = self.wait(jobs)
        for code, out, err in results:
            self.assertEqual(code, 0, out + err)
        self.assertIn("backend: two_level", results[0][1])
        single = subprocess.run([str(BIN / "practical5_single"), *TRAIN, "--devices", "cpu:1", "--quiet", "--json",
                                 self.path("one.json")], capture_output=True, text=True)
        self.assertEqual(single.returncode, 0, single.stderr)
        ddp, one = (json.loads(pathlib.Path(self.path(name)).read_text()) for name in ("ddp.json", "one.json"))
        self.assertEqual(ddp["world_size"], 4)
        self.assertEqual(len(ddp["losses"]), 6)
        for ours, alone in zip(ddp["losses"], one["losses"]):
            self.assertAlmostEqual(ours, alone, delta=1e-5 * abs(alone))

    def long_job(self, *flags, ranks=2):
        jobs = self.start([str(BIN / "practical6_ddp"), "--steps", "100000", *TRAIN[2:], "--json", "/dev/null"],
                          "--ranks", "all", *flags, ranks=ranks)
        while "step 1/" not in (line := jobs[0].stdout.readline()):
            self.assertTrue(line, "host 0 ended without training")
        time.sleep(0.2)  # into the loop
        return jobs

    def test_a_killed_rank_stops_both_hosts_and_is_named(self):
        jobs = self.long_job()
        victim = subprocess.run(["pgrep", "-f", "-P", self.supervisor_of(jobs[1]), "practical6_ddp"], capture_output=True,
                                text=True).stdout.split()
        self.assertEqual(len(victim), 2, victim)
        os.kill(int(victim[0]), signal.SIGKILL)
        for code, out, err in self.wait(jobs):
            self.assertEqual(code, 137, err)
            self.assertRegex(err, "rank [23]")

    def test_a_rank_that_ends_without_coming_is_named_at_once(self):
        """Its host has no other rank that waits for it. Long before the timeout both hosts end."""
        train = " ".join([str(BIN / "practical6_ddp"), *TRAIN])
        for leaver in (1, 0):
            with self.subTest(leaver=leaver):
                jobs = self.start(["sh", "-c", f'[ "$RANK" = {leaver} ] && exit 0; exec {train}'], "--timeout", "80", ranks=1)
                for code, out, err in self.wait(jobs):
                    self.assertEqual(code, 1, err)
                    self.assertIn(f"]: rank {leaver} ended with exit code 0 and never came to the rendezvous of all ranks", err)

    def test_ranks_that_make_no_world_may_end_as_they_like(self):
        jobs = self.start(["sh", "-c", '[ "$RANK" = 1 ] && sleep 1; exit 0'], ranks=2)
        for code, out, err in self.wait(jobs):
            self.assertEqual((code, "error" in err), (0, False), err)

    def test_a_host_that_dies_is_named(self):
        """No process of it is left to close a connection, and its cable carries nothing any more."""
        jobs = self.long_job("--host-timeout", "3", "--grace", "1", ranks=1)
        ip("-n", NAMES[1], "link", "set", NAMES[1], "down")
        try:
            for pid in [*self.ranks_of(jobs[1]).values(), jobs[1].pid]:
                os.kill(pid, signal.SIGKILL)
            out, err = jobs[0].communicate(timeout=60)
        finally:
            ip("-n", NAMES[1], "link", "set", NAMES[1], "up")
        self.assertEqual(jobs[0].returncode, 1, err)
        self.assertIn(f"]: host {NAMES[1]} (node 1) was lost: it was silent for 3.00 s", err)

    def ranks_of(self, job):
        """The processes of a launcher's ranks, by rank."""
        waiting, found = [str(job.pid)], {}
        while waiting:
            children = subprocess.run(["pgrep", "-P", waiting.pop()], capture_output=True, text=True).stdout.split()
            waiting += children
            for child in children:
                words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                rank = [int(entry[5:]) for entry in variables if entry.startswith(b"RANK=")]
                if rank and words[0].endswith(b"practical6_ddp"):
                    found[rank[0]] = int(child)
        return found

    def test_a_stopped_rank_is_named_on_both_hosts(self):
        # Where the ranks are when one stops is chance: some are a call ahead, and must not blame each other.
        for ranks, victim in ((2, 3), (2, 0), (2, 2), (2, 1), (1, 1), (1, 0)):
            with self.subTest(ranks_per_host=ranks, stopped=victim):
                jobs = self.long_job("--timeout", PATIENCE, ranks=ranks)
                os.kill(self.ranks_of(jobs[victim // ranks])[victim], signal.SIGSTOP)
                results = self.wait(jobs)
                for code, out, err in results:
                    self.assertEqual(code, 1, err)
                    # A host without another rank that could miss it learns of it from the other host.
                    self.assertRegex(err, rf"\n(error\S+: rank {victim} (is stopped|of another host is at fault))")
                err = results[victim // ranks][2]
                self.assertIn(f"]: rank {victim} is stopped (SIGSTOP) and did not come", err)

    def supervisor_of(self, job):
        """The process whose children are a launcher's ranks: the deepest with such children."""
        waiting, found = [str(job.pid)], str(job.pid)
        while waiting:
            parent = waiting.pop()
            children = subprocess.run(["pgrep", "-P", parent], capture_output=True, text=True).stdout.split()
            if len(children) >= 2:
                found = parent
            waiting += children
        return found

    def test_a_cut_network_stops_both_sides(self):
        """Each side names the host that it lost, sooner than its ranks' own deadline."""
        jobs = self.long_job("--host-timeout", "3", "--grace", "1")
        ip("-n", NAMES[1], "link", "set", NAMES[1], "down")
        try:
            for host, (code, out, err) in enumerate(self.wait(jobs)):
                self.assertEqual(code, 1, err)
                self.assertRegex(err, rf"\]: host {NAMES[1 - host]} \(node {1 - host}\).* was lost: it was silent for 3.00 s")
        finally:
            ip("-n", NAMES[1], "link", "set", NAMES[1], "up")

    def test_an_injected_cut_stops_both_sides_and_the_job_resumes(self):
        def train(name, *flags):
            program = [str(BIN / "practical6_ddp"), "--steps", "40", *TRAIN[2:], "--checkpoint", self.path(name),
                       "--checkpoint-every", "2", "--save", self.path(name + ".safetensors")]
            return self.wait(self.start(program, "--timeout", "20", *flags, ranks=1))

        for code, out, err in train("whole"):
            self.assertEqual(code, 0, out + err)
        for code, out, err in train("cut", "--inject", "netcut@rank=1,step=21"):
            self.assertNotIn(code, (0, 2), out + err)
            self.assertIn("error[LS", err)
        verified = subprocess.run([str(BIN / "lockstep"), "ckpt", "verify", self.path("cut")], capture_output=True, text=True)
        self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)
        for host, (code, out, err) in enumerate(train("cut")):
            self.assertEqual(code, 0, out + err)
            if host == 0:
                self.assertRegex(out, "resumed after step (16|18|20) of 40")
        whole, cut = (pathlib.Path(self.path(name + ".safetensors")).read_bytes() for name in ("whole", "cut"))
        self.assertEqual(whole, cut)

    def test_a_preemption_signal_reaches_both_hosts_and_the_job_resumes(self):
        """As SLURM sends it: to all launchers, or with --signal=USR1 to one, which is enough."""
        program = str(BIN / "tutorial_checkpoint")
        before = 0
        for sent, hosts in ((signal.SIGTERM, (0, 1)), (signal.SIGUSR1, (1,))):
            jobs = self.start([program, self.path("checkpoints"), "100000000"], "--grace", "60")
            begin = time.monotonic()
            while (self.checkpoints() or [0])[-1] <= before:
                self.assertIsNone(jobs[0].poll())
                self.assertLess(time.monotonic() - begin, 120)
                time.sleep(0.01)
            for host in hosts:
                os.kill(self.launcher_of(jobs[host]), sent)
            results = self.wait(jobs)
            for code, out, err in results:
                self.assertEqual(code, 75, err)
            saved = re.search(r"asked to stop: saved step (\d+)", results[0][2])
            self.assertTrue(saved, results[0][2])
            self.assertGreater(int(saved[1]), before)
            before = int(saved[1])
            self.assertEqual(self.checkpoints()[-1], before)

    def launcher_of(self, job):
        """`ip netns exec`, `unshare` and `sh` become the launcher, one after the other."""
        while not pathlib.Path(f"/proc/{job.pid}/cmdline").read_bytes().startswith(os.fsencode(BIN / "lockstep")):
            time.sleep(0.01)
        return job.pid

    def checkpoints(self):
        folder = pathlib.Path(self.path("checkpoints"))
        return sorted(int(path.name[5:]) for path in folder.glob("step-????????"))

    def test_after_a_cut_only_the_coordinators_side_goes_on(self):
        # A rank that stops in the first attempt keeps it from its end until the cut.
        program = str(BIN / "tutorial_checkpoint")
        jobs = self.start([program, self.path("checkpoints"), "600"], "--max-restarts", "1", "--last-call", "3", "--heartbeat",
                          "0.2", "--host-timeout", "3", "--grace", "1", "--inject", "stop@rank=0,step=300", nnodes="1:2")
        begin = time.monotonic()
        while len(self.checkpoints()) < 2:
            self.assertIsNone(jobs[0].poll())
            self.assertLess(time.monotonic() - begin, 120)
            time.sleep(0.01)
        ip("-n", NAMES[1], "link", "set", NAMES[1], "down")
        try:
            before = self.checkpoints()[-1]
            (code, out, err), (cut_code, cut_out, cut_err) = self.wait(jobs)
        finally:
            ip("-n", NAMES[1], "link", "set", NAMES[1], "up")
        self.assertLess(before, 300)
        self.assertEqual(cut_code, 1, cut_err)
        self.assertIn(f"host {NAMES[0]} (node 0), which coordinates the job, was lost: it was silent for 3.00 s", cut_err)
        self.assertNotIn("restart", cut_err)
        self.assertEqual(code, 0, err)
        self.assertIn(f"host {NAMES[1]} (node 1) was lost: it was silent for 3.00 s; restart 1 of 1", err)
        self.assertEqual(self.checkpoints()[-1], 600)
        self.assertEqual(out.count("step 10:"), 1, "it went on from a checkpoint")
        verified = subprocess.run([str(BIN / "lockstep"), "ckpt", "verify", self.path("checkpoints")], capture_output=True,
                                  text=True)
        self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)
        left = subprocess.run(["pgrep", "-f", self.path("checkpoints")], capture_output=True, text=True).stdout
        self.assertEqual(left, "")

    def test_another_token_is_refused(self):
        jobs = self.start([str(BIN / "practical6_ddp"), *TRAIN], "--rdzv-conf", "join_timeout=4",
                          tokens=("0123456789abcdef", "fedcba9876543210"))
        results = self.wait(jobs)
        for code, out, err in results:
            self.assertEqual(code, 2, out + err)
        self.assertIn("token", results[1][2])


if __name__ == "__main__":
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        print("skipped: two hosts need root and the commands ip and unshare")
        sys.exit(77)
    try:
        make_hosts()
    except subprocess.CalledProcessError as error:
        remove_hosts()
        print("skipped: no network namespaces here:", error.stderr.decode().strip())
        sys.exit(77)
    try:
        result = unittest.main(exit=False).result
    finally:
        remove_hosts()
    sys.exit(not result.wasSuccessful())
