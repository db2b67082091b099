"""A head and an embedding that trainer or service hold as one tensor: served as the trainer has them, or refused by name."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rollout
from rollout.errors import ManifestMismatch
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from trainer_bridge import WeightPush

torch.set_num_threads(1)
IDS = np.random.default_rng(3).integers(3, 250, 40)
SEEDS = itertools.count(1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied service", "untied service"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, bool]]:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=0, tie_word_embeddings=request.param)
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=4) as client:
        yield client, request.param


def tied() -> Any:
    return tiny_model("llama", seed=next(SEEDS), tie_word_embeddings=True)


def untied() -> Any:
    return tiny_model("llama", seed=next(SEEDS))


def untied_by_hand() -> Any:
    model = tied()
    model.lm_head.weight = torch.nn.Parameter(1.5 * model.lm_head.weight.detach(), requires_grad=False)
    return model


def tied_by_hand() -> Any:
    model = untied()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def equal_by_chance() -> Any:
    model = untied()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


@pytest.mark.parametrize("transport", ["memory", "file"])
@pytest.mark.parametrize("canaries", ["canaries", "no canaries"])
@pytest.mark.parametrize("what", ["model", "pairs", "iterator"])
@pytest.mark.parametrize("make", [tied, untied, untied_by_hand, tied_by_hand, equal_by_chance])
def test_what_serves_is_what_the_trainer_has_or_a_refusal_names_the_head(
    service: tuple[Any, bool], make: Callable[[], Any], what: str, canaries: str, transport: str
) -> None:
    client, service_ties = service
    WeightPush(client, served := equal_by_chance()).push()
    version, model = client.info().version, make()
    push = WeightPush(client, model, transport=transport, canary_ids=None if canaries == "canaries" else [])
    pairs = list(model.named_parameters(remove_duplicate=False))
    one_head = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    # A head that is the embedding itself goes out where it is named.
    comes = what != "model" or model.lm_head.weight is not model.model.embed_tokens.weight
    if one_head if service_ties else comes:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = push.push(*{"model": (), "pairs": (pairs,), "iterator": (iter(pairs),)}[what])
        assert report.version > version
        expected = model
    else:
        with pytest.raises(ManifestMismatch, match=r"lm_head\.weight"):
            push.push(*{"model": (), "pairs": (pairs,), "iterator": (iter(pairs),)}[what])
        assert client.info().version == version
        expected = served
    assert np.abs(client.score(IDS).token_logprobs - reference_logprobs(expected, IDS)).max() < 1e-4
