"""PyTorch, the oracle. A test without it exits with 77 (skipped), so this is imported before anything that needs it."""

import sys

try:
    import torch  # noqa: F401
except ImportError:
    print("SKIP: this python3 has no torch to compare with (apt-get install python3-torch)")
    sys.exit(77)
