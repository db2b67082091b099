"""The two processes of a service with the audit hook in them: `python -m tests.fuzz.audited_service --config FILE` is the front,
`AuditedEngine` arms the engine host when the engine is up.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.config import ServiceConfig
from rollout.service.engine_host import load_engine
from rollout.service.front import _print_event, serve
from tests.fakes import FakeEngine
from tests.fuzz.audit import arm


class AuditedEngine(FakeEngine):
    """A fake whose host must behave from the moment it asks for work, which is after it said that it is ready."""

    def __init__(self, **options: Any) -> None:
        # The intake of weights uses parts of the real engine, which has them loaded before it is ready.
        importlib.import_module("areno.engine")
        super().__init__(**options)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        arm()
        return super().has_work


def audited_real_engine(**options: Any) -> Any:
    """Return the engine itself, whose host must behave likewise."""
    engine = load_engine(**options)
    kind = type(engine)

    class Audited(kind):  # type: ignore[misc, valid-type]
        @property
        def has_work(self) -> bool:
            arm()
            return bool(super().has_work)

    engine.__class__ = Audited
    return engine


def main() -> int:
    """Run the front until it is stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    config = ServiceConfig.from_json(Path(parser.parse_args().config).read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front %(levelname)s %(message)s")

    def on_event(event: str, fields: Mapping[str, object]) -> None:
        _print_event(event, fields)
        arm()

    return 0 if serve(config, on_event) is None else 1


if __name__ == "__main__":
    sys.exit(main())
