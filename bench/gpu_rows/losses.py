"""Whether programs that started from the same weights and rows train alike."""

import workers

# Relative, of a loss: what a different order of additions does to it within 20 steps.
TOLERANCE = {"fp16": 3e-3, "bf16": 2e-2, "fp32": 1e-4}


def problems(started, reference, precision):
    """{name: why its losses are not those of the program called `reference`; empty where they are}."""
    found = {}
    for name, worker in started.items():
        try:
            found[name] = ""
            if name != reference:
                found[name] = difference(worker.ready()["losses"], started[reference].ready()["losses"], precision)
        except workers.Failed as failure:
            found[name] = str(failure)
    return found


def difference(losses, expected, precision):
    """Why two loss curves are not the same training; empty where they are."""
    if any(loss is None or loss != loss for loss in expected) or not expected[-1] < 0.98 * expected[0]:
        return f"the peer did not train: {expected[0]} to {expected[-1]}"
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        if loss is None:
            return f"loss of step {step} is not finite"
        if not abs(loss - wanted) <= TOLERANCE[precision] * max(abs(wanted), 0.1):
            return f"loss of step {step} is {loss:.6g}, the peer's {wanted:.6g}"
    return ""
