"""PyTorch is the oracle: torch.amp.GradScaler("cpu") driven over planted gradients. The golden file beside this
script holds what it did; tests/ranks/grad_scaler_test.cpp makes lockstep::GradScaler do the same.

usage: grad_scaler_peer.py write FILE   makes the golden file
       grad_scaler_peer.py check FILE   PyTorch still does what the file says
Exits with 77 (skipped) where this Python has no torch that scales on the CPU (2.3 and later do).
"""

import json
import random
import sys

try:
    import torch
    from torch.amp import GradScaler
except ImportError:
    print("SKIP: this python3 has no torch with torch.amp.GradScaler (2.3 or later)")
    sys.exit(77)

LEARNING_RATE = 0.25  # a power of two: its product with a gradient is exact
SPECIAL = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def number(value):
    return SPECIAL.get(value, value)


def step(*slopes, unscale=False, new_scale=None, resume=False):
    """One update(). slopes: [optimizer] of the loss with respect to its two weights. unscale: unscale_() by hand.
    resume: the scaler is saved and another one continues from its state, before the step."""
    return {"slopes": [list(each) for each in slopes], "unscale": unscale, "new_scale": new_scale, "resume": resume}


FINE = (0.5, -1.25)
INF = (0.5, "inf")
NAN = ("nan", 1.0)


def cases():
    yield "defaults", {}, [step(FINE), step(INF), step(FINE), step(NAN), step((1.0, "-inf")), step(FINE)]
    yield "growth every third finite step", {"init_scale": 8.0, "growth_interval": 3}, [
        step(INF if i in (1, 4, 5, 12) else FINE) for i in range(24)]
    yield "down to 1 and below", {"init_scale": 4.0, "growth_interval": 2}, [
        step(FINE if i in (6, 7, 8, 9) else INF) for i in range(16)]
    yield "growth to infinity is refused", {"init_scale": 2.0 ** 125, "growth_factor": 4.0, "growth_interval": 1}, [
        step((0.25, -0.125)) for _ in range(5)]
    yield "a scale that is too large falls until gradients fit", {"init_scale": 2.0 ** 127}, [
        step((8.0, 3.0)) for _ in range(8)]
    yield "two optimizers, one overflows", {"init_scale": 1024.0, "growth_interval": 2}, [
        step(FINE, FINE), step(FINE, INF), step(INF, FINE), step(FINE, FINE), step(NAN, INF), step(FINE, FINE),
        step(FINE, FINE)]
    yield "unscaled by hand", {"init_scale": 3.0, "growth_interval": 2}, [
        step(FINE, FINE, unscale=True), step(INF, FINE, unscale=True), step(FINE, FINE, unscale=True), step(FINE, FINE)]
    yield "set by hand", {"init_scale": 16.0, "growth_interval": 3}, [
        step(FINE), step(FINE, new_scale=5.0), step(FINE), step(FINE), step(INF, new_scale=0.7), step(FINE)]
    yield "saved and resumed", {"init_scale": 32.0, "growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 4}, [
        step(INF if i in (2, 9) else FINE, resume=i in (6, 10)) for i in range(16)]
    chance = random.Random(5)
    yield "long, with factors that round", {
        "init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.37, "growth_interval": 3}, [
        step(*[chance.choice([(chance.uniform(-1, 1), chance.uniform(-1, 1))] * 7 + [INF, NAN]) for _ in range(2)],
             unscale=chance.random() < 0.3, resume=chance.random() < 0.1) for _ in range(200)]


def play(options, steps):
    """[step] of the scale and the tracker after update(), and each optimizer's weights."""
    scaler = GradScaler("cpu", **options)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=LEARNING_RATE) for _ in steps[0]["slopes"]]
    weights = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
    for each in steps:
        if each["resume"]:
            saved = scaler.state_dict()
            scaler = GradScaler("cpu")
            scaler.load_state_dict(saved)
        slopes = [torch.tensor([number(slope) for slope in pair]) for pair in each["slopes"]]
        loss = sum((weight * slope).sum() for weight, slope in zip(weights, slopes))
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        stepped = []  # optimizers
        for optimizer in optimizers:
            if each["unscale"]:
                scaler.unscale_(optimizer)
            hook = optimizer.register_step_post_hook(lambda which, *_: stepped.append(which))
            scaler.step(optimizer)
            hook.remove()
        scaler.update(each["new_scale"])
        state = scaler.state_dict()
        yield {
            "scale": state["scale"],
            "tracker": state["_growth_tracker"],
            "stepped": [optimizer in stepped for optimizer in optimizers],
            "weights": [weight.detach().tolist() for weight in weights],
        }


def golden():
    result = []
    for name, options, steps in cases():
        after = list(play(options, steps))
        result.append({"name": name, "options": options,
                       "steps": [{**each, "after": then} for each, then in zip(steps, after)]})
    return {"learning_rate": LEARNING_RATE, "cases": result}


def to_text(data):
    """One step a line."""
    lines = ["{", f'"learning_rate": {data["learning_rate"]},', '"cases": [']
    for i, case in enumerate(data["cases"]):
        lines.append(f'{{"name": {json.dumps(case["name"])}, "options": {json.dumps(case["options"])}, "steps": [')
        lines.append(",\n".join(json.dumps(each, allow_nan=False) for each in case["steps"]))
        lines.append("]}," if i + 1 < len(data["cases"]) else "]}")
    return "\n".join(lines + ["]", "}"]) + "\n"


def main():
    mode, path = sys.argv[1:]
    if mode == "write":
        with open(path, "w") as file:
            file.write(to_text(golden()))
        return
    with open(path) as file:
        expected = json.load(file)
    for case, now in zip(expected["cases"], golden()["cases"], strict=True):
        for i, (old, new) in enumerate(zip(case["steps"], now["steps"], strict=True)):
            if old != new:
                sys.exit(f"FAIL: {case['name']}, step {i}: the file has {old}, PyTorch {torch.__version__} gives {new}")
    print(f"ok: {len(expected['cases'])} cases, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
