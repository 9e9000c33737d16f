"""Programs that are started once and measured in turns: the other side of bench/serve.hpp.

A measured program writes a line of JSON when it is ready, and one for each line "go N" that it reads. Ranks read
their commands from files of their own, since a launcher has only one standard input; rank 0 answers.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time

START_S, ANSWER_S = 240, 120


class Failed(Exception):
    """A program that ended or did not answer in time. The others go on."""


class Worker:
    """`command` gets the settings as its last argument. With `ranks`, the command starts that many."""

    def __init__(self, command, settings, ranks=0):
        self.folder = tempfile.TemporaryDirectory()
        self.errors = open(os.path.join(self.folder.name, "stderr"), "w+")
        self.inputs = []
        if ranks:
            commands = os.path.join(self.folder.name, "commands.{rank}")
            answers = os.path.join(self.folder.name, "answers")
            os.mkfifo(answers)
            for rank in range(ranks):
                os.mkfifo(commands.replace("{rank}", str(rank)))
            settings = dict(settings, commands=commands, answers=answers)
            # Opened for reading and writing, so that neither side waits for the other to open it.
            self.answers = os.open(answers, os.O_RDWR)
            self.inputs = [os.open(commands.replace("{rank}", str(rank)), os.O_RDWR) for rank in range(ranks)]
        self.process = subprocess.Popen([*command, json.dumps(settings)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE if not ranks else subprocess.DEVNULL, stderr=self.errors)
        if not ranks:
            self.answers = self.process.stdout.fileno()
            self.inputs = [self.process.stdin.fileno()]
        self.unread = b""
        self.failure = None
        self.first = None

    def ready(self):
        """The first line of the program, which it writes once it has warmed up."""
        if self.first is None:
            self.first = self._answer(START_S)
        return self.first

    def go(self, count):
        self.ready()
        for descriptor in self.inputs:
            os.write(descriptor, f"go {count}\n".encode())
        return self._answer(ANSWER_S)

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream:
                stream.close()
        self.folder.cleanup()

    def _answer(self, patience_s):
        if self.failure:
            raise Failed(self.failure)
        deadline = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while True:
                while b"\n" in self.unread:
                    line, self.unread = self.unread.split(b"\n", 1)
                    if line.startswith(b"{"):
                        return json.loads(line)
                if selector.select(0.2):
                    piece = os.read(self.answers, 1 << 16)
                    self.unread += piece
                    if piece:
                        continue
                if self.process.poll() is not None:
                    self._fail(f"ended with {self.process.returncode}")
                if time.monotonic() > deadline:
                    self._fail(f"no answer after {patience_s} s")

    def _fail(self, what):
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        told = [line for line in lines if "rror" in line] or lines
        self.failure = f"{what}: {told[-1][:300] if told else 'it said nothing'}"
        print("\n".join(lines[-15:]), file=sys.stderr)
        raise Failed(self.failure)


def take_turns(workers, repetitions, count):
    """Returns {name: [answers]}, measured A B A B; for a program that failed, its Failed instead."""
    found = {name: [] for name in workers}
    for _ in range(repetitions):
        for name, worker in workers.items():
            if isinstance(found[name], Failed):
                continue
            try:
                found[name].append(worker.go(count))
            except Failed as failure:
                found[name] = failure
    return found
