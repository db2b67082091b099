"""How the processes of a service write their log: lines for people, or one JSON object a line for machines.

Called once by each process's `main`; nothing else configures logging. Messages name requests by id and clients by label, never
their payloads or keys.
"""

from __future__ import annotations

import datetime
import json
import logging


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time (UTC), level, process, logger, message, and the traceback of an error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up_logging(process: str, log_format: str) -> None:
    """Write this process's log to standard error."""
    handler = logging.StreamHandler()
    plain = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
