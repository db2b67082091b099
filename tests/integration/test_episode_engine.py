"""Episodes over the engine itself: the ids that went in and came out are the row, and its log-probabilities are the reference's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areno import Engine, EngineConfig, Request, SamplingParams
from rollout.agent import ChatFormat, Episode, EpisodeTask, Step, TurnSampling, group_tasks, run_episodes
from rollout.tokenizer_files import read_tokenizer_files, tokenizer_digest
from tests.fixtures_models import reference_logprobs, reference_model, write_checkpoint
from tests.unit.rollout.agent.byte_tokenizer import CHATML, LLAMA, THINKING, control_id, files, spelled

END = control_id("<|im_end|>")
USER = [{"role": "user", "content": "go"}]
REQUEST_FIELDS = ("lineage", "cache_salt", "kv_policy", "max_kv_lag")
SAMPLING_FIELDS = ("max_new_tokens", "min_new_tokens", "temperature", "seed", "stop_ids", "ignore_eos", "forced_ids", "logprobs")


class EngineClient:
    """The calls of an episode, answered by an engine in this process that is stepped while anyone waits."""

    def __init__(self, engine: Engine, folder: Path):
        self.engine, self.files = engine, read_tokenizer_files(folder)
        self.prompts: list[list[int]] = []
        self._waiting: dict[int, tuple[asyncio.Future[Any], list[Any]]] = {}
        self._numbers: dict[bytes, int] = {}

    async def info(self) -> Any:
        return SimpleNamespace(engine=self.engine.info, tokenizer_digest=tokenizer_digest(self.files))

    async def tokenizer_files(self) -> dict[str, bytes]:
        return self.files

    async def cancel(self, request_id: bytes) -> None:
        self.engine.cancel(self._numbers[request_id])

    async def generate(self, prompt_ids: np.ndarray, **options: Any) -> Any:
        number = self._numbers[options["request_id"]] = len(self._numbers)
        sampling = SamplingParams(**{name: options[name] for name in SAMPLING_FIELDS})
        self.prompts.append(prompt_ids.tolist())
        self.engine.submit(
            Request(request_id=number, prompt_ids=prompt_ids, sampling=sampling, **{name: options[name] for name in REQUEST_FIELDS})
        )
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, [])
        while not future.done():
            await asyncio.sleep(0)
            if not future.done():
                self._step()
        finished, columns = future.result()
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)] or [np.empty(0)] * 4
        return SimpleNamespace(
            request_id=options["request_id"],
            prompt_ids=prompt_ids,
            ids=joined[0].astype(np.int32),
            logprobs=joined[1],
            raw_logprobs=joined[2],
            behaviour_logprobs=None,
            versions=joined[3].astype(np.int64),
            kept_counts=None,
            kept_ids=None,
            kv_spans=finished.kv_spans,
            kv_rebuilt_at=finished.kv_rebuilt_at,
            finish_reason=SimpleNamespace(
                kind=finished.reason.kind, stop_id=finished.reason.stop_id, stop_string=None, detail=finished.reason.detail
            ),
            seed=finished.seed,
            cached_tokens=finished.cached_tokens,
            prompt_tokens=finished.prompt_tokens,
        )

    def _step(self) -> None:
        output = self.engine.step()
        for number, (_, columns) in self._waiting.items():
            own = output.request_ids == number
            if own.any():
                columns.append((output.token_ids[own], output.logprobs[own], output.raw_logprobs[own], output.versions[own]))
        for finished in output.finished:
            future, columns = self._waiting.pop(finished.request_id)
            future.set_result((finished, columns))


def _folder(path: Path, template: str, **options: bool) -> Path:
    write_checkpoint(path, "llama", vocab_size=288, eos_token_id=END, bos_token_id=control_id("<s>"))
    for name, content in files(template, **options).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(params=[CHATML, THINKING], ids=["chatml", "thinking"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineClient]:
    engine = Engine(EngineConfig(model=str(_folder(tmp_path, request.param)), max_rows=8, num_pages=256, page_size=8))
    yield EngineClient(engine, tmp_path)
    assert not engine.has_work
    engine.check_integrity()
    engine.close()


def check_against_reference(folder: Path, rows: Any) -> None:
    model = reference_model(folder)
    for row in rows:
        for temperature in {turn.temperature for turn in row.turns}:
            wanted = reference_logprobs(model, row.ids, temperature)
            own = row.mask & (row.temperatures == np.float32(temperature))
            assert np.abs(wanted[own[1:]] - row.logprobs[own]).max() < 1e-4


def test_the_second_turn_runs_on_the_very_ids_that_were_sampled(client: EngineClient, tmp_path: Path) -> None:
    said = spelled("hello")
    assert ChatFormat(client.files).rendered_ids("hello").size == 1

    async def run() -> Episode:
        episode = await Episode.open(client, messages=USER)
        await episode.act(forced_ids=[*said, END], temperature=0.7)
        episode.observe([{"role": "tool", "content": "42"}])
        await episode.act(max_new_tokens=24, ignore_eos=True)
        return episode

    episode = asyncio.run(run())
    (row,) = episode.rows()
    first, second = client.prompts
    assert second[: len(first) + 6] == [*first, *said, END]
    assert row.ids[: len(second)].tolist() == second
    assert row.num_sampled == 6 + 24
    assert row.turns[1].cached_tokens >= len(first) // 8 * 8
    check_against_reference(tmp_path, [row])


def test_spelled_out_ids_as_prompt_arrive_as_they_were_sent(client: EngineClient) -> None:
    said = spelled("hello")

    async def run() -> Episode:
        episode = await Episode.open(client, prompt_ids=said)
        await episode.act(max_new_tokens=3, ignore_eos=True)
        return episode

    episode = asyncio.run(run())
    (row,) = episode.rows()
    assert row.ids[:5].tolist() == said and row.turns[0].prompt_tokens == 5


class Talk:
    """Three turns of talk about a number."""

    async def reset(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"hello {seed}"}]

    async def step(self, turn: Any) -> Step:
        return Step(messages=[{"role": "tool", "content": f"seen {len(turn.ids)} <|im_end|>"}], done=turn.index == 2)

    async def score(self, episode: Any) -> float:
        return float(episode.num_turns)


def test_rows_of_many_sampled_episodes_have_the_references_log_probabilities(client: EngineClient, tmp_path: Path) -> None:
    tasks = [task for seed in range(3) for task in group_tasks(Talk, seed=seed, members=3, group=seed)]
    results = asyncio.run(run_episodes(client, tasks, concurrency=8, sampling=TurnSampling(temperature=1.3, max_new_tokens=12)))
    assert [result.reward for result in results] == [3.0] * 9
    assert sum(row.num_sampled for result in results for row in result.rows) > 9 * 20
    for result in results:
        check_against_reference(tmp_path, result.rows)
        assert all(row.ids[: turn.start].tolist() in client.prompts for row in result.rows for turn in row.turns)
    members = [result.rows[0].ids[result.rows[0].mask].tolist() for result in results[:3]]
    assert len({tuple(ids) for ids in members}) == 3


def test_equal_seeds_give_equal_rows_in_any_company(client: EngineClient) -> None:
    task = EpisodeTask(make_environment=Talk, seed=5)
    sampling = TurnSampling(max_new_tokens=8)
    (alone,) = asyncio.run(run_episodes(client, [task], sampling=sampling))
    others = [EpisodeTask(make_environment=Talk, seed=seed) for seed in (7, 8, 9)]
    crowd = asyncio.run(run_episodes(client, [*others, task], sampling=sampling))
    assert crowd[-1].rows[0].ids.tolist() == alone.rows[0].ids.tolist()


def test_a_start_token_is_seen_once_by_the_model(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(_folder(tmp_path, LLAMA, adds_bos=True)), max_rows=4, num_pages=64))
    client = EngineClient(engine, tmp_path)
    chat = ChatFormat(client.files)

    async def run() -> None:
        for start in ({"messages": USER}, {"text": "hello"}, {"rendered": chat.render(USER)}):
            episode = await Episode.open(client, **start)
            await episode.act(max_new_tokens=2)

    asyncio.run(run())
    bos = control_id("<s>")
    assert [(prompt[0] == bos, prompt.count(bos)) for prompt in client.prompts] == [(True, 1)] * 3
    assert client.prompts[0] == client.prompts[2]
    engine.close()
