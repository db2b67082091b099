"""What the demo shows: figures add up, pictures and pages are written, token text cannot break the page."""

from __future__ import annotations

import io
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.agentic.tictactoe.report import HeldOut, LiveReport, Run, StepRecord, show, write_files
from examples.agentic.tictactoe.reward import Outcome, WinRate
from examples.agentic.tictactoe.transcripts import Transcript, write_transcripts
from examples.agentic.tiny_model.vocabulary import build_tokenizer
from tests.unit.trainer_bridge.fakes import make_sample
from trainer_bridge import LogprobGap, PushReport, TrainingSample


def make_push(version: int) -> PushReport:
    return PushReport(
        version=version,
        trainer_step=version,
        transport="memory",
        transport_reason="fastest that works",
        num_tensors=21,
        num_bytes=4_200_000,
        changed_tensors=20,
        changed_bytes=4_100_000,
        seconds=0.5,
        prepare_s=0.1,
        staging_s=0.017,
        swap_ms=1.25,
        proof_ms=1234.5,
        pause_ms=3.0,
        canary_gap=version * 1e-7,
        canary_mean_gap=1e-8,
        decode_canary_gap=1e-7,
        inspect_s=0.01,
        derive_s=0.01,
        warning=None,
    )


def make_step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        reward=step / 10,
        win_rate=0.5,
        illegal_rate=0.1,
        tokens=100,
        seconds=0.5,
        cached_share=0.8,
        version=step,
        staleness=1.0,
        push=make_push(step),
        max_logprob_gap=step * 1e-6,
        gap_tokens=10 * (step - 1),
        mean_abs_log_ratio=0.01,
    )


def make_games(outcome: Outcome = Outcome.WIN) -> list[TrainingSample]:
    layout = ((3, False), (2, True), (4, False), (2, True))
    return [make_sample(layout, seed=seed, vocab=256, version=1, info={"outcome": outcome}) for seed in range(6)]


def make_run(steps: int = 3) -> Run:
    run = Run(seed=5, steps=steps, tokenizer=build_tokenizer(), seconds=12.0)
    for version, wins in ((0, 4), (steps, 8)):
        outcomes = [Outcome.WIN] * wins + [Outcome.ILLEGAL] * (10 - wins)
        gap = LogprobGap(max_exact=2e-5, num_exact=40, mean_other=0.0, num_other=0)
        run.add_held_out(HeldOut(version=version, rates=WinRate.of(outcomes), gap=gap), make_games())
    for step in range(1, steps + 1):
        run.add(make_step(step), make_games(Outcome.LOSS))
    return run


def test_the_summary_is_one_line_of_plain_numbers_that_add_up() -> None:
    facts = json.loads(json.dumps(make_run().summary()))
    assert (facts["win_rate_first"], facts["win_rate_last"], facts["illegal_rate_first"], facts["illegal_rate_last"]) == (
        0.4,
        0.8,
        0.6,
        0.2,
    )
    assert (facts["steps"], facts["versions"], facts["version_last"], facts["seconds"], facts["seed"]) == (3, 4, 3, 12.0, 5)
    assert facts["tokens_per_s"] == 200.0
    assert facts["gap_tokens"] == 40 + 40 + 0 + 10 + 20 and facts["max_logprob_gap"] == 2e-5


def test_the_files_of_a_run_are_a_picture_a_page_and_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    console = Console(file=io.StringIO())
    picture, page, steps = write_files(make_run(), tmp_path / "out", console)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert "<h2>step 1: loss, reward +1.0, 2 turns</h2>" in page.read_text(encoding="utf-8")
    assert [row["step"] for row in json.loads(steps.read_text())["steps"]] == [1, 2, 3]


def test_the_legend_covers_no_point_of_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    write_files(make_run(), tmp_path, Console(file=io.StringIO()))
    (figure,) = kept
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert legend.y1 < axes.get_window_extent().y0 and legend.y0 >= 0 and legend.x0 >= 0 and legend.x1 <= figure.bbox.x1
    monkeypatch.undo()
    pyplot.close(figure)


def test_an_interrupted_run_says_how_far_it_came_and_has_no_last_win_rate(tmp_path: Path) -> None:
    run, output = make_run(), io.StringIO()
    del run.held_out[1]
    run.steps = 56
    console = Console(file=output, width=200)
    show(console, run, write_files(run, tmp_path, console))
    assert "stopped after 3 of 56 steps" in output.getvalue() and "before: 40.0%" in output.getvalue()
    facts = json.loads((tmp_path / "steps.json").read_text())["summary"]
    assert (facts["finished"], facts["steps"], facts["win_rate_first"], facts["win_rate_last"]) == (False, 3, 0.4, None)


def test_without_matplotlib_the_curve_is_left_out_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = io.StringIO()
    files = write_files(make_run(), tmp_path, Console(file=output))
    assert [path.name for path in files] == ["transcripts.html", "steps.json"]
    assert "pip install -e '.[demo]'" in output.getvalue()


class TokenReader(HTMLParser):
    """Collects the tokens of a transcripts page: class, title and text of each span within `pre`."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[str, str, str]] = []
        self.in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "pre":
            self.in_pre = True
        elif tag == "span" and self.in_pre:
            values = {name: value or "" for name, value in attrs}
            self.spans.append((values["class"], values["title"], ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self.in_pre = False

    def handle_data(self, data: str) -> None:
        if self.in_pre and self.spans:
            kind, title, text = self.spans[-1]
            self.spans[-1] = (kind, title, text + data)


def test_the_page_shows_every_token_with_its_mask_log_probability_and_version(tmp_path: Path) -> None:
    sample = make_sample(((3, False), (2, True)), version=7)
    path = write_transcripts([Transcript(title="<b>&", sample=sample)], lambda token: "</pre><script>", tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "<script>" not in text and "&lt;b&gt;&amp;" in text and "http" not in text
    reader = TokenReader()
    reader.feed(text)
    assert [kind for kind, _, _ in reader.spans] == ["t", "t", "t", "s", "s"]
    assert all(shown == "</pre><script>" for _, _, shown in reader.spans)
    for place, (_, title, _) in enumerate(reader.spans):
        assert f"id {sample.ids[place]} " in title + " " and f"mask {int(sample.mask[place])} " in title
        if sample.mask[place]:
            assert f"logprob {sample.logprobs[place]:.4f}" in title and "version 7" in title


def test_progress_goes_to_standard_error_when_the_line_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveReport(2, quiet=True) as live:
        live.phase("starting")
        live.add(make_step(1))
    printed = capsys.readouterr()
    assert printed.out == "" and "step 1/2" in printed.err


def test_the_final_table_has_a_row_for_every_step_of_a_short_run() -> None:
    output = io.StringIO()
    show(Console(file=output, width=200), make_run(), [Path("curve.png")])
    text = output.getvalue()
    assert "40.0% before, 80.0% after" in text and "wrote curve.png" in text
    assert all(f"{step}.0e-06" in text for step in (2, 3)) and "over 110 tokens" in text
    pushes = text[text.index("weight pushes") :]
    for step in (1, 2, 3):
        shown = f"{step} memory 21 4.2 20 17 1.2 1234.5 3.0 {step}.0e-07"
        assert any(line.split() == shown.split() for line in pushes.splitlines()), shown


def test_the_table_fits_a_terminal_of_eighty_columns() -> None:
    output = io.StringIO()
    show(Console(file=output, width=80), make_run(), [])
    assert "\u2026" not in output.getvalue()
