"""The model of rows 6, 7, 8 and 11, and whether two programs train it alike. A shape is (dim, hidden, depth, batch)."""

import workers

LR = 0.05

# Relative difference of a loss that another order of additions may cause within 20 steps.
TOLERANCE = {"fp16": 3e-3, "bf16": 2e-2, "fp32": 1e-4}


def settings(bench, shape, **more):
    """The settings that bench_step and peers/step.py read."""
    dim, hidden, depth, batch = (48, 64, 1, 16) if bench.dry else shape
    return dict(dim=dim, hidden=hidden, depth=depth, batch=batch, lr=LR, precision=bench.precision, **more)


def text(shape):
    return f"MLP {shape[0]}-{shape[1]}x{shape[2]}-{shape[0]}, batch {shape[3]}"


def floor_ms(rates, shape, accumulate=1):
    """The larger of two times: products at the measured rate, and bytes at the measured copy bandwidth.

    Bytes per weight: a float32 master is read and written; a low-precision copy is written, and read in the forward and
    backward of each micro-step; its gradient is written by each micro-step and read once more."""
    dim, hidden, depth, batch = shape
    layers = [(dim, hidden)] + [(hidden, hidden)] * depth + [(hidden, dim)]
    weights = sum(a * b for a, b in layers)
    flop = accumulate * 2 * batch * (3 * weights - dim * hidden)  # the first layer needs no gradient of its input
    moved = weights * (8 + 2 + accumulate * (2 + 2 + 2) + 2)
    return max(flop / (rates["tflops"] * 1e12), moved / (rates["copy_gbps"] * 1e9)) * 1e3


def loss_problems(started, reference, precision):
    """{name: why its losses are not those of the program called `reference`; empty if they are}."""
    found = {}
    for name, worker in started.items():
        try:
            found[name] = ""
            if name != reference:
                found[name] = loss_difference(worker.ready()["losses"], started[reference].ready()["losses"], precision)
        except workers.Failed as failure:
            found[name] = str(failure)
    return found


def loss_difference(losses, expected, precision):
    """Why two loss curves are not the same training; empty if they are."""
    if any(loss is None or loss != loss for loss in expected) or not expected[-1] < 0.98 * expected[0]:
        return f"the peer did not train: {expected[0]} to {expected[-1]}"
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        if loss is None:
            return f"loss of step {step} is not finite"
        if not abs(loss - wanted) <= TOLERANCE[precision] * max(abs(wanted), 0.1):
            return f"loss of step {step} is {loss:.6g}, the peer's {wanted:.6g}"
    return ""
