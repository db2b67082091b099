"""The process group that a trainer's updates come by: made once, used by the next update, made anew where either side has left it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rollout
from rollout.errors import RolloutError
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from trainer_bridge import PushError, WeightPush

torch.set_num_threads(1)
IDS = list(range(3, 30))


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
