"""A link between network namespaces that is slow, long or lossy, also where the kernel has no netem: the program slow_link
of bench/ carries the packets between TUN devices. TCP above it is the kernel's own.
"""

import json
import os
import subprocess

DEVICE = "slow0"


class SlowLink:
    """While it exists, the namespaces reach each other at these addresses, all of one network of 24 bits.

    `folder` has the program. `why_not` says what is missing if there is no link.
    """

    def __init__(self, folder, namespaces, addresses, gbit=0, delay_ms=0, loss_percent=0):
        self.process, self.why_not = None, ""
        program = os.path.join(folder, "slow_link")
        if not os.path.exists(program):
            self.why_not = "slow_link is not built"
            return
        ends = [f"{name}={address}" for name, address in zip(namespaces, addresses)]
        self.process = subprocess.Popen([program, DEVICE, str(gbit), str(delay_ms), str(loss_percent), *ends], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self.process.stdout.readline() != "ready\n":
            self.why_not = self.process.communicate()[1].strip()
            self.process = None
            return
        for name, address in zip(namespaces, addresses):
            # A large packet takes 0.1 ms, so that the receiver sees bytes as they come.
            packet = min(65536, max(8192, int(gbit * 1e9 / 8 * 1e-4))) if gbit else 65536
            link = ["ip", "-n", name, "link", "set", DEVICE]
            subprocess.run([*link, "txqueuelen", "5000", "gso_max_size", str(packet), "up"], check=True)
            subprocess.run(["ip", "-n", name, "addr", "add", address + "/24", "dev", DEVICE], check=True)

    def close(self):
        """Ends the link and says what it has carried: packets, bytes, lost ones."""
        if self.process is None:
            return {}
        process, self.process = self.process, None
        return json.loads(process.communicate()[0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
