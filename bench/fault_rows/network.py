"""Two hosts that lose each other, and clients that are not lockstep's."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

from slow_link import SlowLink

from . import jobs
from .checkpoints import drafts, good_steps
from .peers import SCRIPT
from .rows import NotRun, row

TOKEN = {"LOCKSTEP_TOKEN": "0123456789abcdef" * 4}


class TwoHosts:
    """Network namespaces with a cable between them."""

    ADDRESSES = ("10.77.14.1", "10.77.14.2")
    SLOW_ADDRESSES = ("10.77.15.1", "10.77.15.2")

    def __init__(self):
        if not shutil.which("ip"):
            raise NotRun("the command ip is not installed")
        self.names = [f"lf{os.getpid()}{side}" for side in "ab"]
        try:
            for name in self.names:
                self._ip("netns", "add", name)
            a, b = self.names
            self._ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
            for name, address in zip(self.names, self.ADDRESSES):
                self._ip("-n", name, "addr", "add", address + "/24", "dev", name)
                self._ip("-n", name, "link", "set", "lo", "up")
                self._ip("-n", name, "link", "set", name, "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NotRun(f"no network namespaces: {error.stderr.decode().strip()}") from error

    @staticmethod
    def _ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def on(self, host, command, variables=None):
        return jobs.Job(["ip", "netns", "exec", self.names[host], *command], variables)

    def cut(self):
        self._ip("-n", self.names[1], "link", "set", self.names[1], "down")

    @contextlib.contextmanager
    def slow_link(self, folder, delay_ms, loss_percent):
        """The addresses of a link beside the cable."""
        with SlowLink(folder, self.names, self.SLOW_ADDRESSES, delay_ms=delay_ms, loss_percent=loss_percent) as link:
            if link.why_not:
                raise NotRun(link.why_not)
            yield self.SLOW_ADDRESSES

    def is_on(self, host, pid):
        """Whether a process runs on a host."""
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{self.names[host]}").st_ino
        except OSError:  # it ended meanwhile
            return False


def seconds_to_end(job, begin, limit_s):
    return job.ended - begin if job.wait(max(0.1, begin + limit_s - time.monotonic())) is not None else None


@row(12, "network cut between two hosts", "both sides stop in time; only one may publish")
def cut_network(bench, found):
    timeout_s, most_s = 5, 20
    took, published = [], []
    for _ in range(bench.times(3, 1)):
        with TwoHosts() as hosts, jobs.Scratch() as scratch:
            folder = scratch.file("run")
            commands = [[
                bench.program("lockstep"), "run", "--nnodes", "2", "--node-rank", host, "--rdzv-endpoint",
                hosts.ADDRESSES[0] + ":29478", "--timeout", timeout_s, "--host-timeout", timeout_s, "--ranks", "all",
                bench.program("tutorial_checkpoint"), folder, "100000000"
            ] for host in (0, 1)]
            with hosts.on(0, commands[0], TOKEN) as first, hosts.on(1, commands[1], TOKEN) as second:
                first.wait_for_step(50)
                hosts.cut()
                begin = time.monotonic()
                before = set(os.listdir(folder))
                for job in (first, second):
                    seconds = seconds_to_end(job, begin, 60)
                    if found.check(seconds is not None and seconds < most_s,
                                   f"a host took {seconds} s: {job.errors[-500:]}"):
                        took.append(seconds)
                    found.check(job.process.poll() not in (0, None), f"exit code {job.process.poll()}")
                    found.check("error[" in job.errors, f"no error: {job.errors[-500:]}")
                # Both namespaces share /dev/shm here, so each is searched when both have ended.
                found.check_nothing_left(first)
                found.check_nothing_left(second)
            good = good_steps(bench, folder) or []
            steps = [name for name in os.listdir(folder) if name.startswith("step-")]
            published.append(len([name for name in steps if name not in before]))
            found.check(published[-1] <= 1, f"{published[-1]} checkpoints appeared after the cut")
            found.check(len(good) == len(steps), f"of {steps}, {good} are good")
            target = (good or [0])[-1] + 10
            with bench.run(2, bench.program("tutorial_checkpoint"), folder, target) as job:
                found.check(
                    job.wait(60) == 0 and (good_steps(bench, folder) or [0])[-1] == target and not drafts(folder),
                    f"it does not go on: {job.errors[-500:]}")
        found.repetitions += 1
    found.numbers.update(seconds=took, published=published)
    found.figures = [
        f"hosts ended after {', '.join(f'{seconds:.1f}' for seconds in took)} s with deadlines of {timeout_s} s",
        f"checkpoints that appeared after the cut {max(published)} at most, all good"
    ]

    def try_peer(peer):
        with TwoHosts() as hosts, jobs.Scratch() as scratch, peer.torchrun("exit:0"):
            flags = ["--nnodes", "2", "--master_addr", hosts.ADDRESSES[0], "--master_port", "29479"]
            started = [
                hosts.on(
                    host,
                    peer.command(1, [*flags, "--node_rank", str(host)],
                                 [f"rendezvous:{timeout_s}", f"all-reduce:{scratch.file('pids')}"]), {
                                     "OMP_NUM_THREADS": "1",
                                     "GLOO_SOCKET_IFNAME": hosts.names[host]
                                 }) for host in (0, 1)
            ]
            with started[0] as first, started[1] as second:
                first.wait_for_lines(scratch.file("pids"), 2)
                time.sleep(0.5)
                hosts.cut()
                begin = time.monotonic()
                ends = [seconds_to_end(job, begin, 90) for job in (first, second)]
        words = [f"{seconds:.1f} s" if seconds is not None else "hang (> 90 s)" for seconds in ends]
        return f"timeout {timeout_s} s: hosts ended after {words[0]} and {words[1]}"

    bench.compare(found, try_peer)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def is_listening(port):
    try:
        connect(port).close()
    except OSError:
        return False
    return True


def is_refused(port, data):
    """Whether the server closes a connection that sends this, and has not answered with more than a greeting."""
    with connect(port) as connection:
        connection.settimeout(9)
        answer = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(4096):
                answer += piece
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return len(answer) < 100


GREETING = b"lockstep\x01"
ABUSES = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes": os.urandom(4096),
    "zeros": bytes(4096),
    "huge length": b"\xff\xff\xff\xff" + bytes(64),
    "greeting, then garbage": GREETING + os.urandom(32) + os.urandom(4096),
    "other version": b"lockstep\x63" + os.urandom(32),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500)
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@row(19, "rendezvous abuse", "refused, job unaffected")
def abused_rendezvous(bench, found):
    refused, tried, delays = 0, 0, []
    program = [bench.program("practical6_ddp"), "--steps", "60", "--batch", "12", "--dim", "32", "--hidden", "32"]

    def launcher(port, node_rank, nnodes=3, variables=TOKEN, words=()):
        return jobs.Job([
            bench.program("lockstep"), "run", "--nnodes", nnodes, "--node-rank", node_rank, "--rdzv-endpoint",
            f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=60", *words, *program
        ], variables)

    def abuse(port, where):
        nonlocal refused, tried
        for name, data in ABUSES.items():
            tried += 1
            refused += found.check(is_refused(port, data), f"{where}: {name} was not refused")

    for _ in range(bench.times(2, 1)):
        port = free_port()
        with launcher(port, 0) as first:
            first.wait_for(lambda: is_listening(port), "does not listen")
            half_open = [connect(port) for _ in range(100)]
            for connection in half_open[::2]:
                connection.sendall(GREETING[:5])
            abuse(port, "endpoint")
            with launcher(port, 1) as second:
                time.sleep(0.5)
                unauthenticated = {
                    "wrong token": launcher(port, 2, variables={"LOCKSTEP_TOKEN": "fedcba9876543210" * 4}),
                    "duplicate host": launcher(port, 1),
                    "wrong number of hosts": launcher(port, 2, nnodes=4),
                    "another job": launcher(port, 2, words=["--rdzv-id", "other"])
                }
                for name, joiner in unauthenticated.items():
                    with joiner:
                        code = joiner.wait(30)
                        tried += 1
                        refused += found.check(code == 2 and "help:" in joiner.errors,
                                               f"{name}: exit code {code}: {joiner.errors[-300:]}")
                begin = time.monotonic()
                with launcher(port, 2) as third:
                    first.wait_for(lambda: first.ranks(), "no ranks")
                    delays.append((time.monotonic() - begin) * 1e3)
                    abuse(port, "endpoint, while it trains")
                    store = jobs.variables_of(first.ranks().get(0, 0)).get(b"LOCKSTEP_STORE")
                    if found.check(store, "the ranks have no store"):
                        abuse(int(store.rpartition(b":")[2]), "store")
                    for job in (first, second, third):
                        code = job.wait(120)
                        found.check(code == 0, f"the job was affected: exit code {code}: {job.errors[-500:]}")
                    for job in (first, second, third):
                        found.check_nothing_left(job)
            for connection in half_open:
                connection.close()
        found.repetitions += 1
    found.numbers.update(tried=tried, refused=refused, delays_ms=delays)
    found.figures = [
        f"refused {refused} of {tried}, with 100 half-open connections",
        f"ranks started {found.measured('join_ms', delays)} after the last host",
        f"jobs ended well {found.repetitions} of {found.repetitions}" if not found.broken else ""
    ]

    def try_peer(peer):
        port = free_port()
        ranks = [([peer.python, SCRIPT, "rendezvous:30", "barrier"], {
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)
        }) for rank in (0, 1)]
        with jobs.Job(*ranks[0]) as first:
            first.wait_for(lambda: is_listening(port), "does not listen")
            held = [connect(port) for _ in range(3)]
            for connection, data in zip(held, (b"\x00", ABUSES["HTTP"], ABUSES["huge length"])):
                connection.sendall(data)
            with jobs.Job(*ranks[1]) as second:
                codes = [job.wait(60) for job in (first, second)]
            for connection in held:
                connection.close()
        if codes == [0, 0]:
            return "the ranks connected in spite of a held byte, HTTP and a huge length"
        ends = [f"exit {code}" if code is not None else "hang (> 60 s)" for code in codes]
        return f"a held byte, HTTP and a huge length: {' and '.join(ends)}"

    bench.compare(found, try_peer)
