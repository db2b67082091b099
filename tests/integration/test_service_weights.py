"""Weight updates through the service: proven, versioned, one at a time, held by a lease, refused without a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

import rollout
from rollout.errors import (
    DigestMismatch,
    ManifestMismatch,
    NeedsWeights,
    NoUpdate,
    UpdateBusy,
    WeightsChanged,
    WeightsFileRefused,
    WeightUpdateError,
)
from tests.fakes import TENSORS, fake_logprobs, fake_service

LONG = 20_000
MANIFEST = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in TENSORS.items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = {"lease_s": 1.0, "engine_options": {"step_s": 0.002}}
    with fake_service(tmp_path_factory.mktemp("model"), **options) as client:
        yield client


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def tensors_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, (_, shape) in TENSORS.items()}


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(tensor.numpy().view(np.uint32).astype(np.uint64).sum()) for name, tensor in tensors.items()}


def written(client: Any, tensors: dict[str, torch.Tensor], name: str = "update.safetensors") -> Path:
    path = Path(client.info().weights_dir) / name
    save_file(tensors, path)
    return path


def stage(client: Any, update_id: str, path: Path) -> None:
    digest = xxhash.xxh3_64_hexdigest(path.read_bytes())
    client.weights_stage_file(update_id, str(path), size=path.stat().st_size, xxh3=digest)


def push(client: Any, value: float, **begin: Any) -> rollout.UpdateReport:
    tensors = tensors_of(value)
    ticket = client.weights_begin(MANIFEST, trainer_step=7, **begin)
    stage(client, ticket.update_id, written(client, tensors))
    report = client.weights_commit(ticket.update_id, digests=digests_of(tensors))
    assert report.version == ticket.version
    return report


def test_an_update_is_published_while_a_request_runs_and_each_token_has_its_version(client: Any) -> None:
    before = client.info().version
    stream = client.stream([1], max_new_tokens=LONG, seed=3)
    next(stream)
    report = push(client, 1.0)
    assert report.version == before + 1
    assert (report.num_tensors, report.changed_tensors, report.warning) == (2, 2, None)
    assert report.canary_gap is None
    time.sleep(0.05)
    client.cancel(stream.request_id)
    generation = list(stream)[-1].finished
    versions = generation.versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {before, before + 1}
    assert generation.kv_spans == ((0, before), (1 + versions.index(before + 1), before + 1))
    for version in (before, before + 1):
        where = generation.versions == version
        assert np.array_equal(generation.logprobs[where], fake_logprobs(generation.ids[where], version))
    assert client.info().version == client.score([1, 2]).version == before + 1


def test_canaries_travel_with_the_commit(client: Any) -> None:
    ticket = client.weights_begin(MANIFEST)
    stage(client, ticket.update_id, written(client, tensors_of(2.0)))
    canaries = [rollout.CanarySpec(ids=[1, 2, 3], expected_logprobs=[-1.0, -2.0]), rollout.CanarySpec(ids=[4, 5], expected_logprobs=[-1.0])]
    assert client.weights_commit(ticket.update_id, canaries=canaries).canary_gap == 0.0


def test_a_refused_update_leaves_the_old_version_and_the_next_one_works(client: Any) -> None:
    version = client.info().version
    with pytest.raises(ManifestMismatch):
        client.weights_begin({"bogus": {"dtype": "float32", "shape": [1]}})
    ticket = client.weights_begin(None)
    with pytest.raises(ManifestMismatch, match="not complete"):
        client.weights_commit(ticket.update_id)
    with pytest.raises(NoUpdate, match="weights_begin"):
        client.weights_commit(ticket.update_id)
    ticket = client.weights_begin(MANIFEST)
    tensors = tensors_of(3.0)
    stage(client, ticket.update_id, written(client, tensors))
    with pytest.raises(DigestMismatch):
        client.weights_commit(ticket.update_id, digests={name: value + 1 for name, value in digests_of(tensors).items()})
    assert client.info().version == client.score([1, 2]).version == version
    assert push(client, 3.0).version > ticket.version


def test_a_file_outside_the_folder_or_other_than_announced_is_refused_and_the_update_stays_open(client: Any, tmp_path: Path) -> None:
    outside = tmp_path / "x.safetensors"
    save_file(tensors_of(4.0), outside)
    folder = Path(client.info().weights_dir)
    link = folder / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    size = outside.stat().st_size
    ticket = client.weights_begin(MANIFEST)
    for path in (str(outside), "link", "../x", "absent"):
        with pytest.raises(WeightsFileRefused, match="weights_dir"):
            client.weights_stage_file(ticket.update_id, path, size=size)
    path = written(client, tensors_of(4.0))
    with pytest.raises(WeightsFileRefused, match="XXH3"):
        client.weights_stage_file(ticket.update_id, str(path), size=size, xxh3="0" * 16)
    stage(client, ticket.update_id, path)
    assert client.weights_commit(ticket.update_id).changed_tensors == 2
    link.unlink()


def test_a_second_update_gets_busy_with_holder_and_age_and_the_holder_keeps_its_own(client: Any) -> None:
    ticket = client.weights_begin(MANIFEST)
    with rollout.connect(client.address, name="other trainer") as other:
        with pytest.raises(UpdateBusy, match=r"held by .* for \d+\.\d s; one update at a time; wait for its commit or abort"):
            other.weights_begin(MANIFEST)
        with pytest.raises(NoUpdate):
            other.weights_commit(ticket.update_id)
        other.weights_abort(ticket.update_id)
        with pytest.raises(UpdateBusy):
            other.weights_begin(MANIFEST)
        client.weights_abort(ticket.update_id)
        client.weights_abort(ticket.update_id)
        other.weights_abort(other.weights_begin(MANIFEST).update_id)


def test_an_update_and_a_pause_end_with_their_holder(client: Any) -> None:
    version = client.info().version
    with rollout.connect(client.address) as trainer:
        ticket = trainer.weights_begin(MANIFEST)
        stage(trainer, ticket.update_id, written(client, tensors_of(9.0)))
        trainer.pause()
        assert client.stats()["paused"]
    wait_until(lambda: not client.stats()["paused"])
    assert client.info().version == version
    assert push(client, 5.0).version == ticket.version + 1


def test_a_request_with_a_minimum_version_waits_for_it_or_expires(client: Any) -> None:
    version = client.info().version
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.generate, [1], max_new_tokens=3, min_version=version + 1)
        expired = pool.submit(client.generate, [1], max_new_tokens=3, min_version=version + 100, deadline_s=0.2)
        assert expired.result(5).finish_reason.kind == "expired"
        assert not waiting.done()
        assert client.stats()["waiting_for_host_or_version"] == 1
        report = push(client, 6.0)
        assert waiting.result(5).versions.tolist() == [report.version] * 3


def test_restore_is_refused_while_nothing_is_needed(client: Any) -> None:
    with pytest.raises(WeightUpdateError, match="needed weights: none; push under a new version"):
        client.weights_begin(MANIFEST, restore=0)


def test_staging_runs_beside_decoding(client: Any) -> None:
    stream = client.stream([1], max_new_tokens=LONG)
    next(stream)
    ticket = client.weights_begin(MANIFEST)
    path = written(client, tensors_of(7.0))
    for _ in range(20):
        before = client.stats()["tokens"]
        stage(client, ticket.update_id, path)
        wait_until(lambda before=before: client.stats()["tokens"] > before, 2.0)  # type: ignore[misc]
    client.weights_abort(ticket.update_id)
    stream.close()


def test_after_a_host_death_trained_weights_are_asked_for_and_can_be_restored(tmp_path: Path) -> None:
    service = fake_service(tmp_path, engine_options={"step_s": 0.001})
    with service as client:
        assert service.pid is not None
        version = push(client, 1.0).version
        ticket = client.weights_begin(None)
        [host] = psutil.Process(service.pid).children()
        host.kill()
        wait_until(lambda: client.info().needs_weights == version)
        with pytest.raises(NoUpdate):
            client.weights_commit(ticket.update_id)
        with pytest.raises(NeedsWeights, match=f"weights of version {version}.*push the trainer's weights"):
            client.generate([1], max_new_tokens=2)
        wait_until(lambda: client.info().health == "needs_weights")
        assert client.stats()["engine"] is not None, "that is said once a host is there to take weights"
        with pytest.raises(WeightUpdateError, match=f"needed weights: version {version}"):
            client.weights_begin(None, restore=version + 5)
        with pytest.raises(WeightUpdateError, match="push all tensors"):
            client.weights_begin(None, partial=True)
        ticket = client.weights_begin(None, restore=version)
        stage(client, ticket.update_id, written(client, tensors_of(1.5)))
        with pytest.raises(WeightsChanged, match="leave restore out"):
            client.weights_commit(ticket.update_id)
        assert client.info().health == "needs_weights"
        assert push(client, 1.0, restore=version).version == version
        assert client.info().health == "ready"
        assert client.generate([1], max_new_tokens=2).versions.tolist() == [version] * 2


def kept_version(path: Path) -> str | None:
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        return file.metadata()["version"]


def kill_host(front: int) -> None:
    """Kill a service's engine host and wait until another one is there."""
    [host] = psutil.Process(front).children()
    host.kill()
    wait_until(lambda: [child.pid for child in psutil.Process(front).children()] not in ([], [host.pid]))


def test_a_new_host_takes_the_newest_weights_up_from_the_kept_file_by_itself(tmp_path: Path) -> None:
    kept = tmp_path / "last.safetensors"
    service = fake_service(tmp_path, engine_options={"step_s": 0.001}, keep_last=str(kept), max_restarts=10)
    with service as client:
        assert service.pid is not None
        for value in (1.0, 2.0):
            version = push(client, value).version
            wait_until(lambda version=version: kept_version(kept) == str(version))  # type: ignore[misc]
        assert kept.stat().st_mode & 0o777 == 0o600
        kill_host(service.pid)
        wait_until(lambda: client.info().health == "ready")
        info = client.info()
        assert (info.version, info.needs_weights) == (version, None)
        assert client.generate([1], max_new_tokens=2).versions.tolist() == [version] * 2


def test_a_kept_file_that_nothing_proves_is_not_taken_up_and_the_log_says_why(tmp_path: Path) -> None:
    kept = tmp_path / "last.safetensors"
    service = fake_service(tmp_path, keep_last=str(kept))
    with service as client:
        assert service.pid is not None and service.folder is not None
        tensors = tensors_of(1.0)
        ticket = client.weights_begin(MANIFEST)
        stage(client, ticket.update_id, written(client, tensors))
        client.weights_commit(ticket.update_id)
        wait_until(lambda: kept_version(kept) == str(ticket.version))
        kill_host(service.pid)
        wait_until(lambda: client.info().health == "needs_weights")
        said = f"version {ticket.version} is not taken up from {kept}: nothing proves it"
        assert said in (service.folder / "service.log").read_text()
        assert push(client, 1.0).version > ticket.version
        assert client.generate([1], max_new_tokens=2).ids.size == 2
