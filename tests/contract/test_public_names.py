"""The public names of the three packages: what is written here is what a user may rely on. A change here is a change to the changelog."""

from __future__ import annotations

import importlib

import pytest

ARENO = """
    ArenoError Canary CheckpointError Engine EngineConfig EngineFailure EngineInfo FinishKind FinishReason Finished InvalidConfig
    InvalidRequest Request RequestTooLong SamplingParams Score StepOutput TensorSpec UnsupportedModel UpdateReport WeightUpdateError
"""
PUBLIC = {"areno": ARENO.split()}


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_the_public_list_is_the_committed_one(package: str) -> None:
    assert sorted(importlib.import_module(package).__all__) == sorted(PUBLIC[package])


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    for name in PUBLIC[package]:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'") as caught:
        module.Nonsense  # noqa: B018
    assert PUBLIC[package][0] in str(caught.value)
