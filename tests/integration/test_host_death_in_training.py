"""kill -9 of the engine host while a trainer waits for its batch: training goes on unattended, and no version is lost."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

import rollout
from examples.agentic.tiny_model import MODEL_DIR
from tests.integration.test_bridge_service import Games, forward
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
            version=lambda: push.version,
            max_staleness=1,
            max_ahead=4,
            fresh_groups=1,
            max_attempts=1,
            safe_point=push.push_if_needed,
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
