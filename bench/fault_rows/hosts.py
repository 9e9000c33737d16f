"""Two hosts with several ranks each, over every backend that reaches from host to host: links that are slow and lossy, links
that are cut, hosts that die, and jobs that do nothing any more on all of them."""

import json
import os
import re
import shutil
import signal
import time

from . import jobs
from .network import TOKEN, TwoHosts, seconds_to_end
from .rows import NotRun, row

RANKS = 2  # of each host
TIMEOUT_S = 5
LAUNCHED = ("two_level", "gloo")  # backends under `lockstep run`
PROGRAM = ["--batch", "12", "--dim", "16", "--hidden", "256", "--seed", "3"]  # gradients of 290 KiB
# What mpirun starts its daemons on other hosts with, instead of ssh. A host is named as its namespace is.
AGENT = """#!/bin/sh
name=$(sed -n "s/^$1 //p" "$0.hosts"); shift
exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"
"""
# Without it mpirun waits for minutes for a host that is gone.
KEEPALIVE = {"oob_tcp_keepalive_time": 2, "oob_tcp_keepalive_intvl": 1, "oob_tcp_keepalive_probes": 3}


class TwoHostJob:
    """practical6_ddp on both hosts: two launchers, or one mpirun on the first."""

    def __init__(self, bench, hosts, backend, addresses, scratch, words, flags=()):
        program = [bench.program("practical6_ddp"), *words]
        self.has_launcher = backend != "mpi"
        if backend == "mpi":
            self.jobs = [hosts.on(0, [*self.mpirun(bench, hosts, addresses, scratch), *program, "--backend", "mpi"], {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "LOCKSTEP_TIMEOUT_S": str(TIMEOUT_S)
            })]
            return
        self.jobs = [hosts.on(host, [
            bench.program("lockstep"), "run", "--nnodes", "2", "--node-rank", host, "--rdzv-endpoint", addresses[0] + ":29479",
            "-n", RANKS, "--timeout", TIMEOUT_S, "--host-timeout", TIMEOUT_S, "--grace", "1", "--ranks", "all", "--backend",
            backend, *flags, *program
        ], TOKEN) for host in (0, 1)]

    @staticmethod
    def mpirun(bench, hosts, addresses, scratch):
        if not shutil.which("mpirun"):
            raise NotRun("no mpirun")
        if not os.path.exists(os.path.join(bench.folder, "../lib/lockstep/lockstep-mpi.so")):
            raise NotRun("lockstep has no module for MPI")
        agent = scratch.file("agent")
        with open(agent + ".hosts", "w") as file:
            file.writelines(f"{address} {name}\n" for address, name in zip(addresses, hosts.names))
        with open(agent, "w") as file:
            file.write(AGENT)
        os.chmod(agent, 0o700)
        network = addresses[0].rpartition(".")[0] + ".0/24"
        settings = {"plm_rsh_agent": agent, "btl_tcp_if_include": network, "oob_tcp_if_include": network, **KEEPALIVE}
        return ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', hosts.names[0], "mpirun", "--host",
                ",".join(f"{address}:{RANKS}" for address in addresses), "--bind-to", "none",
                *[word for name, value in settings.items() for word in ("--mca", name, str(value))]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            job.__exit__()

    def ranks(self):
        """{rank: process}. mpirun numbers ranks in a variable of its own."""
        found = {}
        for job in self.jobs:
            for pid in job.processes():
                variables = jobs.variables_of(pid)
                number = variables.get(b"RANK", variables.get(b"OMPI_COMM_WORLD_RANK"))
                if number is not None and jobs.read(f"/proc/{pid}/cmdline").split(b"\0")[0].endswith(b"practical6_ddp"):
                    found[int(number)] = pid
        return found

    @property
    def words(self):
        return "\n".join(job.output + job.errors for job in self.jobs)

    def expect_end(self, found, begin, most_s, pattern, what, host_died=False):
        """All of it ends in time with an error that matches, on at least one host. Returns the seconds of the slowest."""
        ends = []
        for job in self.jobs:
            ends.append(seconds_to_end(job, begin, 60))
            found.check(ends[-1] is not None and ends[-1] < most_s, f"{what}: ended after {ends[-1]} s: {job.errors[-800:]}")
            found.check(job.process.poll() not in (0, None), f"{what}: exit code {job.process.poll()}")
        found.check(re.search(pattern, self.words), f"{what}: {pattern} is not said: {self.words[-1500:]}")
        # Files of a host that died would be gone with it, but here hosts share them. Without a launcher nobody removes
        # those of a rank that mpirun kills.
        if host_died or not self.has_launcher:
            remove_files(self.jobs)
        for job in self.jobs:
            found.check_nothing_left(job)
        found.repetitions += 1
        return max((end for end in ends if end is not None), default=60.0)


def train_to_the_end(bench, found, hosts, backend, addresses, scratch):
    """Twenty steps, whose losses are those of one process."""
    words = ["--steps", "20", *PROGRAM]
    begin = time.monotonic()
    with TwoHostJob(bench, hosts, backend, addresses, scratch, [*words, "--json", scratch.file("two.json")]) as job:
        codes = [each.wait(120) for each in job.jobs]
        found.check(not any(codes), f"{backend}: exit codes {codes}: {job.words[-800:]}")
        for each in job.jobs:
            found.check_nothing_left(each)
    took = time.monotonic() - begin
    with jobs.Job([bench.program("practical5_single"), *words, "--devices", "cpu:1", "--quiet", "--json",
                   scratch.file("one.json")]) as one:
        found.check(one.wait(60) == 0, one.errors[-500:])
    losses = []
    for name in ("two.json", "one.json"):
        with open(scratch.file(name)) as file:
            losses.append(json.load(file)["losses"])
    far = max(abs(ours - alone) / abs(alone) for ours, alone in zip(*losses))
    found.check(len(losses[0]) == len(losses[1]) == 20 and far < 1e-5, f"{backend}: losses differ by {far:g}")
    return took, far


@row(21, "a link of 50 ms that loses 1 % of its packets", "losses of one process; a lost or stopped rank is named in time")
def slow_link(bench, found):
    figures = []
    for backend in (*LAUNCHED, "mpi"):
        with TwoHosts() as hosts, hosts.slow_link(bench.folder, 50, 1) as addresses, jobs.Scratch() as scratch:
            try:
                took, far = train_to_the_end(bench, found, hosts, backend, addresses, scratch)
            except NotRun as reason:
                figures.append(f"{backend} not run: {reason}")
                continue
            ends = {}
            for name, number, code in (("killed", signal.SIGKILL, "13[67]|signal"), ("stopped", signal.SIGSTOP, "SIGSTOP")):
                with TwoHostJob(bench, hosts, backend, addresses, scratch, ["--steps", "100000", *PROGRAM]) as job:
                    job.jobs[0].wait_for_step(3)
                    begin = time.monotonic()
                    os.kill(job.ranks()[RANKS], number)
                    most_s = TIMEOUT_S + 15
                    ends[name] = job.expect_end(found, begin, most_s, rf"(?i)rank {RANKS}\b", f"{backend}, {name}, {code}")
            figures.append(f"{backend}: 20 steps in {took:.1f} s, losses within {far:.0e}; killed rank: ended after "
                           f"{ends['killed']:.1f} s, stopped rank: {ends['stopped']:.1f} s")
            found.numbers[backend] = {"took_s": took, "difference": far, **ends}
    found.figures = [*figures, f"deadline {TIMEOUT_S} s"]
    bench.leave_out_peers(found, "compared in bench/two_hosts")


@row(22, "cut link, dying host; two_level, gloo, mpi", "named and ended in time on both hosts")
def lost_hosts(bench, found):
    figures = []
    for backend in (*LAUNCHED, "mpi"):
        ends = {}
        for fault in ("cut link", "dying host"):
            with TwoHosts() as hosts, jobs.Scratch() as scratch:
                try:
                    job = TwoHostJob(bench, hosts, backend, hosts.ADDRESSES, scratch, ["--steps", "10000000", *PROGRAM])
                except NotRun as reason:
                    ends = reason
                    break
                with job:
                    job.jobs[0].wait_for_step(20)
                    ranks = job.ranks()
                    hosts.cut()
                    begin = time.monotonic()
                    if fault == "dying host":
                        kill_host(hosts, job)
                    named = r"host \S+ \(node [01]\) was lost|ranks? [0-3](, \d)* .*(absent|did not come|ended|failed)"
                    if backend == "mpi":  # mpirun may notice it first, and ends the ranks
                        named += r"|lost communication with a remote daemon|on node 10\.77\.14\.2|daemons"
                    found.check(len(ranks) == 2 * RANKS, f"{backend}: ranks {ranks}")
                    ends[fault] = job.expect_end(found, begin, TIMEOUT_S + 15, named, f"{backend}, {fault}",
                                                 fault == "dying host")
        if isinstance(ends, NotRun):
            figures.append(f"{backend} not run: {ends}")
            continue
        figures.append(f"{backend}: " + ", ".join(f"{fault}: all ended after {end:.1f} s" for fault, end in ends.items()))
        found.numbers[backend] = ends
    found.figures = [*figures, f"deadlines {TIMEOUT_S} s"]
    bench.leave_out_peers(found, "row 12")


def remove_files(of_jobs):
    for name in os.listdir(jobs.SHM):
        os.unlink(os.path.join(jobs.SHM, name))
    for job in of_jobs:
        for name in os.listdir(job.temporary):
            shutil.rmtree(os.path.join(job.temporary, name), ignore_errors=True)


def kill_host(hosts, job):
    """Everything that runs on the second host, at once."""
    for each in job.jobs:
        for pid in each.processes():
            if hosts.is_on(1, pid):
                os.kill(pid, signal.SIGKILL)


@row(23, "all ranks of two hosts loop outside of collectives", "--step-timeout: named with their steps, ended")
def no_progress(bench, found):
    ends = []
    for _ in range(bench.times(3, 1)):
        with TwoHosts() as hosts:
            def launcher(host):
                return hosts.on(host, [
                    bench.program("lockstep"), "run", "--nnodes", "2", "--node-rank", host, "--rdzv-endpoint",
                    hosts.ADDRESSES[0] + ":29479", "-n", RANKS, "--step-timeout", "2", "--grace", "1",
                    bench.program("launch_worker"), "step:7", "loop"
                ], TOKEN)

            with launcher(0) as first, launcher(1) as second:
                for job in (first, second):
                    ends.append(seconds_to_end(job, job.begun, 30))
                    found.check(ends[-1] is not None, f"a hang: {job.errors[-500:]}")
                said = first.errors + second.errors
                found.check("made no step and no collective for 2.00 s (--step-timeout)" in said, f"not named: {said[-1500:]}")
                found.check("step 7" in said, f"no step: {said[-1500:]}")
                for job in (first, second):
                    found.check(job.process.poll() == 1, f"exit code {job.process.poll()}")
                    found.check_nothing_left(job)
        found.repetitions += 1
    found.numbers["seconds"] = ends
    found.figures = [f"ended after {', '.join(f'{end:.1f}' for end in ends if end)} s, start included, with a limit of 2 s"]
    bench.leave_out_peers(found, "none: torchrun has no such limit")
