"""A service with the real engine loads no code and runs none once it is up, whatever its clients and its trainer ask for."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

import rollout
from rollout.errors import RolloutError
from tests.bucket_pieces import columns
from tests.fuzz.audited import audited_service

MODEL = Path(__file__).resolve().parents[2] / "examples" / "agentic" / "tiny_model"
PROMPT = [5, 6, 7, 8]


def push_file(client: rollout.Client) -> None:
    """Publish the model's own weights from a file, as a trainer does that writes safetensors."""
    ticket, content = client.weights_begin(None), (MODEL / "model.safetensors").read_bytes()
    path = Path(client.info().weights_dir) / "pushed.safetensors"
    path.write_bytes(content)
    client.weights_stage_file(ticket.update_id, path.name, size=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))
    client.weights_commit(ticket.update_id)


def push_bucket(client: rollout.Client) -> None:
    """Publish one tensor from a message."""
    values = np.full(128, 0x3F80, np.uint16).view(np.uint8)
    piece = {"name": "model.layers.0.input_layernorm.weight", "dtype": "bfloat16", "shape": [128], "start": 0, "count": 128, "offset": 0}
    ticket = client.weights_begin({piece["name"]: {"dtype": "bfloat16", "shape": [128]}}, partial=True)  # type: ignore[dict-item]
    staged = client.weights_stage_bucket(
        ticket.update_id,
        0,
        size=values.size,
        pieces=columns([piece]),
        handle={"kind": "frames"},
        xxh3=xxhash.xxh3_64_hexdigest(values.tobytes()),
        content=values,
    )
    staged.result(20.0)
    client.weights_commit(ticket.update_id)


@pytest.mark.timeout(120)
def test_the_engine_loads_no_code_once_it_is_up(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    options = {"engine": "tests.fuzz.audited_service:audited_real_engine", "model": str(tmp_path / "model"), "max_rows": 8}
    with audited_service(tmp_path, **options) as service, rollout.connect(service.address) as client:
        client.generate(PROMPT, max_new_tokens=8, stop=["a"])
        client.generate(PROMPT, max_new_tokens=4, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={3: 1.0})
        client.generate_group(PROMPT, 4, max_new_tokens=4)
        client.score(PROMPT)
        with pytest.raises(RolloutError):
            client.generate([10**6])
        client.pause()
        client.resume()
        client.sleep("weights")
        client.wake()
        push_file(client)
        push_bucket(client)
        assert client.generate(PROMPT, max_new_tokens=4, ignore_eos=True).versions.tolist() == [client.info().version] * 4
        client.stats()
        assert service.findings == ""
