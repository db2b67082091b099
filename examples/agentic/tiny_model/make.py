"""Make the tiny model: `python -m examples.agentic.tiny_model.make --output FOLDER`.

A randomly initialised Qwen3 of one million parameters learns from random legal play alone, until most of its games hold no illegal
move. It learns the form of an answer and what an empty square is, and nothing about winning: that is left to the reinforcement
learning this folder is for. The warm-up stops early on purpose, at a share of games with an illegal move that leaves something to
learn there too and is low enough for a policy gradient to get off the ground. Seeded, on one torch thread, a few minutes; prints
one JSON line with the rates of the weights it wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.agentic.tictactoe.env import Game
from examples.agentic.tictactoe.reward import WinRate, held_out_seeds
from examples.agentic.tiny_model.vocabulary import CONTROL_IDS, END_OF_TURN, MAX_MODEL_LEN, VOCAB_SIZE, write_tokenizer

IGNORED_LABEL = -100
MAX_ANSWER_TOKENS = 4
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    learning_rate: float = 1e-3
    rising_steps: int = 30
    games_per_step: int = 64
    max_steps: int = 400
    check_every: int = 10
    check_games: int = 400
    illegal_share: float = 0.24


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Initialise the model; the wide initial range suits its small width."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_MODEL_LEN,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            initializer_range=0.05,
            tie_word_embeddings=True,
            eos_token_id=CONTROL_IDS[END_OF_TURN],
        )
    )


def random_legal_game(seed: int) -> Messages:
    """Play one game with random legal moves on both sides and return its messages."""
    game, moves = Game(seed), random.Random(seed ^ 0x5EED)
    messages = [{"role": "user", "content": game.first_message()}]
    while True:
        answer = str(moves.choice(game.board.legal_moves()) + 1)
        messages.append({"role": "assistant", "content": answer})
        board = game.answer(answer)
        if board is None:
            return messages
        messages.append({"role": "user", "content": board})


def labelled(tokenizer: PreTrainedTokenizerFast, games: Iterable[Messages]) -> tuple[torch.Tensor, torch.Tensor]:
    """Render games as ids [S, T] and labels [S, T], in which only answers and the tokens that end them count."""
    assistant, end_of_turn = tokenizer.convert_tokens_to_ids(["<|assistant|>", END_OF_TURN])
    rows = [rendered(tokenizer, game) for game in games]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED_LABEL)
    for row, column in (ids == assistant).nonzero().tolist():
        end = column + 1 + int((ids[row, column + 1 :] == end_of_turn).nonzero()[0])
        labels[row, column + 1 : end + 1] = ids[row, column + 1 : end + 1]
    return ids, labels


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Messages, *, prompt: bool = False) -> torch.Tensor:
    """Return the ids [T] of a conversation; with `prompt` up to where the next answer starts."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_tensors="pt", return_dict=False)[0]


@torch.no_grad()
def play(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seeds: Iterable[int]) -> WinRate:
    """Let the model play one game for each seed, sampling at temperature 1, and count how they ended."""
    games = [Game(seed) for seed in seeds]
    talks: list[Messages] = [[{"role": "user", "content": game.first_message()}] for game in games]
    live = list(range(len(games)))
    while live:
        answers = sample_answers(model, tokenizer, [talks[index] for index in live])
        boards = [games[index].answer(answer) for index, answer in zip(live, answers)]
        for index, answer, board in zip(live, answers, boards):
            talks[index] += [{"role": "assistant", "content": answer}, {"role": "user", "content": board or ""}]
        live = [index for index, board in zip(live, boards) if board is not None]
    return WinRate.of(game.outcome for game in games if game.outcome)


def sample_answers(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, talks: Sequence[Messages]) -> list[str]:
    """Sample one answer to each conversation. One that its limit cut off keeps a mark of that, so that it never is a legal move."""
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    prompts = [rendered(tokenizer, talk, prompt=True) for talk in talks]
    ids = pad_sequence(prompts, batch_first=True, padding_value=tokenizer.pad_token_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    outputs = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=end_of_turn,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers = [row[: row.index(end_of_turn)] if end_of_turn in row else [*row, end_of_turn] for row in outputs[:, ids.shape[1] :].tolist()]
    return [tokenizer.decode(answer) for answer in answers]


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> int:
    """Train on random legal play until few enough games hold an illegal move; return the steps taken.

    Raises: RuntimeError when `max_steps` are not enough.
    """
    seeds = itertools.count(recipe.seed << 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.rising_steps))
    for step in range(1, recipe.max_steps + 1):
        ids, labels = labelled(tokenizer, [random_legal_game(next(seeds)) for _ in range(recipe.games_per_step)])
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % recipe.check_every == 0:
            rate = play(model, tokenizer, [next(seeds) for _ in range(recipe.check_games)])
            print(f"step {step}: loss {loss.item():.3f}, illegal {rate.illegal:.1%}, win {rate.win:.1%}", flush=True)
            if rate.illegal <= recipe.illegal_share:
                return step
    raise RuntimeError(
        f"more than {recipe.illegal_share:.0%} of games hold an illegal move after {recipe.max_steps} steps: raise --max-steps"
    )


def main() -> None:
    """Make the model, write it, read it back as a service would, and report its rates on held-out games."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--held-out-games", type=int, default=2000)
    for field in dataclasses.fields(Recipe):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    folder, held_out = options.pop("output"), options.pop("held_out_games")
    recipe = Recipe(**options)

    torch.set_num_threads(1)
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(recipe.seed)
    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    steps = warm_up(model, tokenizer, recipe)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    write_tokenizer(folder)
    rate = play(Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer, held_out_seeds(held_out))
    report = {
        "parameters": model.num_parameters(),
        "bytes": (folder / "model.safetensors").stat().st_size,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        **dataclasses.asdict(rate),
        "torch": torch.__version__,
        "recipe": dataclasses.asdict(recipe),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
