"""What an operator sees: metrics that equal the stats, logs that machines read, a picture that names what is wrong."""

from __future__ import annotations

import io
import json
import logging
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from typer.testing import CliRunner

from rollout.cli import app
from rollout.client.blocking import Client
from rollout.errors import AddressInUse
from rollout.service.logs import JsonFormatter
from rollout.top import show, view
from tests.fakes import fake_service
from tests.integration.test_service_failures import host_of, wait_until


def scrape(address: str) -> dict[str, float]:
    """Return the samples by name and label value."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_what_stats_says_also_while_a_host_is_replaced(tmp_path: Path) -> None:
    service = fake_service(tmp_path, metrics_port=0, log_format="json", engine_options={"load_s": 0.3})
    with service as client:
        assert service.metrics is not None and service.metrics.startswith("http://127.0.0.1:")
        for seed in range(3):
            client.generate([1], max_new_tokens=4, seed=seed)
        stats: dict[str, Any] = client.stats()
        seen = scrape(service.metrics)
        assert seen["rollout_requests_accepted_total"] == stats["accepted"] == 3
        assert seen["rollout_requests_ended_total length"] == 3 and seen["rollout_tokens_total"] == 12
        assert seen["rollout_health ready"] == 1 and sum(value for name, value in seen.items() if name.startswith("rollout_health ")) == 1
        assert seen["rollout_credit_bytes"] == 8 * 2**20 and seen["rollout_host_credit_bytes"] == 16 * 2**20
        assert seen["rollout_engine_unacknowledged_bytes"] == seen["rollout_host_queued_bytes"] == 0 and seen["rollout_engine_running"] == 0
        assert seen["rollout_accounting_errors_total"] == 0
        with ThreadPoolExecutor(8) as pool:
            assert all(one["rollout_requests_accepted_total"] == 3 for one in pool.map(scrape, [service.metrics] * 16))
        assert service.pid is not None
        host_of(service.pid).kill()
        wait_until(lambda: scrape(str(service.metrics))["rollout_health degraded"] == 1)
        wait_until(lambda: scrape(str(service.metrics))["rollout_health ready"] == 1)
        port = int(service.metrics.split(":")[2].split("/")[0])
        with pytest.raises(AddressInUse, match=rf"metrics_port={port}"):
            fake_service(tmp_path, metrics_port=port).start()
        again = ["serve", "--model", str(tmp_path), "--state-dir", str(tmp_path / "other"), "--metrics-port", str(port)]
        assert "change --metrics-port to another port" in CliRunner().invoke(app, again).output
        assert service._folder is not None
        lines = [json.loads(line) for line in (service._folder / "service.log").read_text().splitlines()]
        assert {line["process"] for line in lines} == {"front", "engine_host"}
        assert any("was killed by SIGKILL" in line["message"] and line["level"] == "error" for line in lines)
        picture = CliRunner().invoke(app, ["top", "--once", "--interval-s", "0.2", "--address", client.address])
        assert picture.exit_code == 0, picture.output
        assert "ready" in picture.output and "tokens" in picture.output and client.address in picture.output


def stats_of(**changes: object) -> dict[str, Any]:
    counts = dict.fromkeys(("tokens", "accepted", "stop", "length", "cancelled", "expired", "failed", "refused"), 0)
    state = {
        "health": "ready",
        "version": 3,
        "uptime_s": 7.0,
        "sessions": 2,
        "paused_by": "",
        "host_failure": "",
        "live": 4,
        "max_requests": 9,
        "host_starts": 1,
    }
    sizes = {"reserved_bytes": 0, "max_record_bytes": 2**30, "due_bytes": 0, "unacknowledged_bytes": 0}
    return {**counts, **state, **sizes, "engine": None, "oldest_stall_s": 0.0, "oldest_stall": "", "accounting_errors": 0, **changes}


def drawn(now: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(view(now, before, seconds, "ipc:///x"))
    return console.export_text()


def test_the_picture_has_rates_and_names_what_is_wrong() -> None:
    text = drawn(stats_of(tokens=500, engine={"running": 3}), stats_of(tokens=100), 2.0)
    assert "200.0" in text and "4 of 9" in text and "engine running" in text and "no progress" not in text
    wrong = stats_of(
        oldest_stall_s=12.0, oldest_stall="request ab", accounting_errors=2, paused_by="x#1 for 3 s", host_failure="host (pid 7) died"
    )
    text = drawn(wrong, None, 0.0)
    assert "no progress for 12.0 s: request ab" in text and "2 times the counters did not reconcile" in text and "paused by x#1" in text
    assert "host (pid 7) died" in text


class Readings:
    """A client whose service is interrupted after three readings."""

    address = "ipc:///x"

    def __init__(self) -> None:
        self.left = 3

    def stats(self) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return stats_of(version=self.left)


def test_a_file_gets_every_picture() -> None:
    written = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        show(cast("Client", Readings()), 0.0, once=False, console=Console(width=100, file=written))
    assert [f"version {version}" in written.getvalue() for version in (2, 1, 0)] == [True] * 3


def test_a_json_line_has_the_traceback_of_its_error() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("rollout.front", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info())
    line = json.loads(JsonFormatter("front").format(record))
    assert (line["level"], line["process"], line["message"], line["logger"]) == ("error", "front", "it broke", "rollout.front")
    assert "ValueError: why" in line["error"] and line["time"].endswith("+00:00")
