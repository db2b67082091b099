"""The coding example's script on a tiny model: groups are played in the sandbox, a step is taken, and figures come out."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from examples.agentic.coding import train
from examples.agentic.coding.env import CodeRepair
from examples.agentic.coding.sandbox import SandboxUnavailable
from examples.agentic.coding.train import FIRST_TRAINING_SEED, Options, run
from rollout.agent import Episode, Start
from tests.fixtures_models import write_checkpoint
from tests.unit.rollout.agent.byte_tokenizer import SMOL, control_id, files


class Praised(CodeRepair):
    """A repair that, in training, is worth something to a model that repairs nothing: the share of odd ids that it wrote."""

    async def reset(self, seed: int) -> Start:
        self.seed = seed
        return await super().reset(seed)

    async def score(self, episode: Episode) -> float:
        row = episode.rows()[0]
        return float((row.ids[row.mask] % 2).mean()) if self.seed >= FIRST_TRAINING_SEED else await super().score(episode)


@pytest.mark.timeout(120)
def test_groups_are_played_and_a_step_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CodeRepair", Praised)
    ends = {"eos_token_id": control_id("<|im_end|>"), "bos_token_id": control_id("<s>")}
    write_checkpoint(tmp_path, "llama", vocab_size=288, max_position_embeddings=4096, **ends)
    for name, content in files(SMOL).items():
        (tmp_path / name).write_bytes(content)
    out = io.StringIO()
    options = Options(groups=1, members=2, steps=1, model=tmp_path)
    try:
        facts = run(options, out)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert facts["episodes"] == 2 and facts["failed_episodes"] == 0 and facts["mean_reward"] == 0.0
    assert facts["sandbox"] in ("bubblewrap", "namespaces", "user_namespaces")
    assert 0 < facts["step_rewards"][0] < 1 and facts["version"] == 1
    said = re.search(r"step 1/1: .* version 1, max logprob gap (\S+),", out.getvalue())
    assert said is not None and float(said.group(1)) < 1e-4
    assert facts["cached_share"] > 0 and "should" in out.getvalue() and "step 1/1" in out.getvalue()
