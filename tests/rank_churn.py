"""An engine of several ranks beside one of one rank through everything that may happen at once, drawn from a seed.

Both are asked alike between any two steps: requests of every sampling need, groups, cancels, updates that go through and updates that
are refused or given up halfway, scores, sleep and waking. After every step both must have told the same, log-probabilities to 1e-4, and
every owner of state is checked, the rows of all ranks among them.

    python -m tests.rank_churn --tp 2 --seconds 600
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno import Canary, Engine, EngineConfig, StepOutput
from areno.errors import ArenoError, WeightUpdateError
from areno.weights.digest import digest
from areno.weights.slices import Slice
from tests.engine_runs import Recorder, assert_idle, random_prompt, request
from tests.fixtures_models import checkpoint_tensors, manifest_of, reference_logprobs, write_checkpoint

VOCAB = 250
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
}
CANARY_IDS = np.random.default_rng(3).integers(3, VOCAB, 20)
MOST_REQUESTS = 24
STEPS = 120
_SCORE_IDS = np.random.default_rng(4).integers(3, VOCAB, 60)


class Checkpoints:
    """One model in two sets of weights, with what proves an update to either. Slow to make: the references come from transformers."""

    def __init__(self, folder: Path, model: str) -> None:
        family, fields = MODELS[model]
        self.folders = [write_checkpoint(folder / f"{model}-{seed}", family, seed=seed, vocab_size=VOCAB, **fields) for seed in (0, 1)]
        self.tensors = [checkpoint_tensors(one) for one in self.folders]
        self.digests = [{name: digest(tensor) for name, tensor in tensors.items()} for tensors in self.tensors]
        self.canaries = [
            Canary(ids=CANARY_IDS, expected_logprobs=reference_logprobs(str(one), CANARY_IDS).astype(np.float32)) for one in self.folders
        ]


def draw_options(rng: np.random.Generator) -> dict[str, Any]:
    """Return an engine's options, in which the pool is too small for all."""
    page_size = int(rng.choice([4, 8]))
    return {
        "max_rows": int(rng.choice([6, 8])),
        "seed": 1,
        "page_size": page_size,
        "num_pages": int(rng.choice([128, 176])) // page_size,
        "max_model_len": 120,
        "max_prefill_tokens": int(rng.choice([16, 48])),
        "sampling_slots": 3,
        "kept_ids": True,
        "compaction_steps": int(rng.choice([1, 2, 8])),
        "run_ahead": int(rng.integers(0, 4)),
        "decode_tables": str(rng.choice(["resident", "resident", "rebuilt"])),
        "prefix_cache": bool(rng.random() < 0.8),
        "device": "cpu",
    }


def draw_sampling(rng: np.random.Generator) -> dict[str, Any]:
    """Return what one request asks of its sampling."""
    temperature = float(rng.choice([0.0, 0.7, 1.0, 1.3]))
    needs: list[dict[str, Any]] = [
        {},
        {},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "return_kept_ids": True},
        {"top_p": 0.8},
        {"top_k": 100, "min_p": 0.001},
        {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logit_bias": {5: 3.0, 240: 4.0}, "stop_ids": [9, 200], "min_new_tokens": 3},
        {"forced_ids": [4, 245, 2], "prompt_logprobs_from": 1},
    ]
    return {"temperature": temperature, **needs[int(rng.integers(len(needs)))], "ignore_eos": bool(rng.random() < 0.7)}


class Churn:
    """Two engines and what is done to both."""

    def __init__(self, seed: int, made: Checkpoints, size: int) -> None:
        self.rng, self._made = np.random.default_rng(seed), made
        options = {**draw_options(self.rng), "model": str(made.folders[0])}
        self.one, self.cut = Engine(EngineConfig(**options)), Engine(EngineConfig(**options, tp=size))
        self._recorder = Recorder()
        self._next_id, self._live, self._weights = 0, set[int](), 0
        self.done: Counter[str] = Counter()
        self._prompts = [random_prompt(self.rng, 4, 60, VOCAB) for _ in range(3)]
        self._plays: tuple[tuple[float, Callable[[], object]], ...] = (
            (0.40, self._submit),
            (0.08, self._group),
            (0.05, self._outgrow),
            (0.10, self._cancel),
            (0.05, self._push),
            (0.04, self._give_up),
            (0.04, self._wrong),
            (0.03, self._score),
            (0.03, self._nap),
            (0.02, self._forget),
        )

    def run(self, steps: int) -> None:
        """Do something before each of some steps, then step until nothing is left. Raises: AssertionError."""
        for _ in range(steps):
            for chance, play in self._plays:
                if self.rng.random() < chance:
                    play()
                    self.done[play.__name__.strip("_")] += 1
            self._step()
        while self.one.has_work or self.cut.has_work:
            self._step()
        assert self.one.stats()["preemptions"] == self.cut.stats()["preemptions"]
        for name in ("preemptions", "forks", "moves", "recomputed", "updates"):
            self.done[name] += int(self.cut.stats()[name])
        for engine in (self.one, self.cut):
            assert_idle(engine)
        assert self.cut.digests() == self.one.digests()

    def close(self) -> None:
        """End the ranks."""
        self.cut.close()

    def _both(self, use: Callable[[Engine], Any]) -> list[Any]:
        return [use(engine) for engine in (self.one, self.cut)]

    def _step(self) -> None:
        self._told(self._both(lambda engine: engine.step()))

    def _told(self, outputs: list[StepOutput]) -> None:
        one, cut = outputs
        for name in ("request_ids", "token_ids", "versions", "kept_counts", "kept_ids"):
            given = [getattr(output, name) for output in outputs]
            assert (given[0] is None and given[1] is None) or np.array_equal(*given), (
                f"{name}: {given[0]} of one rank, {given[1]} of several"
            )
        for name in ("logprobs", "raw_logprobs", "behaviour_logprobs"):
            assert np.allclose(getattr(one, name), getattr(cut, name), atol=1e-4, rtol=0, equal_nan=True), name
        ends = [[(end.request_id, end.reason, end.output_tokens, end.cached_tokens) for end in output.finished] for output in outputs]
        assert ends[0] == ends[1], ends
        for mine, other in zip(one.prompt_scores, cut.prompt_scores, strict=True):
            assert np.allclose(mine.logprobs, other.logprobs, atol=1e-4, rtol=0, equal_nan=True)
        self._recorder.add(cut)
        self._live -= {end.request_id for end in cut.finished}
        self._both(lambda engine: engine.check_integrity())

    def _submit(self, prompt: np.ndarray | None = None, **own: Any) -> None:
        if len(self._live) >= MOST_REQUESTS:
            return
        rng = self.rng
        drawn = self._prompts[int(rng.integers(3))] if rng.random() < 0.4 else random_prompt(rng, 4, 60, VOCAB)
        ids = drawn if prompt is None else prompt
        made = {
            "max_new_tokens": int(rng.choice([3, 20, 60])),
            "seed": int(rng.integers(2**31)),
            "kv_policy": str(rng.choice(["keep", "recompute"])),
            **draw_sampling(rng),
            **({"lineage": f"episode {int(rng.integers(3))}"} if rng.random() < 0.3 else {}),
            **own,
        }
        number = self._next_id
        self._next_id += 1
        self._live.add(number)
        self._both(lambda engine: engine.submit(request(number, ids, **made)))

    def _group(self) -> None:
        prompt, group = random_prompt(self.rng, 4, 40, VOCAB), self._next_id
        for _ in range(3):
            self._submit(prompt=prompt, group=group, max_new_tokens=10)

    def _outgrow(self) -> None:
        """Requests that all fit when they begin and not when they end."""
        for _ in range(4):
            self._submit(prompt=random_prompt(self.rng, 4, 8, VOCAB), max_new_tokens=100, ignore_eos=True, stop_ids=(), forced_ids=None)

    def _cancel(self) -> None:
        if self._live:
            number = int(self.rng.choice(sorted(self._live)))
            assert len(set(self._both(lambda engine: engine.cancel(number)))) == 1

    def _push(self) -> None:
        self._weights = 1 - self._weights
        slices, look = bool(self.rng.random() < 0.3), bool(self.rng.random() < 0.3)
        gaps = self._both(lambda engine: self._update(engine, self._weights, slices=slices, look=look).canary_gap)
        assert max(gaps) < 1e-3, gaps

    def _update(
        self, engine: Engine, weights: int, *, slices: bool = False, look: bool = False, change: str = "", commit: bool = True
    ) -> Any:
        tensors, made = self._made.tensors[weights], self._made
        manifest = manifest_of(tensors)
        canary = made.canaries[weights]
        if change == "canary":
            canary = replace(canary, expected_logprobs=canary.expected_logprobs - np.float32(0.5))
        engine.begin_update(manifest, version=engine.version + 1)
        for number, (name, tensor) in enumerate(tensors.items()):
            sent = tensor
            if change == "digest" and number == len(tensors) // 2:
                sent = tensor.clone()
                sent.reshape(-1)[-1] += 1.0
            if change == "missing" and number == 3:
                continue
            if slices and "proj" in name:
                for start in range(0, sent.numel(), 1501):
                    engine.stage_slices([Slice(name, sent.reshape(-1)[start : start + 1501], start, manifest[name])])
                engine.settle_slices()
            else:
                engine.stage(name, sent)
            if not commit and number == 5:
                return None
        while look and not engine.inspect_update():
            pass
        return engine.commit_update(digests=made.digests[weights], canaries=[canary])

    def _give_up(self) -> None:
        """An update that is aborted in the middle, with steps in between."""
        other = 1 - self._weights
        self._both(lambda engine: self._update(engine, other, commit=False))
        self._step()
        self._both(lambda engine: engine.abort_update())

    def _wrong(self) -> None:
        """An update that is refused leaves all as it was."""
        change, other = str(self.rng.choice(["digest", "missing", "canary"])), 1 - self._weights

        def refused(engine: Engine) -> tuple[type[ArenoError], str]:
            try:
                self._update(engine, other, change=change)
            except WeightUpdateError as error:
                return type(error), str(error.field)
            raise AssertionError(f"an update with a wrong {change} went through")

        first, second = self._both(refused)
        assert first == second, (first, second)

    def _score(self) -> None:
        one, cut = self._both(lambda engine: engine.score(_SCORE_IDS, temperature=0.8))
        assert np.abs(one.token_logprobs - cut.token_logprobs).max() < 1e-4 and one.version == cut.version

    def _forget(self) -> None:
        self._both(lambda engine: engine.clear_prefix_cache())

    def _nap(self) -> None:
        level = str(self.rng.choice(["kv", "weights"]))
        self._told(self._both(lambda engine: engine.sleep(level)))
        self._submit()
        self._cancel()
        self._both(lambda engine: engine.wake())


def main() -> None:
    """Run seeds until the time is over; the first that fails ends it with its number."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, seed, done = time.monotonic(), options.seed, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        models = [Checkpoints(Path(folder), model) for model in MODELS]
        while time.monotonic() - started < options.seconds:
            began = time.monotonic()
            churn = Churn(seed, models[seed % len(models)], options.tp)
            try:
                churn.run(options.steps)
            except BaseException:
                print(json.dumps({"failed_seed": seed, "tp": options.tp, "steps": options.steps}), flush=True)
                raise
            finally:
                churn.close()
            done += churn.done
            print(json.dumps({"seed": seed, "seconds": round(time.monotonic() - began, 1)}), flush=True)
            seed += 1
    print(json.dumps({"seeds": [options.seed, seed - 1], "tp": options.tp, "done": dict(done)}))


if __name__ == "__main__":
    main()
