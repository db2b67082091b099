"""A fake engine whose second and later hosts take their time to load, then die without a word."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.fakes import FakeEngine

STATUS = 9


class LoopingEngine(FakeEngine):
    """See the module. `starts` is a file with a line for each start."""

    def __init__(self, *, starts: str, **options: Any) -> None:
        with Path(starts).open("a") as file:
            print(os.getpid(), file=file)
        if len(Path(starts).read_text().splitlines()) > 1:
            time.sleep(0.5)
            os._exit(STATUS)
        super().__init__(**options)
