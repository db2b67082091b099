"""The calculator's training script on a tiny model: figures, transcripts, a step and its push, over the real service."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollout
from examples.agentic.calculator.train import Classroom, Figures, Options, learn, parse_options, write_transcripts
from rollout.agent import EpisodeResult
from tests.fixtures_models import write_checkpoint
from tests.unit.rollout.agent.byte_tokenizer import SMOL, control_id, files
from trainer_bridge import WeightPush

REPOSITORY = Path(__file__).resolve().parents[2]
END = control_id("<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "llama", vocab_size=288, max_position_embeddings=4096, eos_token_id=END, bos_token_id=control_id("<s>"))
    for name, content in files(SMOL).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    with rollout.local(str(folder), state_dir=str(tmp_path_factory.mktemp("state")), max_rows=8, threads=1) as client:
        yield client


def scored(results: list[EpisodeResult], rewards: list[float]) -> list[EpisodeResult]:
    return [replace(result, reward=reward) for result, reward in zip(results, rewards)]


def test_a_step_learns_from_different_rewards_and_the_push_serves_what_it_learnt(client: rollout.Client, folder: Path) -> None:
    torch.set_num_threads(1)
    classroom = Classroom(client, Options(episodes=4, questions=1, group_size=2))
    tasks = classroom.training_tasks(1)
    assert len({task.group for task in tasks}) == 2 and tasks[0].seed == tasks[1].seed != tasks[2].seed
    assert not {task.seed for task in tasks} & {task.seed for task in classroom.tasks()}
    results = classroom.play(tasks, temperature=0.8)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    push = WeightPush(client, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert learn(model, optimizer, scored(results, [0.5, 0.5, 0.0, 0.0]), push.version) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    gap = learn(model, optimizer, scored(results, [1.0, 0.0, 0.0, 1.0]), push.version)
    assert gap is not None and 0 < gap < 1e-4
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if name.endswith("proj.weight"))
    assert push.push(trainer_step=1).version == push.version == client.info().version > 0
    again = classroom.play(tasks, temperature=0.8)
    gap = learn(model, optimizer, scored(again, [1.0, 0.0, 0.0, 1.0]), push.version)
    assert gap is not None and gap < 1e-4


def test_figures_count_what_was_sampled_and_leave_broken_episodes_out_of_the_mean(client: rollout.Client) -> None:
    classroom = Classroom(client, Options(episodes=3, questions=2))
    results = classroom.play(classroom.tasks(), temperature=1.0)
    broken = [replace(results[0], reward=None), *scored(results[1:], [1.0, 0.5])]
    figures = Figures.of(broken, 2.0)
    assert (figures.episodes, figures.failed_episodes, figures.mean_reward) == (3, 1, 0.75)
    assert figures.tokens == sum(int(row.mask.sum()) for result in results for row in result.rows) == round(figures.tokens_per_s * 2)
    assert figures.turns == sum(result.num_turns for result in results) and 0.5 < figures.cached_share < 1
    assert Figures.of([], 1.0).mean_reward is None


def test_transcripts_show_every_message_and_no_control_characters(client: rollout.Client) -> None:
    classroom = Classroom(client, Options(episodes=2, questions=1))
    first, second = classroom.play(classroom.tasks(), temperature=1.0)
    spoilt = replace(second, messages=(*second.messages[:-1], {"role": "assistant", "content": "a\x1b[31mb\nc"}))
    out = io.StringIO()
    write_transcripts([first, spoilt], classroom.environment().num_opening, out)
    text = out.getvalue()
    assert text.count("--- episode") == 2 and text.count("    system  Answer each question") == 1
    opening, _, episodes = text.partition("--- episode 1: ")
    assert opening.startswith("--- every episode begins with\n    system  Answer each question") and "<tool_call>" in opening
    assert episodes.partition("--- episode 2: ")[0].count("      user  ") == 1
    assert " assistant  a\N{REPLACEMENT CHARACTER}[31mb\n            c\n" in text and "\x1b" not in text


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.agentic.calculator.train", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_the_script_plays_trains_and_ends_with_one_line(folder: Path) -> None:
    arguments = ["--model", str(folder), "--episodes", "2", "--questions", "1", "--group-size", "2", "--steps", "1", "--json"]
    done = run_script(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout)
    assert {field.name for field in fields(Figures)} | {"seconds", "model", "seed", "steps", "version", "step_rewards"} <= facts.keys()
    assert (facts["episodes"], facts["failed_episodes"], facts["steps"], len(facts["step_rewards"])) == (2, 0, 1, 1)
    assert facts["tokens"] > 2 and facts["seconds"] > 0
    assert done.stderr.count("--- episode") == 2 and "step 1/1: reward" in done.stderr
    assert "playing 2 episodes, at most 16 at once\n" in done.stderr and "\n2 of 2 have ended: " in done.stderr


def test_ctrl_c_is_a_sentence_and_ends_the_service(folder: Path) -> None:
    command = [sys.executable, "-m", "examples.agentic.calculator.train", "--model", str(folder), "--episodes", "2000", "--questions", "1"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert any(line.startswith("1 of 2000 have ended") for line in script.stdout)
        services = psutil.Process(script.pid).children(recursive=True)
        script.send_signal(signal.SIGINT)
        _, said = script.communicate(timeout=60)
    assert script.returncode == 130
    assert said.endswith("stopped by Ctrl-C; the service has ended\n") and "Traceback" not in said, said
    assert services and not any(service.is_running() and service.status() != psutil.STATUS_ZOMBIE for service in services)


def test_an_absent_model_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    done = run_script("--gguf", str(tmp_path / "absent.gguf"))
    assert done.returncode == 1 and "error: " in done.stderr and "--gguf PATH" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--episodes", "0"], "--episodes is 0; it must be at least 1"),
        (["--temperature", "-1"], "--temperature is -1.0; it must not be negative"),
        (["--steps", "1", "--episodes", "6"], "--episodes 6 must be a multiple of --group-size 4"),
        (["--steps", "1", "--group-size", "1"], "--group-size 1, which is at least 2"),
    ],
)
def test_an_impossible_option_is_refused_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2 and said in capsys.readouterr().err
