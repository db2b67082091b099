"""What help and tab completion say of the options is what the message's own defaults are."""

from __future__ import annotations

import inspect

import pytest

import rollout
from rollout.client.parameters import GROUP_OPTIONS, OPTIONS, option_defaults


@pytest.mark.parametrize("facade", [rollout.Client, rollout.AsyncClient])
@pytest.mark.parametrize(
    ("method", "options"),
    [("generate", OPTIONS), ("stream", OPTIONS), ("generate_group", GROUP_OPTIONS), ("stream_group", GROUP_OPTIONS)],
)
def test_a_method_shows_every_option_with_its_default(facade: type, method: str, options: tuple[str, ...]) -> None:
    shown = inspect.signature(getattr(facade, method)).parameters
    assert {name: shown[name].default for name in options} == option_defaults(options)
    assert shown["max_new_tokens"].default == 128
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in shown.values())
