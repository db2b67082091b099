"""Broadcasts that a host receives, by a fake group that completes them when the test lets it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import BucketRefused
from rollout.service.weight_intake.group import GRACE_S, HostReceiver
from rollout.service.weight_intake.pieces import Pace

TIMEOUT_S = 0.1


class Group:
    """Broadcasts that wait until they are let through, each to its own memory."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.come: list[threading.Event] = []

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        [target], come, number = tensors, threading.Event(), len(self.targets)
        self.targets.append(target)
        self.come.append(come)

        class Work:
            def wait(self, timeout: Any) -> None:
                assert come.wait(10.0)
                target.fill_(number)

        return Work()


def received(receiver: HostReceiver, bucket: int, size: int) -> None:
    for pace in receiver.receive(bucket, size):
        assert pace is Pace.WAIT
        time.sleep(0.005)


def test_a_broadcast_that_comes_too_late_reaches_no_later_bucket() -> None:
    group = Group()
    receiver = HostReceiver(group, TIMEOUT_S)
    started = time.monotonic()
    with pytest.raises(BucketRefused, match="its broadcast did not come") as refused:
        received(receiver, 0, 64)
    assert time.monotonic() - started < TIMEOUT_S + GRACE_S + 2.0 and "begin a new update" in str(refused.value.remedy)
    steps = receiver.receive(1, 64)
    assert next(steps) is Pace.WAIT
    while len(group.come) < 2:
        time.sleep(0.001)
    group.come[1].set()
    assert {pace for pace in steps} <= {Pace.WAIT}
    values = receiver.values("float32", 0, 16)
    before = values.clone()
    group.come[0].set()
    time.sleep(0.05)
    assert torch.equal(values, before) and set(values.view(torch.uint8).tolist()) == {1}


def test_one_buffer_serves_buckets_of_any_order_of_sizes() -> None:
    group = Group()
    receiver = HostReceiver(group, 5.0)
    for number, size in enumerate((64, 16, 256, 128)):
        steps = receiver.receive(number, size)
        next(steps)
        while len(group.come) <= number:
            time.sleep(0.001)
        group.come[number].set()
        list(steps)
        assert np.array_equal(receiver.values("float32", 0, size // 4).view(torch.uint8).numpy(), np.full(size, number, np.uint8))
    assert len({target.untyped_storage().data_ptr() for target in group.targets[2:]}) == 1


def test_a_bucket_for_which_there_is_no_memory_is_refused_by_name_and_smaller_ones_come() -> None:
    group = Group()
    receiver = HostReceiver(group, 5.0)
    with pytest.raises(BucketRefused, match="no memory to receive it") as refused:
        received(receiver, 0, 2**62)
    assert "bucket_bytes" in str(refused.value.remedy) and not group.targets
    steps = receiver.receive(1, 64)
    next(steps)
    while not group.come:
        time.sleep(0.001)
    group.come[0].set()
    list(steps)
