"""A real engine as the bridge's tests need it: the weight operations through the service's own intake, samples from its outputs.

Everything runs in the calling thread; only the sockets between client and engine host are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from areno import Engine
from rollout.service.weight_intake import WeightIntake
from rollout.wire.messages import parse_fields
from rollout.wire.weight_handles import WeightsStageBucket
from tests.engine_runs import Output, make_engine
from trainer_bridge import TrainingSample, TurnSpan


class EngineWeights:
    """The weight operations of the blocking client, on an engine of this process."""

    def __init__(self, folder: Path, weights_dir: Path, **options: Any):
        self.engine: Engine = make_engine(folder, **options)
        self.weights_dir = weights_dir
        self.intake = WeightIntake(self.engine, weights_dir)
        self._updates = 0

    def info(self) -> Any:
        return SimpleNamespace(
            incarnation="the only one",
            version=self.engine.version,
            needs_weights=None,
            weights_dir=str(self.weights_dir),
            max_message_bytes=2**20,
            engine=self.engine.info,
        )

    def weights_begin(
        self,
        manifest: Mapping[str, Any] | None,
        *,
        trainer_step: int | None = None,
        restore: int | None = None,
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        specs = None if manifest is None else {name: (spec["dtype"], tuple(spec["shape"])) for name, spec in manifest.items()}
        self._updates += 1
        version = self.engine.version + 1
        self.intake.begin(str(self._updates), version, specs, partial=partial)
        return SimpleNamespace(update_id=str(self._updates), version=version)

    def weights_stage_file(self, update_id: str, path: str, *, size: int, xxh3: str | None, timeout_s: float | None = None) -> None:
        self.intake.stage_file(b"call", update_id, path, size=size, xxh3=xxh3)
        self._finish()

    def weights_stage_bucket(self, update_id: str, bucket: int, *, content: np.ndarray | None = None, **fields: Any) -> Any:
        body = parse_fields(WeightsStageBucket, {"update_id": update_id, "bucket": bucket, **fields})
        assert isinstance(body, WeightsStageBucket)
        self.intake.stage_bucket(b"call", body, content)
        self._finish()
        return SimpleNamespace(result=lambda timeout_s=None: None)

    def weights_join_group(self, update_id: str, **fields: Any) -> Any:
        raise AssertionError("this engine runs in the trainer's process, where no group has a second end")

    def _finish(self) -> None:
        while (staged := self.intake.advance()) is None:
            pass
        if staged.error is not None:
            raise staged.error

    def weights_commit(
        self, update_id: str, *, digests: Mapping[str, int] | None, canaries: Sequence[Any] = (), mode: str = "", drain_s: float = 0.0
    ) -> Any:
        packed = [
            np.concatenate([np.asarray(getattr(canary, name)) for canary in canaries] or [np.empty(0)])
            for name in ("ids", "expected_logprobs")
        ]
        counts = np.array([len(canary.ids) for canary in canaries])
        return self.intake.commit(update_id, digests, packed[0], counts, packed[1], [canary.temperature for canary in canaries])

    def weights_abort(self, update_id: str, *, timeout_s: float | None = None) -> None:
        self.intake.abort(update_id)


def sample_of(turns: Sequence[tuple[Sequence[int] | np.ndarray, Output, float]], **fields: Any) -> TrainingSample:
    """Return one row of turns, each given as (environment ids before it, the engine's output, temperature)."""
    ids: list[int] = []
    columns: dict[str, list[Any]] = {"mask": [], "logprobs": [], "versions": []}
    spans = []
    for environment, output, temperature in turns:
        ids += [int(token) for token in environment] + output.ids
        columns["mask"] += [False] * len(environment) + [True] * len(output.ids)
        columns["logprobs"] += [np.nan] * len(environment) + output.logprobs
        columns["versions"] += [-1] * len(environment) + output.versions
        start = len(ids) - len(output.ids)
        kv = {"kv_spans": output.end.kv_spans, "kv_rebuilt_at": output.end.kv_rebuilt_at}
        spans.append(TurnSpan(start=start, end=len(ids), temperature=temperature, **kv))
    return TrainingSample(ids=ids, turns=tuple(spans), **{"reward": 1.0, **columns, **fields})
