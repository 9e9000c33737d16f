"""A SLURM cluster on this machine: a controller and two nodes, each a network, mount and UTS namespace of its own.

Everything lives in one PID and one mount namespace whose first process is the test: however that ends, also by SIGKILL, the
kernel kills every daemon and every job, and the namespaces, the scratch folder and the network vanish with them. So all
processes that a job leaves behind are in this /proc, and nothing of the machine is in it. Only empty control groups outlive a
SIGKILL of the process outside, too; the next run removes them.

Call enter() first: it starts the program again inside. Then `with Cluster() as cluster:`.
"""

import ctypes
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import time

CONTROLLER, NODES = "ctl", ("n1", "n2")
ADDRESSES = {CONTROLLER: "10.88.0.254", "n1": "10.88.0.1", "n2": "10.88.0.2"}
SCRATCH = pathlib.Path("/run/lockstep-slurm")  # a file system in memory, inside the mount namespace
INSIDE = "LOCKSTEP_SLURM_INSIDE"
COMMANDS = ("ip", "nsenter", "unshare", "mount", "munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
CGROUPS = pathlib.Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "freezer", "cpuset", "cpuacct", "devices")
OWN_GROUP = "lockstep-slurm-"

CONFIGURATION = """
ClusterName=lockstep
SlurmctldHost=ctl(10.88.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={scratch}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={scratch}/state
SlurmdSpoolDir={scratch}/spool.%n
SlurmctldPidFile={scratch}/slurmctld.pid
SlurmdPidFile={scratch}/slurmd.%n.pid
SlurmctldLogFile={scratch}/slurmctld.log
SlurmdLogFile={scratch}/slurmd.%n.log
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ProctrackType={proctrack}
TaskPlugin={tasks}
JobRequeue=1
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1900
KillWait=5
MinJobAge=300
SlurmctldTimeout=60
SlurmdTimeout=10
GresTypes=gpu
NodeName=n1 NodeAddr=10.88.0.1 CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeAddr=10.88.0.2 CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 RealMemory=4000 Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def missing():
    """Why no cluster can be started here; '' if one can."""
    if os.geteuid() != 0:
        return "a SLURM cluster needs root"
    if absent := [name for name in COMMANDS if not shutil.which(name)]:
        return (f"a SLURM cluster needs the command{'s' * (len(absent) > 1)} {', '.join(absent)} "
                "(apt-get install --no-install-recommends slurm-wlm munge iproute2)")
    return ""


def run(*words):
    subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True)


def enter():
    """Starts this program again as the first process of its own namespaces, and ends with its exit code."""
    if tag := os.environ.get(INSIDE):
        run("mount", "--make-rprivate", "/")
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        os.makedirs("/run/netns")
        SCRATCH.mkdir()
        if limits_memory():
            enter_control_groups(tag)
        return
    outer = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "--net"]
    if subprocess.run([*outer, "true"], capture_output=True).returncode != 0:
        print("skipped: no namespaces of processes, mounts and networks here")
        sys.exit(77)
    tag = f"{OWN_GROUP}{os.getpid()}"
    try:
        sys.exit(subprocess.run([*outer, sys.executable, *sys.argv], env=dict(os.environ, **{INSIDE: tag}),
                                preexec_fn=die_with_parent).returncode)
    finally:
        remove_control_groups()


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def limits_memory():
    """Whether slurmd can limit the memory of a job here: Debian's does with version 1 of control groups."""
    return all((CGROUPS / name / "cgroup.procs").exists() for name in CONTROLLERS)


def enter_control_groups(tag):
    """What slurmd takes for all control groups is a part of them that is named after this test."""
    for name in CONTROLLERS:
        own = CGROUPS / name / tag
        own.mkdir()
        if name == "cpuset":  # those of a new group are empty
            for file in ("cpuset.cpus", "cpuset.mems"):
                (own / file).write_text((CGROUPS / name / file).read_text())
        run("mount", "--bind", own, CGROUPS / name)


def remove_control_groups():
    """Those of this test and of tests that were killed. The kernel may still be ending their processes."""
    deadline = time.monotonic() + 5
    for top in CGROUPS.glob(f"*/{OWN_GROUP}*"):
        number = int(top.name[len(OWN_GROUP):])
        if number != os.getpid() and pathlib.Path(f"/proc/{number}").exists():
            continue
        for folder in sorted([top, *top.rglob("*/")], reverse=True):
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.05)


class Program:
    """A process whose output can be read while it runs."""

    def __init__(self, words, path, environment):
        self.paths = [f"{path}.out", f"{path}.err"]
        with open(self.paths[0], "wb") as out, open(self.paths[1], "wb") as err:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=SCRATCH,
                                            env=environment)

    def wait(self, seconds=60):
        return self.process.wait(seconds)

    def out(self):
        return pathlib.Path(self.paths[0]).read_text()

    def err(self):
        return pathlib.Path(self.paths[1]).read_text()


class Cluster:
    def __init__(self):
        self.daemons = {}
        self.programs = 0

    def __enter__(self):
        self.write_configuration()
        self.make_hosts()
        key = SCRATCH / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        SCRATCH.chmod(0o755)
        self.daemon("munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={SCRATCH}/munge.socket",
                    f"--pid-file={SCRATCH}/munged.pid", f"--log-file={SCRATCH}/munged.log", f"--seed-file={SCRATCH}/munge.seed")
        self.wait_for(lambda: (SCRATCH / "munge.socket").exists(), "munged's socket")
        self.daemon("slurmctld", *self.enter_host(CONTROLLER), "slurmctld", "-D", "-c")
        for node in NODES:
            self.daemon(node, *self.enter_host(node), "slurmd", "-D", "-N", node, "-c")
        self.wait_for(lambda: self.controller("sinfo", "-h", "-N", "-o", "%N %T").split() == ["n1", "idle", "n2", "idle"],
                      "two idle nodes")
        return self

    def __exit__(self, *_):
        """Only to end in order: whatever is left dies with the namespace."""
        for process in reversed(list(self.daemons.values())):
            process.terminate()
        for process in self.daemons.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()

    def write_configuration(self):
        for folder in ("state", "spool.n1", "spool.n2"):
            (SCRATCH / folder).mkdir()
        limited = limits_memory()
        (SCRATCH / "slurm.conf").write_text(CONFIGURATION.format(
            scratch=SCRATCH, proctrack="proctrack/cgroup" if limited else "proctrack/linuxproc",
            tasks="task/cgroup,task/affinity" if limited else "task/affinity"))
        (SCRATCH / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nCgroupAutomount=no\n" +
            ("ConstrainRAMSpace=yes\nConstrainSwapSpace=no\nAllowedRAMSpace=100\n" if limited else ""))
        for gpu in ("gpu0", "gpu1"):  # devices for slurmd, and no GPU: they are /dev/null
            os.mknod(SCRATCH / gpu, 0o666 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
        (SCRATCH / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={SCRATCH}/gpu[0-1] Flags=nvidia_gpu_env\n")
        for host in ADDRESSES:  # as Debian writes it: a host's own name stands for an address that only it can reach
            (SCRATCH / f"hosts.{host}").write_text("127.0.0.1 localhost\n" + "".join(
                f"{'127.0.1.1' if name == host else address} {name}\n" for name, address in ADDRESSES.items()))

    @staticmethod
    def make_hosts():
        for name in ADDRESSES:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", CONTROLLER, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", CONTROLLER, "addr", "add", ADDRESSES[CONTROLLER] + "/24", "dev", "br0")
        run("ip", "-n", CONTROLLER, "link", "set", "br0", "up")
        for node in NODES:
            run("ip", "link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", node, "netns", CONTROLLER)
            run("ip", "-n", node, "addr", "add", ADDRESSES[node] + "/24", "dev", "eth0")
            run("ip", "-n", node, "link", "set", "eth0", "up")
            run("ip", "-n", CONTROLLER, "link", "set", node, "master", "br0")
            run("ip", "-n", CONTROLLER, "link", "set", node, "up")

    @staticmethod
    def enter_host(name):
        """The words that start a program as on a host. `ip netns exec` would hide the control groups from slurmd."""
        inside = f'hostname {name} && mount --bind {SCRATCH}/hosts.{name} /etc/hosts && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "sh", "-c", inside, name]

    @staticmethod
    def environment():
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCKSTEP_"))}
        return dict(kept, SLURM_CONF=str(SCRATCH / "slurm.conf"), HOME=str(SCRATCH), TMPDIR=str(SCRATCH))

    def daemon(self, name, *words):
        with open(SCRATCH / f"{name}.out", "wb") as out:
            self.daemons[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                                  env=self.environment())

    def start(self, *words, host=CONTROLLER, variables=None):
        """A program on a host, with the environment of a fresh shell there."""
        self.programs += 1
        environment = dict(self.environment(), **(variables or {}))
        return Program([*self.enter_host(host), *map(str, words)], SCRATCH / f"program.{self.programs}", environment)

    def call(self, *words, seconds=60, **more):
        """(exit code, output, errors) of a program on a host."""
        program = self.start(*words, **more)
        return program.wait(seconds), program.out(), program.err()

    def controller(self, *words):
        """The output of one of SLURM's commands; what it refuses is an error."""
        code, out, err = self.call(*words)
        if code != 0:
            if words[0] == "sinfo":
                return ""
            raise AssertionError(f"{' '.join(map(str, words))} ended with {code}: {err}")
        return out

    def submit(self, script, *flags, name="job.sh", variables=None):
        """The number of the job that sbatch makes of a batch script."""
        path = SCRATCH / name
        path.write_text(script)
        code, out, err = self.call("sbatch", "--parsable", *flags, path, variables=variables or {})
        if code != 0:
            raise AssertionError(err)
        return int(out)

    def job(self, number):
        """What `scontrol show job` says, such as {'JobState': 'COMPLETED', 'ExitCode': '0:0'}."""
        text = self.controller("scontrol", "-o", "show", "job", number).splitlines()[0]
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def await_state(self, number, *states, seconds=60):
        self.wait_for(lambda: self.job(number)["JobState"] in states, f"job {number} to be {' or '.join(states)}", seconds)
        return self.job(number)

    def wait_for(self, condition, what, seconds=20):
        begin = time.monotonic()
        while not condition():
            for name, process in self.daemons.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}: {self.logs(name)}")
            if time.monotonic() - begin > seconds:
                raise AssertionError(f"no {what} within {seconds} s\n{self.logs('slurmctld')}")
            time.sleep(0.05)
        return time.monotonic() - begin

    @staticmethod
    def logs(name):
        paths = [path for path in (SCRATCH / f"{name}.out", SCRATCH / f"{name}.log", SCRATCH / f"slurmd.{name}.log")
                 if path.exists()]
        return "\n".join(path.read_text()[-2000:] for path in paths)

    @staticmethod
    def cut(node, down=True):
        run("ip", "-n", node, "link", "set", "eth0", "down" if down else "up")


def processes():
    """{pid: (name, command line)} of every process in the namespace that runs a program."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if words and state != "Z":
                found[int(folder.name)] = words
        except OSError:
            pass
    return found


def kill_quietly(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
