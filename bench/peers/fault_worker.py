"""The counterpart of tests/process/launch_worker.cpp in PyTorch, over Gloo: does what its arguments say, in order.

"ACTION:VALUE" is for every rank, "1:ACTION:VALUE" for rank 1 alone.
"""

import datetime
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", "0"))
MUCH = torch.ones(1 << 22)


def note(path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


def rendezvous(seconds):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(seconds or 1800)))


def reduce_forever(path):
    values = torch.ones(1 << 16)
    dist.all_reduce(values)
    note(path)
    while True:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)


def start_descendants(path):
    """One child in this process's group, and one that has left it."""
    code = ("import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"open({path!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)")
    for own_session in (False, True):
        subprocess.Popen([sys.executable, "-c", code], start_new_session=own_session)
    while len(open(path).read().split() if os.path.exists(path) else []) < 2:
        time.sleep(0.01)


def eat(_):
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1 << 20)))


def train(count, joined=False):
    """DDP over so many batches."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)

    def loop():
        for _ in range(int(count)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), torch.sin(3 * x)).backward()
            optimizer.step()

    if joined:
        with torch.distributed.algorithms.join.Join([model]):
            loop()
    else:
        loop()
    print(f"rank {RANK}: trained", flush=True)


def load_data(_):
    """A loader with a worker process, whose batches come through /dev/shm."""
    rows = torch.utils.data.TensorDataset(torch.ones(256, 4096))
    for _ in torch.utils.data.DataLoader(rows, batch_size=64, num_workers=1):
        pass


def reduce(kind):
    """An all_reduce as the others make it, or of another shape or dtype."""
    tensor = {"": MUCH, "shape": MUCH[:1 << 21], "dtype": MUCH.to(torch.float64)}[kind]
    before = tensor.clone()
    try:
        dist.all_reduce(tensor)
    finally:
        print(f"rank {RANK}: {'unchanged' if torch.equal(tensor, before) else 'changed'}", flush=True)


def throw(text):
    raise RuntimeError(text)


ACTIONS = {
    "rendezvous": rendezvous,
    "reduce": reduce,
    "barrier": lambda _: dist.barrier(),
    "broadcast": lambda root: dist.broadcast(MUCH, int(root)),
    "all-reduce": reduce_forever,
    "pid": note,
    "descendants": start_descendants,
    "exit": lambda code: os._exit(int(code)),
    "throw": throw,
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda _: os.abort(),
    "kill": lambda number: os.kill(os.getpid(), int(number)),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "loop": lambda _: [None for _ in iter(int, 1)],
    "ignore-term": lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "eat": eat,
    "train": train,
    "train-joined": lambda count: train(count, joined=True),
    "load-data": load_data,
}

for word in sys.argv[1:]:
    first, _, rest = word.partition(":")
    if first.isdigit():
        if int(first) != RANK:
            continue
        first, _, rest = rest.partition(":")
    ACTIONS[first](rest)
