"""Hand-written stand-ins for what the bridge calls: a weights client with a plain dictionary behind it, and samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from areno.weights.digest import digest
from rollout.errors import TransportUnavailable, WeightsChanged
from trainer_bridge.samples import SampleStatus, TrainingSample
from trainer_bridge.turns import TurnSpan


def make_sample(
    layout: Sequence[tuple[int, bool]] = ((3, False), (2, True)),
    *,
    seed: int = 0,
    vocab: int = 32,
    temperature: float = 1.0,
    version: int = 0,
    reward: float | None = 1.0,
    filtered: bool = False,
    shaped: bool = False,
    **fields: Any,
) -> TrainingSample:
    """Return a sample made of runs of (length, sampled), with random ids and log-probabilities."""
    draws = np.random.Generator(np.random.PCG64(seed))
    mask = np.concatenate([np.full(length, sampled) for length, sampled in layout])
    edges = np.cumsum([0] + [length for length, _ in layout])
    drawn = {"temperature": temperature, "filtered": filtered, "shaped": shaped}
    turns = tuple(
        TurnSpan(start=int(start), end=int(end), kv_spans=((0, version),), **drawn)  # type: ignore[arg-type]
        for start, end, (_, sampled) in zip(edges, edges[1:], layout)
        if sampled
    )
    logprobs = np.where(mask, -draws.exponential(size=len(mask)), np.nan)
    return TrainingSample(
        ids=draws.integers(0, vocab, size=len(mask)),
        mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, version, -1),
        turns=turns,
        reward=reward,
        **fields,
    )


def failed_sample(**fields: Any) -> TrainingSample:
    """Return a sample of a member whose environment broke."""
    return make_sample(reward=None, status=SampleStatus.FAILED, **fields)


class TinyNet(torch.nn.Module):
    """An embedding, a dropout and a head: enough of a language model to make logits. `tied` shares the two matrices."""

    def __init__(self, vocab: int = 32, width: int = 8, *, tied: bool = False, seed: int = 0):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.drop = torch.nn.Dropout(0.5)
        self.lm_head = torch.nn.Linear(width, vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.drop(self.embed(input_ids)))


@dataclass
class FakeWeightService:
    """The weight operations of the blocking client, on a dictionary; checks digests as the real one does. It takes files alone."""

    weights_dir: Path
    dtype: str = "float32"
    version: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fail_at: Mapping[str, Exception] = field(default_factory=dict)
    on_stage: Callable[[Path], None] | None = None
    calls: list[str] = field(default_factory=list)
    manifests: list[Any] = field(default_factory=list)
    canaries: list[Any] = field(default_factory=list)
    commit_mode: tuple[str, float] | None = None
    restoring: bool = False
    lost_digests: dict[str, int] = field(default_factory=dict)
    partial: list[bool] = field(default_factory=list)
    staged: dict[str, torch.Tensor] | None = None
    needs_weights: int | None = None
    incarnation: str = "first"

    def _reach(self, operation: str) -> None:
        self.calls.append(operation)
        if operation in self.fail_at:
            raise self.fail_at[operation]

    def info(self) -> Any:
        engine = SimpleNamespace(dtype=self.dtype, num_valid_ids=32, max_model_len=64, num_parameters=512, device="cpu")
        if "info" in self.fail_at:
            raise self.fail_at["info"]
        health = "ready" if self.needs_weights is None else "needs_weights"
        return SimpleNamespace(
            health=health,
            version=self.version,
            needs_weights=self.needs_weights,
            incarnation=self.incarnation,
            weights_dir=str(self.weights_dir),
            max_message_bytes=2**20,
            engine=engine,
        )

    def start_again(self, *, folder: Mapping[str, torch.Tensor] | None = None) -> None:
        """Serve the folder's tensors as another process, which knows of no weights that it lost."""
        self.tensors, self.incarnation, self.version = dict(folder or {}), f"{self.incarnation} and another", self.version + 1

    def lose_weights(self, *, folder: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start again from the folder's tensors, as a service does whose engine host died."""
        self.tensors, self.needs_weights = dict(folder or {}), self.version

    def weights_begin(
        self,
        manifest: Mapping[str, Any] | None,
        *,
        trainer_step: int | None = None,
        restore: int | None = None,
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        self._reach("begin" if restore is None else "restore")
        assert restore in (None, self.needs_weights)
        self.manifests.append(manifest)
        self.partial.append(partial)
        self.staged, self.restoring = {}, restore is not None
        return SimpleNamespace(update_id=f"update-{trainer_step}", version=self.version + (restore is None))

    def weights_stage_file(self, update_id: str, path: str, *, size: int, xxh3: str | None, timeout_s: float | None = None) -> None:
        assert Path(path).stat().st_size == size
        tensors = load_file(path)
        if not tensors:
            return  # whether the service sees the folder at all
        self._reach("stage")
        if self.on_stage is not None:
            self.on_stage(Path(path))
        assert self.staged is not None
        self.staged.update(tensors)

    def weights_stage_bucket(self, update_id: str, bucket: int, **_: Any) -> Any:
        raise TransportUnavailable("a dictionary has no memory of others", limit="it takes files", remedy="write files")

    def weights_join_group(self, update_id: str, **_: Any) -> Any:
        raise TransportUnavailable("a dictionary joins no group", limit="it takes files", remedy="write files")

    def weights_commit(
        self, update_id: str, *, digests: Mapping[str, int] | None, canaries: Sequence[Any] = (), mode: str = "", drain_s: float = 0.0
    ) -> Any:
        self._reach("commit")
        assert self.staged is not None
        assert digests == {name: digest(tensor) for name, tensor in self.staged.items()}
        if self.restoring and digests != self.lost_digests:
            raise WeightsChanged("restore brought other weights", remedy="leave restore out")
        old, self.tensors, self.staged = self.tensors, self.staged, None
        self.lost_digests = dict(digests)
        self.canaries, self.commit_mode = list(canaries), (mode, drain_s)
        self.version += not self.restoring
        self.needs_weights = None
        changed = [name for name, tensor in self.tensors.items() if name not in old or not torch.equal(old[name], tensor)]
        return SimpleNamespace(
            version=self.version,
            changed_tensors=len(changed),
            changed_bytes=sum(self.tensors[name].nbytes for name in changed),
            swap_ms=0.1,
            proof_ms=0.2,
            pause_ms=0.3,
            canary_gap=0.0 if canaries else None,
            canary_mean_gap=0.0 if canaries else None,
            decode_canary_gap=0.0 if canaries else None,
            inspect_s=0.0,
            derive_s=0.0,
            warning=None,
        )

    def weights_abort(self, update_id: str, *, timeout_s: float | None = None) -> None:
        self._reach("abort")
        self.staged = None
