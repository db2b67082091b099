"""Features of the engine mixed at random: whatever meets, requests end, and every number is what its own record says.

Groups, lineages, salts, both cache policies, resumed output, forced, stop and kept ids, penalties, filters and scored prompts run in
small pools, while updates (good, refused, diverged, with all requests cut and resumed), sleep, cancels, hints and scores come in between.
The oracle knows the weights of each version and what a consumer knows: ids, versions, `kv_rebuilt_at` and `kv_spans`. By them it runs
transformers position by position, shapes, filters and draws anew, in float64.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from areno import Canary, Engine, FinishKind, Request
from areno.errors import CanaryMismatch
from areno.kv.prefix import expand_spans
from areno.sampling.noise import gumbel
from tests.engine_runs import Output, Recorder, assert_idle, make_engine, request
from tests.fixtures_models import checkpoint_tensors, reference_logprobs, reference_model, write_checkpoint
from trainer_bridge import TurnSpan

END, VOCAB, NUM_MODELS, MAX_STEPS = 2, 256, 3, 6000
TOLERANCE, CLOSE = 2e-4, 1e-3
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SAMPLING: list[dict[str, list[Any]]] = [
    {"temperature": [0.0, 0.7, 1.6]},
    {"top_k": [1, 3, 20, 64]},
    {"top_p": [0.3, 0.9]},
    {"min_p": [0.05, 0.3]},
    {"repetition_penalty": [0.8, 1.3]},
    {"presence_penalty": [-0.5, 0.7], "frequency_penalty": [-0.3, 0.4]},
    {"logit_bias": [{7: 4.0, 50: -3.0, END: 2.0}]},
    {"stop_ids": [[11, 12], list(range(40, 53))]},
    {"ignore_eos": [True]},
    {"ignore_eos": [True]},
]


class Weights(NamedTuple):
    """Some checkpoints of one architecture: where the first one lies, all of their tensors, and what transformers makes of them."""

    folder: Path
    tensors: list[dict[str, torch.Tensor]]
    models: list[Any]


@pytest.fixture(scope="module", params=["llama", "windowed"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    root = tmp_path_factory.mktemp(request.param)
    family, keys = ("llama", {}) if request.param == "llama" else ("qwen3", WINDOWED)
    folders = [write_checkpoint(root / str(number), family, seed=number, **keys) for number in range(NUM_MODELS)]
    return Weights(folders[0], [checkpoint_tensors(one) for one in folders], [reference_model(one) for one in folders])


class Churn:
    """One engine, what was asked of it, and what it said."""

    def __init__(self, weights: Weights, seed: int) -> None:
        self.draw, self._rng, self._weights = random.Random(seed), np.random.default_rng(seed), weights
        draw, page = self.draw, self.draw.choice([2, 4, 5, 16])
        self.context = draw.choice([96, 160])
        self.engine: Engine = make_engine(
            weights.folder,
            page_size=page,
            num_pages=int(draw.choice([1.05, 1.3, 2.0]) * self.context / page) + 1,
            max_model_len=self.context,
            max_rows=draw.choice([2, 4, 8]),
            run_ahead=draw.choice([0, 2]),
            decode_tables=draw.choice(["resident", "rebuilt"]),
            max_prefill_tokens=draw.choice([3, 16, 512]),
            compaction_steps=draw.choice([1, 8]),
            sampling_slots=draw.choice([1, 3]),
            kept_ids=True,
            prefix_cache=draw.random() < 0.9,
        )
        self._late = self.engine.info.run_ahead + 2
        self._beginnings = [self._rng.integers(3, 250, 80) for _ in range(2)]
        self._numbers, self._steps, self._committed_at = itertools.count(), 0, -100
        self.recorder, self.requests = Recorder(), dict[int, Request]()
        self.model_of, self.diverged = {0: weights.models[0]}, set[int]()

    def _prompt(self) -> np.ndarray:
        ended = [number for number in self.requests if self.recorder.outputs[number].finished is not None]
        if ended and self.draw.random() < 0.3:
            number = self.draw.choice(ended[-8:])
            prompt = np.append(self.requests[number].prompt_ids, np.array(self.recorder.outputs[number].ids, np.int64))
        else:
            prompt = self.draw.choice(self._beginnings)[: self.draw.choice([1, 16, 23, 40, 61])]
        return np.append(prompt, self._rng.integers(3, 250, self.draw.choice([0, 0, 1, 7])))[: self.context - 2]

    def ask(self) -> None:
        """Submit a request, or some with one prompt."""
        draw, prompt = self.draw, self._prompt()
        prior = draw.randrange(min(prompt.size, 20)) if draw.random() < 0.3 else 0
        budget = prior + min(draw.choice([1, 5, 30, 80, 150]), self.context - prompt.size)
        chosen: dict[str, Any] = {"max_new_tokens": budget}
        for part in draw.sample(SAMPLING, draw.randrange(4)):
            chosen |= {name: draw.choice(values) for name, values in part.items()}
        if draw.random() < 0.3:
            chosen["min_new_tokens"] = draw.randrange(budget + 1)
        if draw.random() < 0.2:
            chosen["forced_ids"] = self._rng.choice([11, 40, 100, 200], draw.randrange(1, budget + 1))
        if draw.random() < 0.25 and prompt.size > 1:
            chosen["prompt_logprobs_from"] = draw.randrange(1, prompt.size)
        chosen["return_kept_ids"] = "top_k" in chosen
        group, alike = draw.randrange(100), draw.random() < 0.6
        own: dict[str, Any] = {}
        for _ in range(draw.choice([1, 1, 2, 4])):
            if not own or not alike:
                own = {"lineage": draw.choice([None, "a", "b"]), "cache_salt": draw.choice([None, None, "s"])}
                own |= {"kv_policy": draw.choice(["keep", "recompute"]), "max_kv_lag": draw.choice([0, 4])}
            self._submit(prompt, {**chosen, "seed": draw.randrange(2**64)}, group=group, prior_output_tokens=prior, **own)

    def _submit(self, prompt: np.ndarray, sampling: dict[str, Any], **own: Any) -> None:
        number = next(self._numbers)
        self.requests[number] = request(number, prompt, **sampling, **own)
        self.engine.submit(self.requests[number])

    def step(self) -> None:
        """Step and look at everything."""
        self._steps += 1
        self._take(self.engine.step())

    def _take(self, output: Any) -> None:
        self.recorder.add(output)
        self.engine.check_integrity()
        for finished in output.finished:
            if finished.reason.kind is FinishKind.FAILED:
                bad = self.engine.version in self.diverged or (self.diverged and self._steps - self._committed_at <= self._late)
                assert bad, f"{finished} under good weights"

    def _live(self) -> list[int]:
        return [number for number in self.requests if self.recorder.outputs[number].finished is None]

    def push(self) -> None:
        """Update the weights, in one of the ways in which that can go."""
        draw, number, version = self.draw, self.draw.randrange(NUM_MODELS), self.engine.version + self.draw.choice([1, 2])
        how = draw.choice(["good", "good", "good", "cut", "diverged", "refused", "given up"])
        self.engine.begin_update(None, version=version)
        for name, tensor in self._weights.tensors[number].items():
            spoilt = how == "diverged" and "input_layernorm" in name
            self.engine.stage(name, torch.full_like(tensor, 3e38) if spoilt else tensor)
        self.step()
        if how == "given up":
            self.engine.abort_update()
            return
        if how == "refused":
            with pytest.raises(CanaryMismatch):
                self.engine.commit_update(canaries=[Canary(ids=np.arange(5, 25), expected_logprobs=np.full(19, -3.0, np.float32))])
            return
        cut = [one for one in self._live() if how == "cut" and self.engine.cancel(one, detail="update")]
        while how == "cut" and self.engine.has_work:
            self.step()
        self.engine.commit_update()
        self._committed_at = self._steps
        self.model_of[version] = self._weights.models[number]
        if how == "diverged":
            self.diverged.add(version)
        for one in cut:
            self._resume(self.requests[one], self.recorder.outputs[one])

    def _resume(self, asked: Request, output: Output) -> None:
        if output.end.reason.kind is FinishKind.CANCELLED:
            sampling = {name: getattr(asked.sampling, name) for name in asked.sampling.__dataclass_fields__}
            own = {name: getattr(asked, name) for name in ("lineage", "cache_salt", "kv_policy", "max_kv_lag")}
            prior = asked.prior_output_tokens + len(output.ids)
            prompt = np.append(asked.prompt_ids, np.array(output.ids, np.int64)).astype(np.int64)
            self._submit(prompt, sampling, prior_output_tokens=prior, **own)

    def interfere(self) -> None:
        """Do one of the other things that may happen between two steps."""
        draw, live = self.draw, self._live()
        what = draw.choice(["cancel", "push", "sleep", "forget", "hint", "score"])
        if what == "cancel" and live:
            self.engine.cancel(draw.choice(live))
        elif what == "push":
            self.push()
        elif what == "sleep":
            self._take(self.engine.sleep(draw.choice(["kv", "weights"])))
            self.ask()
            self.engine.cancel(draw.choice(self._live()))
            self._take(self.engine.collect())
            self.engine.wake()
        elif what == "forget":
            self.engine.clear_prefix_cache()
        elif what == "hint":
            self.engine.expect_return(draw.choice("ab"), draw.choice([1e-4, 100.0]))
        elif what == "score" and self.engine.version not in self.diverged:
            ids = self._rng.integers(3, 250, draw.randrange(2, 60))
            score, model = self.engine.score(ids), self.model_of[self.engine.version]
            assert np.abs(score.raw_logprobs - reference_logprobs(model, ids)).max() < TOLERANCE

    def run(self, steps: int) -> None:
        """Let things happen for some steps, then let all requests end."""
        for _ in range(steps):
            if self.draw.random() < 0.2:
                self.ask()
            if self.draw.random() < 0.12:
                self.interfere()
            self.step()
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        assert_idle(self.engine)


class Oracle:
    """What the record of one request says that its numbers must be."""

    def __init__(self, churn: Churn, number: int) -> None:
        self._churn, self.asked, self.output = churn, churn.requests[number], churn.recorder.outputs[number]
        self.sampling, self.prior = self.asked.sampling, self.asked.prior_output_tokens
        self.prompt = np.asarray(self.asked.prompt_ids, np.int64)
        self.ids = np.append(self.prompt, np.array(self.output.ids, np.int64))
        self.stops = set(np.asarray(self.sampling.stop_ids).tolist()) | (set() if self.sampling.ignore_eos else {END})
        self.forced = [] if self.sampling.forced_ids is None else np.asarray(self.sampling.forced_ids).tolist()

    def check(self) -> None:
        """Check everything."""
        self._check_end()
        logits, first = self._logits()
        if logits is not None:
            self._check_tokens(logits, first)
        self._check_exact()
        self._check_prompt_score()

    def _check_end(self) -> None:
        end, ids = self.output.end, self.output.ids
        why: tuple[FinishKind, int | None] | None = None
        assert (end.seed, end.prompt_tokens, end.output_tokens) == (self.sampling.seed, self.prompt.size, len(ids))
        assert end.cached_tokens < self.prompt.size and self.output.versions == sorted(self.output.versions)
        for place, token in enumerate(ids, start=self.prior):
            assert why is None, "it went on after its end"
            assert place >= len(self.forced) or token == self.forced[place]
            if token in self.stops and place >= self.sampling.min_new_tokens:
                why = FinishKind.STOP, token
            elif place + 1 == self.sampling.max_new_tokens:
                why = FinishKind.LENGTH, None
        early = end.reason.kind in (FinishKind.CANCELLED, FinishKind.FAILED)
        assert why == (None if early else (end.reason.kind, end.reason.stop_id))

    def _logits(self) -> tuple[torch.Tensor | None, int]:
        """Return the logits of the tokens whose cache is on record, and which is the first of them. Shapes: [tokens, V]."""
        size, versions, end = self.prompt.size, self.output.versions, self.output.end
        starts = [size, *(place for place in end.kv_rebuilt_at if size < place < self.ids.size)]
        assert list(end.kv_rebuilt_at) == sorted(set(end.kv_rebuilt_at))
        if not versions:
            return None, 0
        last_is_whole = not end.kv_rebuilt_at or end.kv_rebuilt_at[-1] < self.ids.size
        reuses = self.asked.lineage is not None and self.asked.kv_policy == "keep"
        rows: list[torch.Tensor] = []
        first = 0
        for start, stop in itertools.pairwise([*starts, self.ids.size]):
            ran_by = np.concatenate([np.full(start, versions[start - size]), versions[start - size + 1 : stop - size]]).astype(np.int64)
            if stop == self.ids.size and last_is_whole and end.reason.kind is not FinishKind.FAILED:
                said = expand_spans(end.kv_spans, stop - 1)
                lag = self.asked.max_kv_lag if reuses else 0
                assert (said[start:] == ran_by[start:]).all() and said[:start].min() >= versions[start - size] - lag
                ran_by = said
            elif reuses:
                # What a lineage gave an earlier cache is not on record.
                first, rows = stop - size, []
                continue
            assert not set(ran_by.tolist()) & self._churn.diverged
            rows.append(self._run(self.ids[:stop], ran_by)[start - 1 :])
        return (torch.cat(rows), first) if rows else (None, 0)

    def _run(self, ids: np.ndarray, ran_by: np.ndarray) -> torch.Tensor:
        """Return the logits after each position but the last, all on one cache. Shapes: `ran_by` [n - 1], float64 [n - 1, V]."""
        cache, rows, start = transformers.DynamicCache(), [], 0
        for version, run in itertools.groupby(ran_by.tolist()):
            stop = start + len(list(run))
            with torch.no_grad():
                given = torch.as_tensor(ids[None, start:stop])
                rows.append(self._churn.model_of[version](input_ids=given, cache=cache, use_cache=True).logits[0].double())
            start = stop
        return torch.cat(rows)

    def _check_tokens(self, logits: torch.Tensor, first: int) -> None:
        output, size, heat = self.output, self.prompt.size, self.sampling.temperature
        chosen = torch.as_tensor(self.ids[size + first :])[:, None]
        raw, tempered = (torch.log_softmax(one, 1).gather(1, chosen)[:, 0].numpy() for one in (logits, logits / (heat or 1.0)))
        assert np.abs(raw - output.raw_logprobs[first:]).max() < TOLERANCE
        assert np.abs(tempered - output.logprobs[first:]).max() < TOLERANCE / min(heat or 1.0, 1.0)
        count = len(output.ids) - first
        seeds = torch.from_numpy(np.full(count, self.sampling.seed, np.uint64).view(np.int64))
        positions = torch.arange(size + first, self.ids.size)
        noise = gumbel(seeds, positions, torch.arange(VOCAB, dtype=torch.int32)).double().numpy() if heat else np.zeros((count, VOCAB))
        for row in range(count):
            self._check_draw(first + row, logits[row].numpy(), noise[row])

    def _check_draw(self, place: int, logits: np.ndarray, noise: np.ndarray) -> None:
        sampling, token, number = self.sampling, self.output.ids[place], self.prior + place
        waits = number < sampling.min_new_tokens and bool(self.stops)
        scores, shapes = self._shaped(logits, place, waits)
        scores, is_clear = self._filtered(scores)
        behaviour = self.output.behaviour_logprobs[place]
        if number < len(self.forced) or not (waits or shapes or sampling.filters):
            assert np.isnan(behaviour)
        elif is_clear:
            assert abs(behaviour - (scores[token] - np.logaddexp.reduce(scores))) < CLOSE
        if is_clear and number >= len(self.forced):
            assert (scores + noise).max() - (scores + noise)[token] < CLOSE / min(sampling.temperature or 1.0, 1.0)
        kept = set(np.flatnonzero(np.isfinite(scores)).tolist()) if sampling.return_kept_ids else set()
        assert not is_clear or set(self.output.kept[place]) == kept

    def _shaped(self, logits: np.ndarray, place: int, waits: bool) -> tuple[np.ndarray, bool]:
        """Return what the filters see, and whether biases or penalties changed it."""
        sampling, given = self.sampling, self.prompt.size - self.prior
        scores = logits.copy()
        for token, bias in sampling.logit_bias.items():
            scores[token] += np.float32(bias)
        if waits:
            scores[list(self.stops)] = -np.inf
        counts = np.bincount(self.ids[given : self.prompt.size + place], minlength=VOCAB)
        seen = (np.bincount(self.ids[:given], minlength=VOCAB) + counts) > 0
        repetition = sampling.repetition_penalty
        scores = np.where(seen, np.where(scores > 0, scores / repetition, scores * repetition), scores)
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        shapes = bool(sampling.logit_bias) or repetition != 1.0 or sampling.presence_penalty != 0.0
        return scores / (sampling.temperature or 1.0), shapes

    def _filtered(self, scores: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return what the filters leave, and whether no score or mass is so near a threshold that float32 may see it otherwise."""
        sampling, near, is_clear = self.sampling, CLOSE / (self.sampling.temperature or 1.0), True
        if sampling.min_p:
            limit = scores.max() + np.log(sampling.min_p)
            is_clear = not (np.abs(scores - limit) < near).any()
            scores = np.where(scores < limit, -np.inf, scores)
        if sampling.top_k:
            ordered = np.sort(scores)[::-1]
            limit, following = ordered[sampling.top_k - 1], ordered[sampling.top_k]
            is_clear &= bool(limit == -np.inf or limit - following > near)
            scores = np.where(scores < limit, -np.inf, scores)
        if sampling.top_p < 1.0:
            order = np.argsort(-scores, kind="stable")
            mass = np.cumsum(np.exp(scores[order] - np.logaddexp.reduce(scores)))
            is_clear &= not (np.abs(mass - sampling.top_p) < CLOSE).any()
            limit = scores[order[int(np.searchsorted(mass, sampling.top_p))]]
            scores = np.where(scores < limit, -np.inf, scores)
        return scores, is_clear

    def _check_exact(self) -> None:
        """What the bridge takes for tokens of one version alone has the numbers of a whole forward."""
        size, end, versions = self.prompt.size, self.output.end, np.array(self.output.versions)
        if not versions.size:
            return
        turn = TurnSpan(start=size, end=self.ids.size, kv_spans=end.kv_spans, kv_rebuilt_at=end.kv_rebuilt_at)
        for version in np.unique(versions).tolist():
            places = np.arange(size, self.ids.size)
            exact = (versions == version) & (places >= turn.first_spoken_for) & (places <= turn.first_foreign_place(version))
            gaps = np.abs(reference_logprobs(self._churn.model_of[version], self.ids)[size - 1 :] - self.output.raw_logprobs)
            assert not exact.any() or gaps[exact].max() < TOLERANCE

    def _check_prompt_score(self) -> None:
        first, score = self.sampling.prompt_logprobs_from, self.output.prompt_score
        assert (score is None or first is not None) and (score is not None or first is None or not self.output.ids)
        if score is None or first is None:
            return
        assert score.start == first and score.logprobs.size == self.prompt.size - first and score.version not in self._churn.diverged
        if self.asked.lineage is None or self.asked.kv_policy == "recompute":
            expected = reference_logprobs(self._churn.model_of[score.version], self.prompt)[first - 1 :]
            assert np.abs(expected - score.raw_logprobs).max() < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
def test_whatever_meets_every_number_is_what_its_record_says(weights: Weights, seed: int) -> None:
    churn = Churn(weights, seed)
    churn.run(120)
    ends = Counter(churn.recorder.outputs[number].end.reason.kind for number in churn.requests)
    for number in churn.requests:
        try:
            Oracle(churn, number).check()
        except AssertionError as error:
            error.add_note(f"{churn.requests[number]}\n{churn.recorder.outputs[number].end}\n{churn.recorder.outputs[number].versions}")
            raise
    stats = churn.engine.stats()
    assert all(stats[kind.value] == count for kind, count in ends.items()) and ends[FinishKind.LENGTH]
    assert stats["sampled_tokens"] == sum(len(output.ids) for output in churn.recorder.outputs.values())
