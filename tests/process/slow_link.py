"""A slow and lossy link between two network namespaces, where the kernel has no netem: two TUN devices, and a process that
carries packets from one to the other, late, and loses some. TCP above it is the kernel's own.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
DEVICE = "slow0"


def open_device(namespace, address):
    """A TUN device inside a namespace. The caller moves there, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(there)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "addr", "add", address, "dev", DEVICE], check=True)
    subprocess.run(["ip", "link", "set", DEVICE, "up"], check=True)
    return device


def carry(devices, delay_s, loss):
    """Forever: what one device sends arrives at the other."""
    other = {devices[0]: devices[1], devices[1]: devices[0]}
    dice = random.Random(7)
    travelling = []  # (when it arrives, its number, where, the packet)
    count = 0
    while True:
        left = max(0.0, travelling[0][0] - time.monotonic()) if travelling else None
        for device in select.select(devices, [], [], left)[0]:
            try:
                packet = os.read(device, 1 << 16)
            except BlockingIOError:
                continue
            if dice.random() >= loss:
                count += 1
                heapq.heappush(travelling, (time.monotonic() + delay_s, count, other[device], packet))
        while travelling and travelling[0][0] <= time.monotonic():
            try:
                os.write(travelling[0][2], travelling[0][3])
            except OSError:
                pass  # lost
            heapq.heappop(travelling)


class SlowLink:
    """While it exists, the namespaces reach each other at these addresses, such as 10.1.1.1/24 and 10.1.1.2/24."""

    def __init__(self, namespaces, addresses, delay_s, loss):
        ready, tell = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            try:
                devices = [open_device(*end) for end in zip(namespaces, addresses)]
                os.write(tell, b"1")
                carry(devices, delay_s, loss)
            finally:
                os._exit(1)
        os.close(tell)
        self.works = os.read(ready, 1) == b"1"
        os.close(ready)

    def close(self):
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
