"""Teaches the embedded model to write words of the list, by games of a careless player.

Every fourth of his guesses fits all answers so far, the others are any word. So the model has seen what answers are for, and to
care is left to the reinforcement learning. Seeded; a minute on one core.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.agentic.tiny_model.make import Messages, labelled
from examples.agentic.wordle.env import Game, marks

GAMES_PER_STEP = 48
LEARNING_RATE = 1e-3
RISING_STEPS = 10
HEEDED_SHARE = 0.25


def careless_game(seed: int, words: Sequence[str], guesses: int) -> Messages:
    """Let the careless player play one game and return its messages."""
    game, draws = Game(seed, words, guesses), random.Random(seed ^ 0x5EED)
    fitting = [word for word in words if marks(words[0], word) == marks(words[0], game.word)]
    messages = [{"role": "user", "content": game.opening}]
    while True:
        guess = draws.choice(fitting if draws.random() < HEEDED_SHARE else words)
        messages.append({"role": "assistant", "content": guess})
        found = game.answer(guess)
        if found is None:
            return messages
        messages.append({"role": "user", "content": found})
        fitting = [word for word in fitting if marks(guess, word) == found]


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    words: Sequence[str],
    guesses: int,
    *,
    steps: int,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train on his games. Mutates: the model."""
    seeds = itertools.count((seed + 1) << 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RISING_STEPS))
    for step in range(1, steps + 1):
        ids, labels = labelled(tokenizer, [careless_game(next(seeds), words, guesses) for _ in range(GAMES_PER_STEP)])
        loss = model(ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step, loss.item())
