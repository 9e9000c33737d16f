"""What a row of the table is, and what it has found."""

import dataclasses
import os
import statistics

from common import NotRun

from . import jobs

ROWS = {}  # by number


@dataclasses.dataclass
class Row:
    number: int
    injection: str
    promise: str
    run: callable


def row(number, injection, promise):
    def keep(function):
        ROWS[number] = Row(number, injection, promise, function)
        return function

    return keep


class Found:
    """Figures and broken promises of one row."""
    def __init__(self):
        self.figures = []  # of lockstep, in words
        self.peers = {}  # name: words
        self.repetitions = 0  # faults that were injected into lockstep
        self.broken = []
        self.numbers = {}  # everything that was measured, for --json
        self.orphans = 0

    def check(self, kept, otherwise):
        if not kept:
            self.broken.append(otherwise)
        return bool(kept)

    def kept(self, before):
        """Whether no promise was broken since there were `before` of them."""
        return len(self.broken) == before

    def check_nothing_left(self, job):
        left = job.left_behind()
        self.orphans += len(left)
        self.check(not left, f"left behind: {', '.join(left)}")

    def measured(self, name, values):
        """Keeps numbers, and returns them as "median (least to most)"."""
        self.numbers[name] = values
        return spread(values)


def spread(values, unit="ms"):
    if not values:
        return "nothing"
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.0f} {unit}" if len(values) == 1 else f"{middle:.0f} {unit} ({least:.0f} to {most:.0f})"


def quote(text, count=400):
    return text if len(text) <= count else "… " + text[-count:]


class Bench:
    """Where programs are, how often faults are injected, and which peers there are."""
    def __init__(self, folder, peers, repeat, quick):
        self.folder = os.path.abspath(folder)
        self.tests = os.path.join(os.path.dirname(self.folder), "tests")
        self.peers = peers
        self._repeat = repeat
        self.quick = quick

    def times(self, usual, quick):
        return self._repeat or (quick if self.quick else usual)

    def program(self, name):
        """A program of the build; those of the tests are in a folder of their own."""
        for folder in (self.folder, self.tests):
            if os.path.exists(path := os.path.join(folder, name)):
                return path
        raise NotRun(f"{name} is not built")

    def run(self, ranks, *words, variables=None):
        """`lockstep run -n RANKS WORDS`."""
        return jobs.Job([self.program("lockstep"), "run", "-n", ranks, *words], variables)

    @staticmethod
    def leave_out_peers(found, reason):
        found.peers["no counterpart"] = reason

    def compare(self, found, try_peer):
        """What the peers do. try_peer(peer) returns it in words."""
        for peer in self.peers:
            try:
                found.peers[peer.name] = try_peer(peer)
            except NotRun as reason:
                found.peers[peer.name] = f"not run: {reason}"
            except jobs.Stuck as stuck:
                found.peers[peer.name] = f"not run: {quote(str(stuck), 200)}"
