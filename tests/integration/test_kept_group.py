"""The process group that a trainer's updates come by: made once, used by the next update, made anew where either side has left it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rollout
from rollout.errors import RolloutError
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from trainer_bridge import PushError, WeightPush
from trainer_bridge.errors import TransportUnusable
from trainer_bridge.weights.process_group import ProcessGroupTransport

torch.set_num_threads(1)
IDS = list(range(3, 30))
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, "llama", seed=0)
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=8) as client:
        yield client


def model_of(seed: int) -> Any:
    return tiny_model("llama", seed=seed)


class Counted:
    """A client that counts the groups which the service is asked to join."""

    def __init__(self, client: Any) -> None:
        self._client, self.joined = client, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def weights_join_group(self, *given: Any, **named: Any) -> Any:
        self.joined += 1
        return self._client.weights_join_group(*given, **named)


def refused(push: WeightPush, client: Any) -> None:
    """Let a push fail in its second bucket."""
    send, sent = push._transport.send, []

    def failing(bucket: Any) -> None:
        sent.append(1)
        if len(sent) == 2:
            raise PushError("the disk is full", field="disk", limit="none", remedy="none")
        send(bucket)

    push._transport.send = failing  # type: ignore[method-assign]
    with pytest.raises(PushError, match="the disk is full"):
        push.push()
    push._transport.send = send  # type: ignore[method-assign]


def by_another_trainer(push: WeightPush, client: Any) -> None:
    assert WeightPush(client, model_of(70), transport="group").push().transport == "group"


def by_another_way(push: WeightPush, client: Any) -> None:
    assert WeightPush(client, model_of(71), transport="memory").push().transport == "memory"


def asleep(push: WeightPush, client: Any) -> None:
    client.sleep("kv")
    client.wake()


def nothing(push: WeightPush, client: Any) -> None:
    pass


@pytest.mark.filterwarnings("ignore:version .* was pushed by another trainer")
@pytest.mark.parametrize(
    ("meanwhile", "again"),
    [(nothing, 0), (refused, 1), (by_another_trainer, 1), (by_another_way, 1), (asleep, 1)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_group_is_made_anew_only_where_one_side_has_left_it(
    client: Any, meanwhile: Callable[[WeightPush, Any], None], again: int
) -> None:
    counted, model = Counted(client), model_of(60)
    push = WeightPush(counted, model, transport="group", bucket_bytes=8192)
    for _ in range(3):
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        assert push.push().transport_reason == "asked for; gloo"
    assert counted.joined == 1
    meanwhile(push, client)
    for _ in range(2):
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        report = push.push()
    assert counted.joined == 1 + again, "what was made anew is kept too"
    assert report.canary_gap is not None and report.canary_gap < 1e-4
    expected = reference_logprobs(model, IDS)
    assert abs(client.score(IDS).token_logprobs - expected).max() < 1e-4


def test_many_updates_and_failures_leave_no_threads_behind(client: Any) -> None:
    model, before = model_of(61), threading.active_count()
    for _ in range(3):
        push = WeightPush(client, model, transport="group", bucket_bytes=8192, allow_unchanged=True)
        for _ in range(3):
            push.push()
        refused(push, client)
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before:
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.02)


def test_the_service_refuses_a_bucket_of_a_group_that_it_does_not_have(client: Any) -> None:
    version = client.info().version
    ticket = client.weights_begin(None)
    columns: dict[str, list[Any]] = {name: [] for name in ("names", "dtypes", "shapes", "starts", "counts", "offsets")}
    for group in (None, b"0123456789abcdef"):
        call = client.weights_stage_bucket(ticket.update_id, 0, size=0, pieces=columns, handle={"kind": "group", "group": group})
        with pytest.raises(RolloutError, match="broadcast") as error:
            call.result(10.0)
        assert error.value.code == "transport_unavailable" and error.value.remedy
    client.weights_abort(ticket.update_id)
    assert client.info().version == version


FORKING = """
import os, sys, time
import rollout
from safetensors.torch import load_file
from trainer_bridge import WeightPush

address, weights = sys.argv[1:]
client = rollout.connect(address)
push = WeightPush(client, transport="group", allow_unchanged=True)
push.push(list(load_file(weights).items()))
children = []
for leave in (lambda: None, lambda: push._transport.abort()):
    child = os.fork()
    if not child:
        leave()
        sys.exit(7)
    children.append(child)
deadline, codes = time.monotonic() + 20.0, []
for child in children:
    done = 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if not done:
        os.kill(child, 9)
    codes.append(os.waitstatus_to_exitcode(status) if done else "hangs")
push.push(list(load_file(weights).items()))
print(codes, flush=True)
"""


def test_a_process_that_a_trainer_forked_ends_and_leaves_the_group_to_it(client: Any, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({name: tensor.detach() for name, tensor in model_of(62).named_parameters()}, weights)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", FORKING, str(client.address), str(weights)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "[7, 7]\n", done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_the_trainers_is_refused_at_once_and_the_next_push_works(client: Any, host: str) -> None:
    version, started = client.info().version, time.monotonic()
    with pytest.raises(TransportUnusable, match="no store can be kept at") as refused:
        WeightPush(client, model_of(63), transport=ProcessGroupTransport(client, host=host)).push()
    assert time.monotonic() - started < 5.0 and refused.value.value == host and "host=..." in str(refused.value.remedy)
    assert client.info().version == version
    WeightPush(client, model_of(63), transport="group", allow_unchanged=True).push()
