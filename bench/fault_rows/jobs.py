"""Jobs that can be watched, disturbed, and searched for what they leave behind."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time

MARK = "LOCKSTEP_FAULT_JOB"  # inherited by every process of a job, so that each of them can be found
SHM = "/dev/shm"
PATIENCE_S = 120  # the longest that a job may take to come to where a fault is injected


def enter_namespace():
    """Starts this script again in a mount namespace of its own, with a /dev/shm of its own.

    Whatever a job leaves in shared memory is then seen, and other jobs of this host are not.
    """
    if os.environ.pop("LOCKSTEP_FAULT_NAMESPACE", None) is None:
        unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode != 0:
            print("skipped: a mount namespace needs root, or user namespaces")
            sys.exit(77)
        os.environ["LOCKSTEP_FAULT_NAMESPACE"] = "1"
        os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
    mount_memory(SHM, "1g")


def mount_memory(folder, size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", folder], check=True)


def unmount(folder):
    subprocess.run(["umount", "--lazy", folder], check=True)


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # a process that ended meanwhile
        return b""


def variables_of(pid):
    return dict(entry.partition(b"=")[::2] for entry in read(f"/proc/{pid}/environ").split(b"\0") if b"=" in entry)


def parent_of(pid):
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def marked_processes(mark):
    wanted = mark.encode()
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and variables_of(name).get(MARK.encode()) == wanted
    ]


def wait_until(condition, limit_s):
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Scratch(tempfile.TemporaryDirectory):
    """A folder that goes away."""
    def __init__(self):
        super().__init__(prefix="lockstep-fault-")

    def __enter__(self):
        return self

    def file(self, name):
        return os.path.join(self.name, name)


class Stuck(Exception):
    """A job that did not come to where a fault is injected."""


class Job:
    """A command with its descendants. Use it as a context: at the end nothing of it is left."""
    def __init__(self, command, variables=None):
        self.mark = secrets.token_hex(8)
        self._scratch = Scratch()
        self.file = self._scratch.file
        self.temporary = self.file("tmp")
        os.mkdir(self.temporary)
        self._output, self._errors = self.file("out"), self.file("err")
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment.update({MARK: self.mark, "TMPDIR": self.temporary}, **(variables or {}))
        self.command = [str(word) for word in command]
        with open(self._output, "wb") as out, open(self._errors, "wb") as err:
            self.begun = time.monotonic()
            self.process = subprocess.Popen(self.command,
                                            stdin=subprocess.DEVNULL,
                                            stdout=out,
                                            stderr=err,
                                            env=environment,
                                            start_new_session=True)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self._scratch.cleanup()

    def end(self):
        while pids := [*self.processes(), *([self.pid] if self.process.poll() is None else [])]:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if self.process.poll() is None:
                self.process.wait(10)
            time.sleep(0.01)

    @property
    def output(self):
        return read(self._output).decode(errors="replace")

    @property
    def errors(self):
        return read(self._errors).decode(errors="replace")

    @property
    def printed(self):
        """Lines on both streams."""
        return len(self.output.splitlines()) + len(self.errors.splitlines())

    def processes(self):
        return marked_processes(self.mark)

    def ranks(self):
        """{rank: process}, without the processes that ranks started."""
        found = {}
        for pid in self.processes():
            rank = variables_of(pid).get(b"RANK")
            if rank is not None and b"RANK" not in variables_of(parent_of(pid)):
                found[int(rank)] = pid
        return found

    def wait(self, limit_s):
        """The exit code, 128 + n after signal n; None if it has not ended in time."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        self.ended = time.monotonic()
        return code if code >= 0 else 128 - code

    def wait_for(self, condition, what):
        """Waits for a point in the job's life; Stuck with its words if it ends before or does not come there."""
        ended = False

        def there_or_ended():
            nonlocal ended
            ended = self.process.poll() is not None
            return condition() or ended

        if not wait_until(there_or_ended, PATIENCE_S) or (ended and not condition()):
            raise Stuck(f"{' '.join(self.command)}: {what}\n{self.output[-2000:]}{self.errors[-4000:]}")

    def wait_for_step(self, step):
        """Waits until a program of the course, or tutorial_checkpoint, has printed this step."""
        def reached():
            steps = re.findall(r"step (\d+)[/:]", self.output)
            return bool(steps) and int(steps[-1]) >= step

        self.wait_for(reached, f"did not come to step {step}")

    def wait_for_lines(self, path, count):
        self.wait_for(lambda: len(read(path).split()) >= count, f"fewer than {count} lines in {path}")
        return [int(word) for word in read(path).split()]

    def left_behind(self, grace_s=2.0):
        """What is left of a job that has ended: processes, files in shared memory, temporary files.

        The folder of logs that a failure's report names is not counted.
        """
        wait_until(lambda: not self.processes(), grace_s)
        left = [f"process {pid} ({read(f'/proc/{pid}/cmdline').decode(errors='replace')})" for pid in self.processes()]
        wait_until(lambda: not os.listdir(SHM), grace_s if not left else 0)
        left += [f"{SHM}/{name}" for name in os.listdir(SHM)]
        errors = self.errors
        left += [
            f"$TMPDIR/{name}" for name in os.listdir(self.temporary)
            if not (name.startswith("lockstep-") and f"{self.temporary}/{name}/" in errors)
        ]
        return left
