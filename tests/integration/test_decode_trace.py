"""Traces of both formats, made by hand from one small run: what is counted, what is not, and what is refused."""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areno import InvalidConfig
from tests.bench import decode_trace
from tests.bench.device_trace import MARKER, Trace, read_trace, summarise

STEP_US = 100


@dataclass
class Story:
    """Steps of 100 us from time 1000 on: each launches a graph, and 80 us of it are one kernel. More is put in by hand."""

    steps: int = 7
    marked: bool = True
    kernels: list[tuple[float, float]] = field(default_factory=list)
    copies: list[tuple[str, float, float]] = field(default_factory=list)
    memsets: list[tuple[float, float]] = field(default_factory=list)
    calls: list[tuple[str, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for step in range(self.steps):
            start = self.start(step)
            self.kernels.append((start + 10, start + 90))
            self.calls.append(("cudaGraphLaunch", start + 2, start + 8))

    @staticmethod
    def start(step: int) -> float:
        return 1000.0 + STEP_US * step


def busy_story() -> Story:
    """Return a run whose middle three steps (2, 3, 4) hold two copies, two waits and a long gap, with more of each around them."""
    story = Story()
    at = story.start
    story.copies += [("HtoD", at(2) + 1, at(2) + 3), ("DtoH", at(3) + 91, at(3) + 95), ("DtoD", at(4) + 5, at(4) + 7)]
    story.copies += [("HtoD", at(0), at(0) + 1), ("DtoH", at(6), at(6) + 1), ("DtoH", at(5) + 0.5, at(5) + 1)]
    story.calls += [("cudaEventSynchronize", at(2) + 8, at(2) + 60), ("cudaStreamSynchronize", at(3) + 8, at(3) + 168)]
    story.calls += [("cudaStreamSynchronize", at(1) + 99, at(2) + 5), ("cudaDeviceSynchronize", at(6) + 1, at(6) + 2)]
    story.calls += [("cudaEventQuery", at(3), at(3) + 1), ("cudaEventRecord", at(3), at(3) + 1), ("cudaStreamWaitEvent", at(3), at(3) + 1)]
    story.memsets.append((at(4) + 90, at(4) + 100))
    # Step 4's kernel starts late: nothing runs from 395 (the copy's end) to 405, nor from 407 to 440.
    story.kernels[4] = (at(4) + 40, at(4) + 90)
    return story


def write_chrome(story: Story, path: Path) -> Path:
    kind = {"HtoD": "Pinned -> Device", "DtoH": "Device -> Pinned", "DtoD": "Device -> Device"}

    def event(category: str, name: str, start: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": end - start, "args": {"stream": 7}}

    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    events += [event("kernel", "step_kernel", *times) for times in story.kernels]
    events += [event("gpu_memcpy", f"Memcpy {name} ({kind[name]})", start, end) for name, start, end in story.copies]
    events += [event("gpu_memset", "Memset (Device)", *times) for times in story.memsets]
    events += [event("cuda_runtime", *call) for call in story.calls]
    # What the profiler says of a wait a second time, and the ranges' shadows on the device, are not counted.
    events += [event("cuda_sync", "Stream Sync", start, end) for name, start, end in story.calls if name == "cudaStreamSynchronize"]
    if story.marked:
        for step in range(story.steps):
            for category in ("user_annotation", "gpu_user_annotation"):
                events.append(event(category, MARKER, story.start(step), story.start(step) + 95))
    text = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def write_export(story: Story, path: Path, *, whole_graphs: bool = False) -> Path:
    """Write an export with the documented tables and columns that are read, and some that are not."""
    names: dict[str, int] = {}

    def name_id(name: str) -> int:
        return names.setdefault(name, len(names) + 1)

    def ns(*times: float) -> tuple[int, ...]:
        return tuple(round(time * 1000) for time in times)

    connection = sqlite3.connect(path)
    table = "GRAPH_TRACE" if whole_graphs else "KERNEL"
    connection.execute(f'CREATE TABLE CUPTI_ACTIVITY_KIND_{table} (start INT NOT NULL, "end" INT NOT NULL, deviceId INT, streamId INT)')
    connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES (?, ?, 0, 7)", [ns(*times) for times in story.kernels])
    if story.copies:
        connection.execute(
            'CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, "end" INT NOT NULL, bytes INT, copyKind INT NOT NULL)'
        )
        kinds = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
        rows = [(*ns(start, end), 64, kinds[kind]) for kind, start, end in story.copies]
        connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?)", rows)
    if story.memsets:
        connection.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INT NOT NULL, "end" INT NOT NULL, value INT)')
        connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?, ?, 0)", [ns(*times) for times in story.memsets])
    connection.execute(
        'CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, "end" INT NOT NULL, globalTid INT, nameId INT NOT NULL)'
    )
    calls = [(*ns(start, end), 1, name_id(f"{name}_v3020")) for name, start, end in story.calls]
    connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", calls)
    if story.marked:
        connection.execute('CREATE TABLE NVTX_EVENTS (start INT NOT NULL, "end" INT, eventType INT, text TEXT, textId INT)')
        for step in range(story.steps):
            # Names are stored either way, in the row or by number.
            name = (MARKER, None) if step % 2 else (None, name_id(MARKER))
            times = ns(story.start(step), story.start(step) + 95)
            connection.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?)", (*times, *name))
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (0, NULL, 34, ?, NULL)", (MARKER,))
        connection.execute("INSERT INTO NVTX_EVENTS VALUES (0, 9, 59, 'another range', NULL)")
    connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in names.items()])
    connection.commit()
    connection.close()
    return path


WRITERS = {
    "trace.json": write_chrome,
    "trace.json.gz": write_chrome,
    "export.sqlite": write_export,
    "graphs.sqlite": lambda story, path: write_export(story, path, whole_graphs=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_window_counts_its_own_copies_waits_and_gaps_and_no_others(tmp_path: Path, name: str) -> None:
    found = summarise(read_trace(WRITERS[name](busy_story(), tmp_path / name)), steps=3)
    assert (found["htod_copies"], found["dtoh_copies"], found["other_copies"]) == (1, 1, 1)
    assert (found["event_syncs"], found["stream_syncs"], found["device_syncs"]) == (1, 1, 0)
    assert found["step_ms"] == pytest.approx(0.1) and found["longest_wait_ms"] == pytest.approx(0.160) and found["long_waits"] == 1
    # 0-1, 3-10 | 90-110, 190-191, 195-205, 207-240, of 300 us that end busy.
    assert found["idle_ms"] == pytest.approx((1 + 7 + 20 + 1 + 10 + 33) / 1e3)
    assert found["largest_idle_ms"] == pytest.approx(0.033)


@pytest.mark.parametrize("name", WRITERS)
def test_without_markers_graph_launches_are_the_steps(tmp_path: Path, name: str) -> None:
    found = summarise(read_trace(WRITERS[name](Story(marked=False), tmp_path / name)), steps=3)
    assert found["step_ms"] == pytest.approx(0.1) and found["idle_ms"] == pytest.approx(0.06)
    assert not any(found[kind] for kind in ("htod_copies", "dtoh_copies", "stream_syncs", "event_syncs", "long_waits"))


def test_an_overlapping_stream_leaves_no_gap_and_an_idle_end_is_one() -> None:
    trace = Trace()
    for step in range(4):
        trace.call("cudaGraphLaunch", step * 100.0, step * 100.0 + 1)
    trace.copy("other", 100.0, 180.0)
    trace.copy("other", 120.0, 150.0)
    found = summarise(trace, steps=1)
    assert found["idle_ms"] == found["largest_idle_ms"] == pytest.approx(0.02)


def test_another_marker_may_name_the_steps(tmp_path: Path) -> None:
    path = write_chrome(busy_story(), tmp_path / "trace.json")
    assert not read_trace(path, marker="nothing").markers and len(read_trace(path).markers) == 7


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a trace", "cannot be read"),
        (b"\x1f\x8bbroken", "cannot be read"),
        (b"SQLite format 3\x00broken", "cannot be read"),
        (b'{"traceEvents": []}', "no work of a device"),
        (b'{"other": 1}', "cannot be read"),
    ],
)
def test_what_is_no_trace_of_a_device_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match=said) as refusal:
        read_trace(path)
    assert refusal.value.field == "trace" and refusal.value.remedy


def test_a_missing_file_and_a_trace_that_is_too_short_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is no file"):
        read_trace(tmp_path / "absent.json")
    path = write_chrome(Story(steps=5), tmp_path / "trace.json")
    assert summarise(read_trace(path), steps=4)["steps"] == 4
    with pytest.raises(InvalidConfig, match="has 5 steps") as refusal:
        summarise(read_trace(path), steps=5, source=str(path))
    assert refusal.value.field == "steps" and "--steps" in str(refusal.value.remedy)


def test_the_command_reads_both_formats_prints_a_table_and_holds_paths_to_their_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = write_export(Story(), tmp_path / "quiet.sqlite")
    busy = write_chrome(busy_story(), tmp_path / "busy.json.gz")
    output = tmp_path / "trace.json"
    given = [f"resident={quiet}", f"rebuilt={busy}", "--steps", "3", "--output", str(output)]
    result = decode_trace.main(given)
    printed = capsys.readouterr().out
    assert [row["variant"] for row in result["rows"]] == ["resident", "rebuilt"] and json.loads(output.read_text())["rows"] == result[
        "rows"
    ]
    assert "| resident | 3 | 0.100 | 0 | 0 | 0 | 0 | 0 |" in printed
    with pytest.raises(SystemExit, match=r"rebuilt: stream_syncs=1 in 3 steps, at most 0"):
        decode_trace.main([*given, "--check"])
    with pytest.raises(SystemExit, match=r"resident: dtoh_copies=1 .*\n.*stream_syncs=1"):
        decode_trace.main([f"resident={busy}", "--steps", "3", "--check"])
    decode_trace.main([f"resident={quiet}", "--steps", "3", "--check"])


@pytest.mark.parametrize(
    ("given", "field"),
    [([], "traces"), (["--play"], "model"), (["--record", "x.json", "--tiny"], "device"), (["x=y", "--steps", "0"], "steps")],
)
def test_what_cannot_be_read_or_recorded_is_refused_by_name(given: list[str], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field) as refusal:
        decode_trace.main(given)
    assert refusal.value.field == field and refusal.value.remedy
