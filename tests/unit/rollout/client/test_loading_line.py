"""Who watches a service start is told what it waits for; pipes and files are not."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.client.loading_line import loading_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


class Notebook(io.StringIO):
    """What a kernel puts in place of standard error, by the module that it names."""


Notebook.__module__ = "ipykernel.iostream"


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_who_watches_reads_one_line_that_ends_with_the_time(kind: type[io.StringIO]) -> None:
    stream = kind()
    with loading_line("a/model", stream):
        assert stream.getvalue() == "rollout: loading a/model ... "
    end = stream.getvalue().split(" ... ")[1]
    assert end.startswith("ready after 0.") and end.endswith(" s\n")


def test_a_start_that_fails_ends_the_line_before_its_error_is_printed() -> None:
    stream = Terminal()
    with pytest.raises(RuntimeError), loading_line("a/model", stream):
        raise RuntimeError
    assert stream.getvalue() == "rollout: loading a/model ... failed\n"


@pytest.mark.parametrize("stream", [io.StringIO(), None, Closed()])
def test_pipes_and_closed_streams_get_nothing_and_break_nothing(stream: io.StringIO | None) -> None:
    with loading_line("a/model", stream):
        pass
    assert stream is None or stream.getvalue() == ""


def test_a_name_with_control_characters_or_without_end_is_shown_as_one_bounded_line() -> None:
    stream = Terminal()
    for name in ("a\nb\x1b[31m\ud800", "x" * 5000):
        with loading_line(name, stream):
            pass
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and all(len(line) < 200 and line.isprintable() and line.isascii() for line in lines)


def test_logs_tell_it_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rollout.client"), loading_line("a/model", None):
        pass
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "starting a service that loads a/model",
        "the service for a/model is ready after 0",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_script_that_starts_a_service_tells_its_terminal_alone(terminal: bool, tmp_path: Path) -> None:
    code = f"import rollout; rollout.local({str(tmp_path)!r}).start()"
    ours, theirs = pty.openpty() if terminal else os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=False)
        os.close(theirs)
        said = b""
        with os.fdopen(ours, "rb", buffering=0, closefd=False) as stream:
            try:
                while piece := stream.read(65536):
                    said += piece
            except OSError:  # a terminal's other end is gone
                pass
    finally:
        os.close(ours)
    assert done.returncode == 1 and b"config.json" in said, "an empty folder is no model"
    assert said.startswith(b"rollout: loading ") is terminal and (b" ... failed\r\n" in said) is terminal
    assert done.stdout == b""
