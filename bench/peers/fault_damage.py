"""How loads of a damaged torch.save file end: every STRIDE-th byte is flipped, each load is a process of its own.

usage: fault_damage.py STRIDE    prints JSON: refused, same, wrong, crashes, hangs
"""

import io
import json
import os
import signal
import sys

import torch

HANG_S = 10
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
whole = io.BytesIO()
torch.save(net.state_dict(), whole)
whole = whole.getvalue()


def load(data):
    """0: the right weights; 1: others; 2: refused."""
    signal.alarm(HANG_S)
    try:
        state = torch.load(io.BytesIO(data))
        other = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
        other.load_state_dict(state)
    except Exception:
        return 2
    return 0 if all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values())) else 1


found = {"damages": 0, "refused": 0, "same": 0, "wrong": 0, "crashes": 0, "hangs": 0}
for at in range(0, len(whole), int(sys.argv[1])):
    data = bytearray(whole)
    data[at] ^= 0x01
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(load(bytes(data)))
    _, status = os.waitpid(child, 0)
    found["damages"] += 1
    if os.WIFSIGNALED(status):
        found["hangs" if os.WTERMSIG(status) == signal.SIGALRM else "crashes"] += 1
    else:
        found[("same", "wrong", "refused")[min(os.WEXITSTATUS(status), 2)]] += 1
print(json.dumps(found))
