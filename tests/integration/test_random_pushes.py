"""Pushes at random from whatever a trainer may hold: every one that goes through serves the trainer's weights, every other one the old.

    random model --wrapped, adapted, laid out, cast--> what is pushed --sabotaged, interrupted?--> service --score--> transformers' values

The oracle keeps the plain tensors of the last push that went through and scores with transformers, in float32.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import rollout
from rollout.errors import RolloutError
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from trainer_bridge import PushError, WeightPush, merge_lora

torch.set_num_threads(1)
IDS = np.random.default_rng(7).integers(3, 250, 40)
PROMPT = IDS[:20]
TOLERANCE = 1e-4
TRANSPORTS = ("memory", "file", "frames", "group")
BUCKETS = (None, 1, 4095, 4097, 8191, 65_537, 2**62 - 1)
Pairs = list[tuple[str, torch.Tensor]]


class Adapted(torch.nn.Module):
    """A linear layer with one adapter, as adapter libraries build it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = base, {"default": 0.5}, ["default"]
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))

    def merged(self) -> torch.Tensor:
        """Return the weight that the plain model has in its place."""
        return merge_lora(self.base_layer.weight, self.lora_A["default"].weight, self.lora_B["default"].weight, 0.5)


class Holder(torch.nn.Module):
    """A module that holds the model under some name."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)
        self._name = name

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.get_submodule(self._name)(input_ids=input_ids)


class Library(torch.nn.Module):
    """What an adapter library puts around a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = Holder("model", model)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.base_model(input_ids)


def in_one_buffer(model: torch.nn.Module) -> None:
    """Let all parameters be views of one buffer."""
    parameters = list(model.parameters())
    buffer = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters])):
        parameter.data = part.view(parameter.shape)


def transposed(model: torch.nn.Module) -> None:
    """Let all matrices lie column by column."""
    for parameter in model.parameters():
        parameter.data = parameter.data.T.contiguous().T if parameter.ndim == 2 else parameter.data


def spread(model: torch.nn.Module) -> None:
    """Let every element lie between others."""
    for parameter in model.parameters():
        wide = torch.full((*parameter.shape, 3), math.nan)
        wide[..., 1] = parameter.data
        parameter.data = wide[..., 1]


LAYOUTS: tuple[Callable[[torch.nn.Module], object], ...] = (lambda model: None, in_one_buffer, transposed, spread)
WRAPPERS: tuple[Callable[[torch.nn.Module], torch.nn.Module], ...] = (
    # One that is compiled already is none again.
    lambda model: model if hasattr(model, "_orig_mod") else torch.compile(model, backend="eager"),
    lambda model: Holder("module", model),
    lambda model: Holder("model", model),
)


class Trainer:
    """One random trainer's model: `model` is what it holds, `plain` what transformers computes with."""

    def __init__(self, draw: random.Random, *, tied: bool) -> None:
        seed = draw.randrange(2**31)
        self.plain = tiny_model("llama", seed=seed, tie_word_embeddings=tied)
        inner = tiny_model("llama", seed=seed, tie_word_embeddings=tied).requires_grad_(draw.random() < 0.5)
        adapted = draw.random() < 0.3
        if adapted:
            self._adapt(inner, draw)
        draw.choice(LAYOUTS)(inner)
        if draw.random() < 0.3:
            layer = draw.randrange(len(inner.model.layers))
            inner.model.layers[layer] = checkpoint_wrapper(inner.model.layers[layer])
        self.model = inner.train(draw.random() < 0.5)
        if adapted and draw.random() < 0.7:
            self.model = Library(self.model)
        for _ in range(draw.choice([0, 0, 1, 2])):
            self.model = draw.choice(WRAPPERS)(self.model)

    def _adapt(self, inner: Any, draw: random.Random) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw.randrange(2**31))
            for mine, plain in zip(inner.model.layers, self.plain.model.layers):
                for block, name in (("self_attn", "q_proj"), ("self_attn", "v_proj"), ("mlp", "down_proj")):
                    if draw.random() < 0.6:
                        layer = Adapted(getattr(mine.get_submodule(block), name))
                        setattr(mine.get_submodule(block), name, layer)
                        with torch.no_grad():
                            getattr(plain.get_submodule(block), name).weight.copy_(layer.merged())


def sabotaged(draw: random.Random, pairs: Pairs) -> tuple[str, Pairs]:
    """Return what is wrong with some pairs, and them."""
    place = draw.randrange(len(pairs))
    name, tensor = pairs[place]
    broken = tensor.clone()
    broken.view(-1)[draw.randrange(tensor.numel())] = draw.choice([math.nan, math.inf, -math.inf])
    matrix = draw.choice([place for place, (_, one) in enumerate(pairs) if one.ndim == 2 and one.shape[0] != one.shape[1]])
    changes: dict[str, Callable[[], Pairs]] = {
        "not finite": lambda: [*pairs[:place], (name, broken), *pairs[place + 1 :]],
        "missing": lambda: [*pairs[:place], *pairs[place + 1 :]],
        "unknown": lambda: [*pairs, (draw.choice(["model.rotary_emb.inv_freq", "v_head.weight"]), torch.ones(draw.choice([0, 8])))],
        "twice": lambda: [*pairs, (f"module.{name}", tensor)],
        "padded": lambda: [*pairs[:place], (name, torch.cat([tensor, tensor[:1]])), *pairs[place + 1 :]],
        "flat": lambda: [*pairs[:matrix], (pairs[matrix][0], pairs[matrix][1].reshape(-1)), *pairs[matrix + 1 :]],
        "turned": lambda: [*pairs[:matrix], (pairs[matrix][0], pairs[matrix][1].T.contiguous()), *pairs[matrix + 1 :]],
        "reshaped": lambda: [*pairs[:matrix], (pairs[matrix][0], pairs[matrix][1].reshape(pairs[matrix][1].T.shape)), *pairs[matrix + 1 :]],
        "integers": lambda: [*pairs[:place], (name, tensor.to(torch.int32)), *pairs[place + 1 :]],
        "meta": lambda: [*pairs[:place], (name, tensor.to("meta")), *pairs[place + 1 :]],
        "other values": lambda: [*pairs[:place], (name, tensor * 1.5), *pairs[place + 1 :]],
    }
    what = draw.choice(list(changes))
    return what, changes[what]()


class Interrupt:
    """A transport that is interrupted at some bucket, and perhaps again while it is aborted."""

    def __init__(self, push: WeightPush, draw: random.Random) -> None:
        self._transport, self._left, self._twice = push._transport, draw.randrange(3), draw.random() < 0.5
        self._send, self._abort = self._transport.send, self._transport.abort
        self._transport.send, self._transport.abort = self.send, self.abort  # type: ignore[method-assign]

    def send(self, bucket: Any) -> None:
        """Send, or be interrupted."""
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        self._send(bucket)

    def abort(self) -> None:
        """Abort, and be interrupted again."""
        self._abort()
        if self._twice:
            raise KeyboardInterrupt

    def over(self) -> None:
        """Let the transport work again."""
        self._transport.send, self._transport.abort = self._send, self._abort  # type: ignore[method-assign]


class Run:
    """A service, the plain model that it must serve, and what became of the pushes."""

    def __init__(self, client: Any, served: Any, draw: random.Random, *, tied: bool) -> None:
        self.client, self.served, self._draw, self._tied = client, served, draw, tied
        self.version: int = client.info().version
        self.outcomes: Counter[str] = Counter()
        self._pushes: dict[str, WeightPush] = {}

    def _push_for(self, trainer: Trainer) -> WeightPush:
        """Return an old WeightPush with this model, as of one that trained on, or a new one."""
        draw = self._draw
        transport = draw.choice(TRANSPORTS)
        push = self._pushes.get(transport)
        if push is None or draw.random() < 0.4:
            push = WeightPush(self.client, trainer.model, transport=transport, bucket_bytes=draw.choice(BUCKETS), allow_unchanged=True)
            self._pushes[transport] = push
        push._model = trainer.model
        return push

    def _given(self, pairs: Pairs) -> Any:
        draw = self._draw
        shuffled = draw.sample(pairs, len(pairs))
        renamed = [(draw.choice(["", "module.", "_orig_mod.", "model.module."]) + name, tensor) for name, tensor in shuffled]
        cast = [
            (name, tensor.to(draw.choice([torch.float32, torch.float64])) if tensor.dtype is torch.float32 else tensor)
            for name, tensor in renamed
        ]
        return draw.choice([list, iter])(cast)

    def step(self) -> None:
        """Push once and compare."""
        draw = self._draw
        trainer = Trainer(draw, tied=self._tied)
        push, given, options, what = (
            self._push_for(trainer),
            None,
            dict[str, Any](),
            draw.choice(["model", "pairs", "partial", "broken", "interrupt"]),
        )
        expected, interrupt = trainer.plain, None
        pairs = [(name, tensor.detach()) for name, tensor in trainer.plain.named_parameters()]
        if what == "pairs":
            given = self._given(pairs)
        elif what == "partial":
            some = draw.sample(pairs, draw.randrange(1, len(pairs)))
            expected = copy.deepcopy(self.served)
            expected.load_state_dict(dict(some), strict=False)
            push._model, given, options = expected, self._given(some), {"partial": True}
        elif what == "broken":
            sort, wrong = sabotaged(draw, pairs)
            what, given = f"broken: {sort}", draw.choice([list, iter])(wrong)
        elif what == "interrupt":
            interrupt = Interrupt(push, draw)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if draw.random() < 0.3:
                    pending = push.push(given, wait="staged", mode=draw.choice(["inflight", "drain", "abort_requests"]), **options)
                    if what != "partial":
                        with torch.no_grad():
                            for parameter in trainer.model.parameters():
                                parameter.zero_()
                    report = pending.result()
                else:
                    report = push.push(given, **options)
        except (PushError, RolloutError) as error:
            assert what.startswith("broken") or (what == "interrupt" and error.code == "update_busy"), (what, error)
            assert getattr(error, "remedy", None), error
            self.outcomes[what] += 1
        except KeyboardInterrupt:
            assert what == "interrupt"
            self.outcomes[what] += 1
        else:
            assert not what.startswith("broken"), what
            assert report.version > self.version
            self.version, self.served = report.version, expected
            self.outcomes[what] += 1
        if interrupt is not None:
            interrupt.over()
        self.check()

    def check(self) -> None:
        """The service serves the oracle's weights under its version, in a score and in what it samples."""
        assert self.client.info().version == self.version, self.outcomes
        gap = np.abs(self.client.score(IDS).token_logprobs - reference_logprobs(self.served, IDS)).max()
        assert gap < TOLERANCE, (gap, self.outcomes)
        generation = self.client.generate(PROMPT, max_new_tokens=3, temperature=1.0, seed=self._draw.randrange(2**32))
        whole = np.concatenate([PROMPT, generation.ids])
        assert np.abs(generation.logprobs - reference_logprobs(self.served, whole)[len(PROMPT) - 1 :]).max() < TOLERANCE
        assert set(generation.versions.tolist()) == {self.version}


@pytest.fixture(scope="module", params=[(False, 1), (True, 2)], ids=["untied, one rank", "tied, two ranks"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, bool]]:
    tied, ranks = request.param
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, "llama", seed=0, tie_word_embeddings=tied)
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=4, tp=ranks) as client:
        yield client, tied


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9))])
def test_whatever_is_pushed_the_service_serves_it_or_what_it_had(service: tuple[Any, bool], seed: int) -> None:
    client, tied = service
    draw = random.Random(seed)
    served = tiny_model("llama", seed=1000 + seed, tie_word_embeddings=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WeightPush(client, served).push()
    run = Run(client, served, draw, tied=tied)
    for _ in range(20 if seed == 0 else 60):
        run.step()
    print(dict(run.outcomes))
    assert len(run.outcomes) > 5
