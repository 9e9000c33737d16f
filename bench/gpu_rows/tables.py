"""Printing, as several rows need it."""

import statistics

import workers


def values_of(answers, key):
    """One value of each answer; the Failed of a program that failed."""
    return answers if isinstance(answers, workers.Failed) else [answer[key] for answer in answers]


def spread(values):
    return f"{min(values):.3g} to {max(values):.3g}"


def print_problems(problems):
    for name, problem in problems.items():
        if problem:
            print(f"\nNUMBERS DIFFER, {name}: {problem}")


def print_times(title, found, problems, bases, floor_ms):
    """One line a case: median, spread, how much faster than each base, and the multiple of the floor.

    found: {name: times or Failed}; bases: {heading: names, the fastest of which counts}. Returns the medians."""
    print(f"\n{title}")
    print(f"| set-up | ms a step | range | {' | '.join(f'against {base}' for base in bases)} | times the floor |")
    print("|---|---:|---:|" + "---:|" * (len(bases) + 1))
    medians = {name: statistics.median(values) for name, values in found.items()
               if not isinstance(values, workers.Failed) and values}
    for name, values in found.items():
        if name not in medians:
            print(f"| {name} | FAILED: {values} |")
            continue
        ratios = []
        for base in bases.values():
            best = min((medians[peer] for peer in base if peer in medians), default=None)
            ratios.append("-" if best is None else f"{best / medians[name]:.2f}x")
        if problems.get(name):
            ratios = ["numbers differ"] * len(bases)
        print(f"| {name} | {medians[name]:.4g} | {spread(values)} | {' | '.join(ratios)} | "
              f"{medians[name] / floor_ms:.2f} |")
    print_problems(problems)
    return medians
