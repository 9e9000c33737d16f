"""PyTorch dies of SIGILL on virtual machines that announce AMX and hide its tiles. See src/base/hidden_amx.hpp."""

import os


def avoid():
    """Keeps oneDNN from using AMX if its tiles are hidden, in this process and those that it starts."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        facts = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    facts = {name.strip(): value.split() for name, value in facts.items()}
    if "amx_tile" in facts.get("flags", []) and int(facts["cpuid level"][0]) < 0x1d:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
