"""Every transport from a trainer to a real service: the same weights arrive, or the old ones serve on under their own version."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import rollout
from rollout.errors import DigestMismatch, ManifestMismatch, RolloutError, TransportUnavailable
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from trainer_bridge import PushError, WeightPush
from trainer_bridge.weights import bucket as buckets
from trainer_bridge.weights.memory import PREFIX, SHARED_FOLDER

torch.set_num_threads(1)
TRANSPORTS = ("memory", "file", "frames", "group")
IDS = np.random.default_rng(3).integers(3, 250, 40)
PROMPT = IDS[:33]
SMALL = 8192
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, "llama", seed=0)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[rollout.LocalService]:
    service = rollout.local(str(folder), dtype="float32", threads=1, max_rows=8, lease_s=2.0)
    with service:
        yield service


@pytest.fixture
def client(service: rollout.LocalService) -> Any:
    return service.client


def model_of(seed: int) -> Any:
    return tiny_model("llama", seed=seed)


def assert_serves(client: Any, model: Any) -> None:
    """The service computes with this model's weights, in a score and in fresh and cached prefills."""
    expected = reference_logprobs(model, IDS)
    assert np.abs(client.score(IDS).token_logprobs - expected).max() < 1e-4
    for _ in range(2):
        generation = client.generate(PROMPT, max_new_tokens=7, temperature=1.0, seed=5)
        whole = np.concatenate([PROMPT, generation.ids])
        assert np.abs(generation.logprobs - reference_logprobs(model, whole)[len(PROMPT) - 1 :]).max() < 1e-4
        assert set(generation.versions.tolist()) == {client.info().version}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_arrive_whole_by_every_transport_and_old_ones_again_hit_no_old_pages(client: Any, transport: str) -> None:
    old, new = (model_of(100 + 2 * TRANSPORTS.index(transport) + one) for one in (0, 1))
    for model in (old, new, old):
        report = WeightPush(client, model, transport=transport, bucket_bytes=SMALL).push()
        assert report.transport == transport and report.transport_reason.startswith("asked for")
        assert report.canary_gap is not None and report.canary_gap < 1e-4 and report.changed_tensors > 0
        first = client.generate(PROMPT, max_new_tokens=1)
        assert first.cached_tokens == 0, "pages of an older version are never hit, whatever the weights are"
        assert_serves(client, model)


def test_without_sealed_memory_files_in_the_shared_folder_carry_the_weights(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    push = WeightPush(client, model_of(2), transport="memory", bucket_bytes=SMALL)
    assert "by files in /dev/shm, not by sealed memory" in push.push().transport_reason
    assert_serves(client, model_of(2))


def test_auto_takes_shared_memory_here_and_says_so(client: Any) -> None:
    report = WeightPush(client, model_of(3)).push()
    assert report.transport == "memory" and "fastest that works" in report.transport_reason and "cuda" in report.transport_reason
    assert "by files" not in report.transport_reason, "a service of this machine maps sealed memory"
    assert_serves(client, model_of(3))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_caught_and_its_tensor_named(client: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = model_of(4)
    WeightPush(client, good, allow_unchanged=True).push()
    version, victim = client.info().version, "model.layers.1.mlp.up_proj.weight"
    seen: list[int] = []

    def flipped(tensors: Any) -> Any:
        changed = dict(tensors)
        if victim in changed and not seen:
            seen.append(1)
            bits = changed[victim].clone().view(torch.int32)
            bits[3, 5] ^= 1
            changed[victim] = bits.view(torch.float32)
        return changed

    push = WeightPush(client, model_of(5), transport=transport)
    send = push._transport.send
    monkeypatch.setattr(push._transport, "send", lambda bucket: send(flipped(bucket)))
    with pytest.raises(DigestMismatch, match=f"differ for {victim}"):
        push.push()
    assert seen and client.info().version == version
    assert_serves(client, good)
    assert push.push().version > version
    assert_serves(client, model_of(5))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nan_is_refused_on_either_side(client: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, bad = client.info().version, model_of(6)
    with torch.no_grad():
        bad.model.norm.weight[3] = torch.nan
    with pytest.raises(PushError, match=r"model\.norm\.weight holds"):
        WeightPush(client, bad, transport=transport).push()
    monkeypatch.setattr("trainer_bridge.weights.names._is_finite", lambda tensor: True)
    with pytest.raises(ManifestMismatch, match=r"model\.norm\.weight holds NaN"):
        WeightPush(client, bad, transport=transport).push()
    assert client.info().version == version
    assert WeightPush(client, model_of(6), transport=transport, allow_unchanged=True).push().version > version


def test_buckets_in_any_order_and_again_give_the_same_weights(client: Any) -> None:
    model = model_of(7)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    from areno.weights.digest import digest
    from trainer_bridge.weights.frames import xxhash

    ticket = client.weights_begin({name: {"dtype": "float32", "shape": list(tensor.shape)} for name, tensor in tensors.items()})
    packed = list(buckets.pack(tensors, SMALL))
    order = np.random.default_rng(0).permutation(len(packed)).tolist()
    for number in [*order, *order[:5]]:
        content = np.zeros(packed[number].size, np.uint8)
        packed[number].write(torch.from_numpy(content))
        call = client.weights_stage_bucket(
            ticket.update_id,
            number,
            size=content.size,
            pieces=packed[number].fields(),
            handle={"kind": "frames"},
            xxh3=xxhash.xxh3_64_hexdigest(content),
            content=content,
        )
        call.result(10)
    client.weights_commit(ticket.update_id, digests={name: digest(tensor) for name, tensor in tensors.items()})
    assert_serves(client, model)


def test_a_bucket_that_never_came_is_missed_at_the_commit(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = client.info().version
    push = WeightPush(client, model_of(8), bucket_bytes=SMALL, transport="memory")
    send = push._transport.send
    monkeypatch.setattr(push._transport, "send", lambda bucket: None if "model.norm.weight" in bucket else send(bucket))
    with pytest.raises(ManifestMismatch, match=r"never came: .*model\.norm\.weight"):
        push.push()
    assert client.info().version == version


def test_a_staged_push_lets_the_trainer_write_its_weights_at_once(client: Any) -> None:
    model = model_of(9)
    push = WeightPush(client, model)
    pending = push.push(wait="staged")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = pending.result()
    assert report.version == push.version == client.info().version and pending.result() is report
    assert_serves(client, model_of(9))


@pytest.mark.parametrize("transport", ["memory", *(pytest.param(one, marks=pytest.mark.long) for one in TRANSPORTS[1:])])
def test_a_hundred_pushes_that_change_nothing_leave_logprobs_and_memory_as_they_were(
    service: rollout.LocalService, client: Any, transport: str
) -> None:
    push = WeightPush(client, model_of(10), allow_unchanged=True, canary_ids=[IDS[:5]], transport=transport)
    push.push()
    before = client.score(IDS).token_logprobs
    processes = [psutil.Process(), *psutil.Process(service.pid).children(), psutil.Process(service.pid)]

    def resident() -> int:
        return sum(process.memory_info().rss for process in processes)

    for _ in range(20):
        push.push()
    warm, files = resident(), len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(80):
            assert push.push().changed_tensors == 0
    assert np.array_equal(client.score(IDS).token_logprobs, before)
    assert resident() - warm < 8 * 2**20
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(list(SHARED_FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))) <= 2


TRAINER = """
import sys, time, warnings, torch, rollout
from safetensors.torch import load_file
from trainer_bridge import WeightPush
warnings.simplefilter("ignore")
torch.set_num_threads(1)
address, weights, transport, stop_at, pause_s = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])
with rollout.connect(address, timeout_s=20) as client:
    push = WeightPush(client, transport=transport, bucket_bytes=8192)
    send, sent = push._transport.send, 0
    def slow(bucket):
        global sent
        send(bucket)
        sent += 1
        if sent == stop_at:
            print("there", flush=True)
            time.sleep(pause_s)
    push._transport.send = slow
    try:
        report = push.push(list(load_file(weights).items()))
        print("version", report.version, flush=True)
    except Exception as error:
        print(getattr(error, "code", type(error).__name__), flush=True)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that trainer processes push, so that these load nothing but torch."""
    path = tmp_path_factory.mktemp("trained") / "weights.safetensors"
    save_file({name: tensor.detach() for name, tensor in model_of(77).named_parameters()}, path)
    return path


@contextlib.contextmanager
def trainer(service: rollout.LocalService, weights: Path, transport: str, stop_at: int, pause_s: float) -> Iterator[subprocess.Popen[str]]:
    """A trainer process that pauses after its bucket number `stop_at`; that far it is when the block begins."""
    command = [sys.executable, "-c", TRAINER, str(service.address), str(weights), transport, str(stop_at), str(pause_s)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


def wait_until(true: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def pushed(push: WeightPush) -> bool:
    try:
        push.push()
    except RolloutError as error:
        assert error.code == "update_busy", error
        return False
    return True


KILLED_IN = [(transport, bucket) for transport in TRANSPORTS for bucket in (1, 2, 12)]


@pytest.mark.parametrize(
    ("transport", "stop_at"),
    [("memory", 7), ("group", 3), *(pytest.param(*one, marks=pytest.mark.long) for one in KILLED_IN)],
)
def test_a_trainer_killed_in_a_bucket_leaves_the_old_weights_and_nothing_else(
    service: rollout.LocalService, client: Any, trained: Path, transport: str, stop_at: int
) -> None:
    good = model_of(11)
    push = WeightPush(client, good, allow_unchanged=True)
    push.push()
    version = client.info().version
    with trainer(service, trained, transport, stop_at, 60.0) as killed:
        killed.kill()
    assert client.info().version == version
    assert_serves(client, good)
    wait_until(lambda: pushed(WeightPush(client, good, allow_unchanged=True)))
    assert_serves(client, good)
    assert not list(SHARED_FOLDER.glob(f"{PREFIX}{killed.pid}-*")), "the next trainer removes what a dead one left"


@pytest.mark.parametrize("transport", ["memory", pytest.param("group", marks=pytest.mark.long)])
def test_a_trainer_that_stands_still_for_less_than_its_lease_goes_on(
    service: rollout.LocalService, client: Any, trained: Path, transport: str
) -> None:
    with trainer(service, trained, transport, 3, 0.2) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
    assert out.startswith("version")
    assert_serves(client, model_of(77))


def test_a_trainer_that_stands_still_for_longer_hears_that_its_update_is_gone(
    service: rollout.LocalService, client: Any, trained: Path
) -> None:
    good = model_of(12)
    WeightPush(client, good).push()
    with trainer(service, trained, "memory", 3, 0.2) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: pushed(WeightPush(client, good, allow_unchanged=True)))
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
    assert out.strip() in ("no_update", "server_restarted", "no_session")
    assert_serves(client, good)


def at_bucket(push: WeightPush, number: int, act: Callable[[], None]) -> WeightPush:
    """Let something happen before the push sends its bucket of this number."""
    send, sent = push._transport.send, []

    def acting(bucket: Any) -> None:
        sent.append(1)
        if len(sent) == number:
            act()
        send(bucket)

    push._transport.send = acting  # type: ignore[method-assign]
    return push


@pytest.mark.parametrize("transport", ["memory", *(pytest.param(one, marks=pytest.mark.long) for one in TRANSPORTS[1:])])
def test_an_engine_that_stands_still_in_a_bucket_costs_time_or_the_update_and_nothing_else(
    service: rollout.LocalService, client: Any, transport: str
) -> None:
    good, other = model_of(14), model_of(15)
    WeightPush(client, good).push()
    version = client.info().version
    [host] = psutil.Process(service.pid).children()
    resumed: list[threading.Timer] = []

    def stand_still(seconds: float) -> None:
        host.suspend()
        resumed.append(threading.Timer(seconds, host.resume))
        resumed[-1].start()

    started = time.monotonic()
    push = at_bucket(WeightPush(client, other, transport=transport, bucket_bytes=SMALL, timeout_s=0.4), 3, lambda: stand_still(1.5))
    with pytest.raises(RolloutError if transport != "group" else (RolloutError, PushError)) as refused:
        push.push()
    assert time.monotonic() - started < 5 and str(refused.value)
    resumed[0].join()
    assert client.info().version == version
    assert_serves(client, good)
    patient = at_bucket(WeightPush(client, other, transport=transport, bucket_bytes=SMALL), 3, lambda: stand_still(0.5))
    assert patient.push().version > version
    assert_serves(client, other)


@pytest.mark.parametrize("transport", ["memory", *(pytest.param(one, marks=pytest.mark.long) for one in TRANSPORTS[1:])])
def test_an_engine_killed_in_a_bucket_is_a_typed_error_and_the_next_push_brings_the_weights(folder: Path, transport: str) -> None:
    service = rollout.local(str(folder), dtype="float32", threads=1, max_rows=4)
    with service as client:
        push = WeightPush(client, model_of(13), transport=transport, bucket_bytes=SMALL)
        push.push()
        [host] = psutil.Process(service.pid).children()
        at_bucket(push, 3, host.kill)
        started = time.monotonic()
        with pytest.raises(RolloutError) as refused:
            push.push()
        assert refused.value.code in ("host_failed", "no_update") and time.monotonic() - started < 5
        wait_until(lambda: client.info().health == "needs_weights", 30)
        assert push.push_if_needed() is not None
        assert_serves(client, model_of(13))


def test_a_trainer_whose_group_has_another_size_is_refused_in_time_and_the_next_push_works(client: Any) -> None:
    version = client.info().version
    ticket = client.weights_begin(None)
    store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=timedelta(seconds=2), wait_for_workers=False)
    refused: list[BaseException] = []

    def three() -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=2)
        try:
            dist.ProcessGroupGloo(dist.PrefixStore("areno-weights", store), 0, 3, options)
        except RuntimeError as error:
            refused.append(error)

    other = threading.Thread(target=three)
    other.start()
    started = time.monotonic()
    call = client.weights_join_group(ticket.update_id, host="127.0.0.1", port=store.port, backend="gloo", timeout_s=1.0, device=None)
    with pytest.raises(TransportUnavailable, match="cannot be joined") as error:
        call.result(5.0)
    assert time.monotonic() - started < 5.0 and error.value.limit is not None and error.value.remedy is not None
    other.join(10.0)
    assert refused, "three cannot be made of two"
    client.weights_abort(ticket.update_id)
    assert client.info().version == version
    model = model_of(31)
    assert WeightPush(client, model, transport="group").push().version > version
    assert_serves(client, model)


def test_a_trainer_that_comes_back_while_its_dead_self_still_pauses_the_engine_pushes_and_waits_for_the_lease_only(
    service: rollout.LocalService, client: Any
) -> None:
    code = "import sys, time, rollout\nclient = rollout.connect(sys.argv[1])\nclient.pause()\nprint('paused', flush=True)\ntime.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", code, str(service.address)], stdout=subprocess.PIPE, text=True, env=environment) as dead:
        assert dead.stdout is not None and dead.stdout.readline() == "paused\n"
        dead.kill()
    model = model_of(32)
    started = time.monotonic()
    push = WeightPush(client, model).push()
    assert time.monotonic() - started < 1.5 and client.info().paused_by, "weights are taken during the pause"
    assert_serves(client, model)
    assert time.monotonic() - started < 8.0 and not client.info().paused_by
    assert client.info().version == push.version
