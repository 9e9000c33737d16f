"""The Python version of bench/serve.hpp: answers the commands of bench/gpu."""

import json
import sys


def settings():
    return json.loads(sys.argv[1])


def serve(options, rank, ready, measure):
    """Writes `ready`, then the result of measure(N) for each "go N", until the commands end; rank 0 answers."""
    answers = open(options.get("answers", "/dev/stdout"), "a") if rank == 0 else None

    def answer(value):
        if answers:
            print(json.dumps(value), file=answers, flush=True)

    answer(ready)
    with open(options.get("commands", "/dev/stdin").replace("{rank}", str(rank))) as commands:
        for line in commands:
            answer(measure(int(line.split()[1])))
