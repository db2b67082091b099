"""Sleep on a card: the memory goes back to the driver, comes back elsewhere, and tokens, numbers and captures are right again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from areno import Engine, Request, SamplingParams, StepOutput
from areno.errors import Asleep
from tests.gpu.test_engine import engine_of, run

pytestmark = pytest.mark.gpu


def requests(count: int = 6) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            request_id=n,
            prompt_ids=rng.integers(3, 500, size=20 + 11 * n),
            sampling=SamplingParams(max_new_tokens=40, seed=n, ignore_eos=True),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("level", ["kv", "weights"])
@pytest.mark.parametrize("graphs", [True, False])
def test_requests_that_sleep_over_give_the_same_tokens(checkpoint: Callable[..., Path], level: str, graphs: bool) -> None:
    options = {"dtype": "float32", "graphs": graphs, "num_pages": 20_000}
    awake = run(engine_of(checkpoint("qwen3"), **options), requests())
    engine = engine_of(checkpoint("qwen3"), **options)
    occupied: list[torch.Tensor] = []
    steps = 0

    def now_and_then(engine: Engine) -> StepOutput | None:
        nonlocal steps
        steps += 1
        if steps not in (4, 15):
            return None
        before = torch.cuda.mem_get_info()[0]
        output = engine.sleep(level)
        torch.cuda.synchronize()
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed > 0.8 * engine._store.num_bytes - (4 << 20)
        with pytest.raises(Asleep):
            engine.step()
        # Whoever borrowed the memory may leave something where pages or weights were.
        occupied.append(torch.full((1 << 20,), float("nan"), device="cuda"))
        engine.wake()
        return output

    told = run(engine, requests(), before_step=now_and_then)
    for number, output in awake.items():
        assert told[number].ids == output.ids
        assert np.abs(np.array(told[number].logprobs) - np.array(output.logprobs)).max() < 1e-4
    assert steps > 15
    again = run(engine, requests())
    assert all(again[number].ids == output.ids for number, output in awake.items())


def test_what_lies_beside_keys_values_and_weights_keeps_none_of_their_memory(checkpoint: Callable[..., Path]) -> None:
    # Sizes of which much is left in the last unit that the allocator takes, and neighbours that would fit in there.
    engines = [engine_of(checkpoint("wide"), dtype="bfloat16", num_pages=pages) for pages in (1000, 1017, 1023, 1031)]
    neighbours = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1_100_000, 1_500_000, 1_900_000) for _ in range(20)]
    for engine in engines:
        assert engine._store.num_bytes > (40 << 20)
        before = torch.cuda.mem_get_info()[0]
        engine.sleep("weights")
        assert torch.cuda.mem_get_info()[0] - before > 0.95 * engine._store.num_bytes
        engine.wake()
        assert all(told.ids for told in run(engine, requests(2)).values())
    assert neighbours


def test_a_wake_without_memory_is_refused_and_works_once_there_is_some(checkpoint: Callable[..., Path]) -> None:
    engine = engine_of(checkpoint("wide"), num_pages=20_000)
    before = engine.digests()
    engine.sleep("weights")
    free = torch.cuda.mem_get_info()[0]
    borrowed = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(Asleep, match="free the memory that was lent out"):
        engine.wake()
    assert engine.asleep in ("kv", "weights")
    del borrowed
    torch.cuda.empty_cache()
    engine.wake()
    assert engine.asleep is None and engine.digests() == before
    assert all(told.ids for told in run(engine, requests(2)).values())
