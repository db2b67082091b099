"""kill -9 of the engine host, or of the whole service, while a trainer waits for its batch: training goes on unattended.

The weights of a lost host come back under their version. A service that is started again has its folder's weights: what is played on
them before the trainer has pushed reaches no batch.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollout
from examples.agentic.tiny_model import MODEL_DIR
from tests.integration.test_bridge_service import Games, forward
from tests.integration.test_service_weights import wait_until
from trainer_bridge import RolloutSource, WeightPush, collate, each_member, logprob_gap, policy_loss

torch.set_num_threads(1)


def kill_host(service: Any) -> None:
    """Kill the engine host as the kernel does when memory runs out."""
    assert service.pid is not None
    [host] = psutil.Process(service.pid).children()
    os.kill(host.pid, signal.SIGKILL)


def test_training_goes_on_unattended_when_the_host_is_killed_while_a_batch_is_awaited(tmp_path: Path) -> None:
    service = rollout.local(str(MODEL_DIR), dtype="float32", threads=1, max_rows=16, state_dir=str(tmp_path / "state"))
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with service as client:
        push = WeightPush(client, model)
        gaps, versions = [], []
        with RolloutSource(
            range(1000),
            each_member(Games(client).play),
            group_size=4,
            push=push,
            max_staleness=1,
            max_ahead=4,
            fresh_groups=1,
            max_attempts=1,
        ) as source:
            for step in range(4):
                if step == 2:
                    killer = threading.Timer(0.05, kill_host, [service])
                    killer.start()
                groups = source.next(4, timeout_s=60.0)
                if step == 2:
                    killer.join()
                    # The batch may have been whole before the host died: the next one cannot be.
                    groups = source.next(4, timeout_s=60.0)
                batch = collate([sample for group in groups for sample in group.samples], version=push.version)
                new = forward(model, batch)
                gaps.append(logprob_gap(new, batch))
                policy_loss(new, batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                versions.append(push.push().version)
        assert client.stats()["host_starts"] == 2 and client.info().needs_weights is None
    assert versions == list(range(versions[0], versions[0] + 4)), "the lost version came back as itself"
    assert all(gap.num_exact > 0 and gap.max_exact < 1e-4 for gap in gaps)


def kill_all(service: Any) -> None:
    """Kill a service with its engine host, and let what they had open go."""
    front = psutil.Process(service.pid)
    for process in (*front.children(recursive=True), front):
        process.kill()
    service.stop()


@pytest.mark.parametrize("ready", [False, True], ids=["before the batch is whole", "when the batch is whole"])
def test_training_goes_on_unattended_when_the_whole_service_is_killed_and_started_again(tmp_path: Path, ready: bool) -> None:
    address = f"ipc://{tmp_path}/service"
    options = {"dtype": "float32", "threads": 1, "max_rows": 16, "state_dir": str(tmp_path / "state"), "address": address}
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, second = (rollout.local(str(MODEL_DIR), **options) for _ in range(2))
    first.start()
    published, sampled, gaps = [], set(), []
    try:
        with rollout.connect(address, timeout_s=30.0) as client:
            push = WeightPush(client, model)
            published.append(push.version)
            play = each_member(Games(client).play)
            with RolloutSource(range(1000), play, group_size=4, push=push, max_staleness=3, max_ahead=4) as source:
                for step in range(4):
                    if step == 2:
                        wait_until(lambda: source.stats().ready == 4 or not ready)
                        kill_all(first)
                        second.start()
                    groups = source.next(4, timeout_s=60.0)
                    published.append(push.version)
                    batch = collate([sample for group in groups for sample in group.samples], version=push.version)
                    sampled |= {version for group in groups for sample in group.samples for version in sample.sampled_versions}
                    new = forward(model, batch)
                    gaps.append(logprob_gap(new, batch))
                    policy_loss(new, batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    published.append(push.push().version)
    finally:
        first.stop()
        second.stop()
    assert 3 not in published and max(published) >= 5, "3 are the folder's weights, of the service that was started again"
    assert sampled <= set(published), "what was played on them is in no batch"
    assert all(gap.max_exact < 1e-4 for gap in gaps if gap.num_exact)
