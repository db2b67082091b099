#!/usr/bin/env python3
"""Fixed request mixes, the same for every engine. Lengths in tokens; ids are random and deterministic.

    tail_refill(n)   n requests of 254-257 prompt tokens, output lengths from 4/8/16/32/64/128 (the GPU tail-and-refill load)
    cpu_mix(n)       n requests, prompts from 16/32/64/128, outputs from 8/16/32/64/128 (the CPU load, 49,152-id vocabulary)

Each returns a list of {"prompt": [ids], "gen": int}; generation is forced to `gen` tokens (ignore_eos).
"""

import json
import random
import sys


def _mix(n, seed, prompts, gens, vocab):
    rng = random.Random(f"{seed}-{n}")
    return [
        {"prompt": [rng.randrange(min(1000, vocab // 4), vocab) for _ in range(rng.choice(prompts))], "gen": rng.choice(gens)}
        for _ in range(n)
    ]


def tail_refill(n, vocab=150000):
    return _mix(n, "tail", (254, 255, 256, 257), (4, 8, 16, 32, 64, 128), vocab)


def cpu_mix(n=32, vocab=49000):
    return _mix(n, "cpu", (16, 32, 64, 128), (8, 16, 32, 64, 128), vocab)


if __name__ == "__main__":
    print(json.dumps({"tail_refill": tail_refill, "cpu_mix": cpu_mix}[sys.argv[1]](int(sys.argv[2]))))
