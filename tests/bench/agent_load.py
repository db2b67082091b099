"""A synthetic agentic workload, the same for every engine: groups of episodes with turns, tool results and tool waits.

Deterministic from its seed; token ids are random, lengths are drawn from skewed distributions as agent traffic has them.
Every engine that runs it forces each turn's length (ignore_eos, max_new_tokens = turn["gen"]), so the work is identical:
prompt = system + task (+ all earlier turns: generated ids, then the tool's ids), then `gen` tokens, then `wait_s` of tool time.

    python -m tests.bench.agent_load --groups 16 --members 8 --seed 1 > trace.json

Shape of the output: {"groups": [{"prompt": [ids], "members": [{"turns": [{"gen": int, "tool": [ids], "wait_s": float}]}]}],
"total_generated": int, "total_tool_tokens": int}. The last turn of an episode has an empty tool result and wait_s 0.
Figure of merit: episodes per second and generated tokens per second over the whole trace, and the share of prompt tokens that
came from the prefix cache; every engine returns the log-probability of each sampled token.
"""

import argparse
import json
import random
from typing import Any

import numpy as np


def make(groups=16, members=8, seed=0, vocab=150000, scale=1.0, waits=1.0):
    """Build the trace. Units: lengths in tokens, waits in seconds; `scale` shrinks all lengths, `waits` all tool times."""
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(min(1000, vocab // 4), vocab) for _ in range(max(1, int(n * scale)))]

    def skew(mean, sigma, low, high):
        return min(high, max(low, rng.lognormvariate(0, sigma) * mean))

    system = ids(400)
    out = []
    for _ in range(groups):
        prompt = system + ids(skew(200, 0.6, 30, 1500))
        eps = []
        for _ in range(members):
            turns = []
            for _k in range(rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 8])):
                turns.append(
                    {
                        "gen": max(1, int(skew(90, 0.9, 4, 1024) * scale)),
                        "tool": ids(skew(80, 0.9, 5, 1200)),
                        "wait_s": round(skew(0.25, 0.8, 0.01, 4.0) * waits, 4),
                    }
                )
            turns[-1].update(tool=[], wait_s=0.0)
            eps.append({"turns": turns})
        out.append({"prompt": prompt, "members": eps})
    every = [t for g in out for e in g["members"] for t in e["turns"]]
    return {"groups": out, "total_generated": sum(t["gen"] for t in every), "total_tool_tokens": sum(len(t["tool"]) for t in every)}


def episodes_of(trace: dict[str, Any]) -> list[tuple[np.ndarray, list[dict[str, Any]]]]:
    """Return each episode's prompt and turns."""
    return [(np.array(group["prompt"], np.int32), member["turns"]) for group in trace["groups"] for member in group["members"]]


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--groups", type=int, default=16)
    p.add_argument("--members", type=int, default=8)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--vocab", type=int, default=150000)
    p.add_argument("--scale", type=float, default=1.0)
    p.add_argument("--waits", type=float, default=1.0)
    print(json.dumps(make(**vars(p.parse_args()))))
