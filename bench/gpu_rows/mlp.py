"""The model of rows 6, 7, 8 and 11. A shape is (dim, hidden, depth, batch)."""

LR = 0.05


def settings(bench, shape, **more):
    """What bench_step and peers/step.py read."""
    dim, hidden, depth, batch = (48, 64, 1, 16) if bench.dry else shape
    return dict(dim=dim, hidden=hidden, depth=depth, batch=batch, lr=LR, precision=bench.precision, **more)


def text(shape):
    return f"MLP {shape[0]}-{shape[1]}x{shape[2]}-{shape[0]}, batch {shape[3]}"


def floor_ms(rates, shape, accumulate=1):
    """The larger of two times: products at the measured rate, and bytes at the measured copy bandwidth.

    Bytes a weight: a float32 master read and written, a low-precision copy written, and read in forward and backward
    of each micro-step, its gradient written by each and read once more."""
    dim, hidden, depth, batch = shape
    layers = [(dim, hidden)] + [(hidden, hidden)] * depth + [(hidden, dim)]
    weights = sum(a * b for a, b in layers)
    flop = accumulate * 2 * batch * (3 * weights - dim * hidden)  # the first layer needs no gradient of its input
    moved = weights * (8 + 2 + accumulate * (2 + 2 + 2) + 2)
    return max(flop / (rates["tflops"] * 1e12), moved / (rates["copy_gbps"] * 1e9)) * 1e3
