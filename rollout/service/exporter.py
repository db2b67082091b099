"""The numbers of a service for Prometheus, over HTTP on loopback.

    scraper --GET /metrics--> HTTP thread --ask, wake--> front's loop --STATS--> engine host
                                   ^--------- numbers ------+--------------------+

The HTTP thread never reads the front's state: it asks and waits, the loop answers between two turns, so that the numbers of one
scrape belong together. Nothing runs between scrapes. Every user of the machine can reach the port, so connections are few and short: they
must not take the front's threads and files.
"""

from __future__ import annotations

import importlib
import queue
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from rollout.errors import AddressInUse
from rollout.service.calls import Calls
from rollout.wire.fields import Message
from rollout.wire.operations import Op
from rollout.wire.session_messages import StatsResult

if TYPE_CHECKING:
    from prometheus_client.core import Metric

HOST = "127.0.0.1"
ANSWER_S = 5.0
# A connection that says nothing for so long is closed, and one that comes while so many are open.
SILENCE_S = 5.0
MAX_CONNECTIONS = 16
ENDINGS = ("stop", "length", "cancelled", "expired", "failed")
HEALTHS = ("starting", "loading", "ready", "updating", "needs_weights", "degraded", "failed", "stopping")
COUNTERS = {
    "received": "requests_received",
    "refused": "requests_refused",
    "attached": "requests_attached",
    "accepted": "requests_accepted",
    "tokens": "tokens",
    "late_tokens": "late_tokens",
    "tokens_after_stop": "tokens_after_stop",
    "flushes": "flushes",
    "flushed_bytes": "flushed_bytes",
    "messages": "messages",
    "malformed": "malformed_messages",
    "undeliverable": "undeliverable_replies",
    "lapsed_leases": "lapsed_leases",
    "host_starts": "host_starts",
    "accounting_errors": "accounting_errors",
    "refused_connections": "refused_connections",
}

Numbers = Mapping[str, object]


def metrics_of(front: Numbers, engine: Numbers | None) -> list[Metric]:
    """Return what a scrape shows: counters, endings by kind, failures by code, health as a state set, the rest as gauges."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    ended = CounterMetricFamily("rollout_requests_ended", "Requests that ended, by kind.", labels=["kind"])
    failed = CounterMetricFamily("rollout_requests_failed", "Requests that ended as failed, by the code of the cause.", labels=["code"])
    health = GaugeMetricFamily("rollout_health", "1 for the state that the service is in.", labels=["state"])
    found: list[Metric] = [ended, failed, health]
    for state in HEALTHS:
        health.add_metric([state], float(front["health"] == state))
    for name, value in front.items():
        if name in ENDINGS:
            ended.add_metric([name], _number(value))
        elif name.startswith("failed_"):
            failed.add_metric([name.removeprefix("failed_")], _number(value))
        elif name in COUNTERS:
            found.append(CounterMetricFamily(f"rollout_{COUNTERS[name]}", f"{name} of stats().", value=_number(value)))
        elif isinstance(value, (int, float)):
            found.append(GaugeMetricFamily(f"rollout_{_unit(name)}", f"{name} of stats().", value=_number(value)))
    for name, value in (engine or {}).items():
        if isinstance(value, (int, float)):
            found.append(GaugeMetricFamily(f"rollout_engine_{_unit(name)}", f"{name} of the engine's stats().", value=_number(value)))
    return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _unit(name: str) -> str:
    return f"{name[:-2]}_seconds" if name.endswith("_s") else name


class MetricsServer(ThreadingHTTPServer):
    """HTTP on loopback for one page; see the module. Raises: OSError."""

    daemon_threads, block_on_close = True, False
    allow_reuse_port, request_queue_size = False, 128

    def __init__(self, port: int, page: Callable[[], bytes]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENCE_S

            def do_GET(self) -> None:
                """Send the page."""
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                content = page()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing that a peer sent."""

        super().__init__((HOST, port), Handler)

    def server_bind(self) -> None:
        """Bind without asking anybody for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread, or close it."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore what breaks with its connection."""


class Exporter:
    """Serves the metrics; see the module. `wake` gets the loop to call `answer`. Raises: AddressInUse."""

    def __init__(self, port: int, numbers: Callable[[], Numbers], calls: Calls, *, wake: Callable[[], None]) -> None:
        # Only a service that exports loads the library, and all of it now: no request makes this process look for code.
        from prometheus_client import CollectorRegistry, generate_latest

        importlib.import_module("prometheus_client.core")

        self._numbers, self._calls, self._wake = numbers, calls, wake
        self._asked: deque[queue.SimpleQueue[tuple[Numbers, Numbers | None]]] = deque()
        self._closed = False
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = MetricsServer(port, lambda: bytes(generate_latest(registry)))
        except OSError as error:
            raise AddressInUse(
                f"metrics_port={port} of {HOST} cannot be bound: {error.strerror}",
                field="metrics_port",
                value=port,
                remedy="change metrics_port to another port, or 0 for a free one",
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"http://{HOST}:{self._server.server_port}/metrics"

    def describe(self) -> list[Metric]:
        """Promise no names: they follow from the numbers."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment; called by the HTTP thread. Blocks: until the loop and the engine host have answered."""
        if self._closed:
            return []
        box: queue.SimpleQueue[tuple[Numbers, Numbers | None]] = queue.SimpleQueue()
        self._asked.append(box)
        self._wake()
        try:
            return metrics_of(*box.get(timeout=ANSWER_S))
        except queue.Empty:
            return []

    def answer(self, *, engine: bool) -> None:
        """Answer who asked; `engine` tells whether a host is there to be asked. Called by the loop."""
        while self._asked:
            box = self._asked.popleft()
            if not engine:
                box.put((self._numbers(), None))
                continue

            def told(body: Message, box: queue.SimpleQueue[tuple[Numbers, Numbers | None]] = box) -> None:
                box.put((self._numbers(), body.engine if isinstance(body, StatsResult) else None))

            self._calls.ask(Op.STATS, {}, on_result=told, on_error=told)

    def close(self) -> None:
        """Close the socket. Blocks: a moment."""
        self._closed = True
        self.answer(engine=False)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(ANSWER_S)
