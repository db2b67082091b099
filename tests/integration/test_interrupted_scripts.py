"""Ctrl-C in a script that waits for a generation: it ends at once, and its work with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes import fake_service
from tests.integration.test_service_failures import wait_until

WAYS = {
    "blocking": "client.generate([1], max_new_tokens=20000)",
    "stream": "[delta for delta in client.stream([1], max_new_tokens=20000)]",
    "async": "import asyncio; asyncio.run(client.aio.generate([1], max_new_tokens=20000))",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with fake_service(tmp_path_factory.mktemp("model"), engine_options={"step_s": 0.002}) as client:
        yield client


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_script_ends_at_once_and_cancels_its_work(way: str, client, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    before = client.stats()
    code = f"import rollout; client = rollout.connect({client.address!r}); print('on', flush=True); {WAYS[way]}"
    script = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None and script.stdout.readline() == "on\n"
        wait_until(lambda: client.stats()["live"] == 1)
        began = time.monotonic()
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=10)
        assert time.monotonic() - began < 3.0
        assert "KeyboardInterrupt" in errors and script.returncode not in (0, None)
        wait_until(lambda: client.stats()["live"] == 0, timeout_s=5.0)
        after = client.stats()
        assert (after["cancelled"], after["sessions"]) == (before["cancelled"] + 1, 1), "it said goodbye, no lease had to end"
    finally:
        script.kill()
        script.communicate()
