"""What no message may be is refused before it is sent, and everybody else's connection lives on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from tests.fakes import fake_service


def test_a_message_beyond_the_services_limit_is_refused_by_the_client_and_its_streams_go_on(tmp_path: Path) -> None:
    with fake_service(tmp_path, max_message_bytes=2**20, engine_options={"step_s": 0.002}) as client:
        stream = client.stream([1], max_new_tokens=400)
        next(stream)
        with pytest.raises(InvalidRequest, match="larger max_message_bytes") as refusal:
            client.generate(np.full(300_000, 5, np.int32), max_new_tokens=3)
        assert refusal.value.field == "max_message_bytes"
        members = client.stream_group(np.full(300_000, 5, np.int32), 3, max_new_tokens=3)
        for member in members:
            with pytest.raises(InvalidRequest, match="larger max_message_bytes"):
                next(member)
        assert client.generate([1], max_new_tokens=5).ids.size == 5
        deltas = list(stream)
        assert deltas[-1].finished is not None and deltas[-1].finished.ids.size == 400


def test_a_request_id_of_zeros_is_refused_by_name(tmp_path: Path) -> None:
    with fake_service(tmp_path) as client:
        with pytest.raises(InvalidRequest, match="not all zero"):
            client.generate([1], max_new_tokens=3, request_id=bytes(16))
        assert client.generate([1], max_new_tokens=3).ids.size == 3
