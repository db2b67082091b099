"""Break a CUDA device under a running engine, in a process of its own: the error stays with it.

`python -m tests.gpu.break_device FOLDER illegal|assert` steps an engine over the checkpoint folder, lets a kernel store far
out of bounds, or one of torch's assert, between two steps, goes on stepping and prints one JSON line about what it met.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import triton
import triton.language as tl

from areno import ArenoError, Engine, EngineConfig, EngineFailure, Request, SamplingParams

STEPS = 200


@triton.jit
def _store_out_of_bounds(target, distance):
    tl.store(target + distance.to(tl.int64) * 1024 + tl.arange(0, 32), 1)


def break_device(how: str) -> None:
    """Launch what breaks the device; the error shows later."""
    if how == "illegal":
        _store_out_of_bounds[(1,)](torch.zeros(32, dtype=torch.int32, device="cuda"), 2**30, num_warps=1)
    else:
        place = torch.full((1,), 99, dtype=torch.int64, device="cuda")
        torch.zeros(4, device="cuda").index_select(0, place)


def met(engine: Engine) -> dict[str, object]:
    """Step until the engine says that it failed; return what a caller sees then, and of a score afterwards."""
    try:
        for _ in range(STEPS):
            engine.step()
    except EngineFailure as failure:
        found: dict[str, object] = {"what": failure.what, "field": failure.field, "remedy": failure.remedy, "code": failure.code}
    else:
        return {"what": f"nothing in {STEPS} steps"}
    try:
        engine.score([3, 4, 5])
        found["score"] = "worked"
    except ArenoError as error:
        found["score"] = error.code
    return found


def main() -> None:
    """Run and print; leaves without the interpreter's end, which a broken device may hold up."""
    folder, how = sys.argv[1:]
    engine = Engine(EngineConfig(model=folder, device="cuda", max_rows=8, seed=1, num_pages=64))
    for number in range(4):
        sampling = SamplingParams(max_new_tokens=400, seed=number, ignore_eos=True)
        engine.submit(Request(request_id=number, prompt_ids=[3, 4, 5, 6 + number], sampling=sampling))
    told = 0
    while told < 40:
        told += engine.step().token_ids.size
    break_device(how)
    print(json.dumps(met(engine)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
