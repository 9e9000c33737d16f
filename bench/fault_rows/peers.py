"""PyTorch as the peer: a Python, and its torchrun if that works."""

import os
import subprocess

from . import jobs
from .rows import NotRun

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "peers", "fault_worker.py")


class Peer:
    def __init__(self, python):
        self.python = python
        found = subprocess.run([python, "-c", "import torch; print(torch.__version__.split('+')[0])"],
                               capture_output=True,
                               text=True)
        if found.returncode != 0:
            raise NotRun(f"{python} has no torch")
        self.name = f"PyTorch {found.stdout.strip()}"
        self._works = None
        self._streams = []

    def torchrun(self, *words, ranks=2, flags=("--standalone", ), variables=None):
        """The script under torchrun."""
        if self._works is None:
            self._works = self._starts()
        if not self._works:
            raise NotRun("its torchrun does not start")
        return jobs.Job(self.command(ranks, flags, words), {"OMP_NUM_THREADS": "1", **(variables or {})})

    def _starts(self):
        """Whether torchrun starts, with the flags that this takes."""
        # PyTorch 1.13 on Python 3.11 does not understand its own default of --redirects.
        for self._streams in ([], ["--redirects", "1", "--tee", "1"]):
            command = self.command(1, ("--standalone", ), ["exit:0"])
            if subprocess.run(command, capture_output=True).returncode == 0:
                return True
        return False

    def ranks(self, *words, ranks=2, port=29511):
        """The script under torchrun; where that does not start, as ranks that a shell starts and waits for."""
        try:
            return self.torchrun(*words, ranks=ranks)
        except NotRun:
            line = ('n=$1; shift; for r in $(seq 0 $((n-1))); do '
                    'RANK=$r LOCAL_RANK=$r WORLD_SIZE=$n "$@" & pids="$pids $!"; done; '
                    'code=0; for p in $pids; do wait $p || code=$?; done; exit $code')
            return jobs.Job(["sh", "-c", line, "sh", ranks, self.python, SCRIPT, *words], {
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port)
            })

    def command(self, ranks, flags, words):
        run = [self.python, "-m", "torch.distributed.run", *self._streams, *flags]
        return [*run, "--nproc_per_node", str(ranks), SCRIPT, *words]  # 1.13 knows no --nproc-per-node


def outcome(job, limit_s, since=None):
    """"exit 1 after 3.2 s, 48 lines", or that it hangs."""
    code = job.wait(limit_s)
    if code is None:
        return f"hang (> {limit_s:g} s)"
    return f"exit {code} after {job.ended - (since or job.begun):.1f} s, {job.printed} lines"


def survivors(pids):
    """How many of these processes still run."""
    return sum(jobs.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"]) for pid in pids)
