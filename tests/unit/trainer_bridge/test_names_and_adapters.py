"""Names of wrapped models, and low-rank adapters that leave merged or not at all."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch

from areno.weights.digest import digest
from areno.weights.names import canonical_name
from tests.unit.trainer_bridge.fakes import FakeWeightService, TinyNet
from trainer_bridge.errors import PushWarning, UnpushableTensor, WeightsUnchanged
from trainer_bridge.weights.lora import merge_lora
from trainer_bridge.weights.names import plain_name
from trainer_bridge.weights.push import WeightPush

LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("plain", [LAYER, "model.embed_tokens.weight", "lm_head.weight"])
def test_prefixes_in_any_nesting_give_the_plain_name(plain: str) -> None:
    for depth in range(4):
        for wrappers in itertools.product(("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module."), repeat=depth):
            name = "".join(wrappers) + plain
            assert plain_name(name) == plain == canonical_name(name)
    assert plain_name(LAYER.replace("layers.0.", "layers.0._orig_mod._checkpoint_wrapped_module.")) == LAYER
    assert plain_name("module.embed.weight") == "embed.weight" and plain_name("weight") == "weight"


class LowRank(torch.nn.Module):
    """A linear layer with adapters as adapter libraries build it; nothing of them is imported."""

    def __init__(self, base: torch.nn.Linear, rank: int = 2, *, adapters: tuple[str, ...] = ("default",), scale: float = 0.5):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(base.in_features, rank, bias=False) for name in adapters})
        self.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(rank, base.out_features, bias=False) for name in adapters})
        self.scaling = {name: scale for name in adapters}
        self.active_adapters = list(adapters[:1])
        self.disable_adapters = False
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        if not self.disable_adapters:
            for name in self.active_adapters:
                result = result + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return result


class Wrapped(torch.nn.Module):
    """What an adapter library puts around a model, names and all."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.base_model.model(input_ids)


def adapted(*, adapters: tuple[str, ...] = ("default",), wrapped: bool = True) -> tuple[torch.nn.Module, LowRank]:
    model = TinyNet()
    layer = LowRank(model.lm_head, adapters=adapters)
    model.lm_head = layer  # type: ignore[assignment]
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return (Wrapped(model) if wrapped else model), layer


def test_a_merge_in_fp32_leaves_the_base_bits_after_a_hundred_cycles() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(8, 6, generator=generator).bfloat16()
    a, b = torch.randn(2, 6, generator=generator), torch.randn(8, 2, generator=generator)
    before = digest(base)
    results = {digest(merge_lora(base, a, b, 0.25).bfloat16()) for _ in range(100)}
    assert digest(base) == before and len(results) == 1
    merged = merge_lora(base, a, b, 0.25)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), base.double() + 0.25 * b.double() @ a.double(), atol=1e-6, rtol=0)
    with pytest.raises(UnpushableTensor, match=r"A is \[rank, in\]"):
        merge_lora(base, b, a, 1.0)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_with_adapters_is_pushed_merged_under_plain_names_and_proven(tmp_path: Path, wrapped: bool) -> None:
    service = FakeWeightService(tmp_path)
    model, layer = adapted(wrapped=wrapped)
    before = digest(layer.base_layer.weight)
    WeightPush(service, model).push()
    assert set(service.tensors) == {"embed.weight", "lm_head.weight"} == set(service.manifests[0])
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert torch.equal(service.tensors["lm_head.weight"], merge_lora(layer.base_layer.weight, a, b, 0.5))
    assert digest(layer.base_layer.weight) == before
    with torch.no_grad():
        merged = TinyNet()
        merged.load_state_dict(service.tensors)
        logits = merged.eval()(torch.as_tensor(service.canaries[0].ids))
    chosen = torch.log_softmax(logits[:-1], -1).gather(-1, torch.as_tensor(service.canaries[0].ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.as_tensor(service.canaries[0].expected_logprobs), chosen, atol=1e-5, rtol=0)


def test_only_the_active_adapters_count_and_none_where_they_are_off_or_merged(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    model, layer = adapted(adapters=("one", "two"))
    push = WeightPush(service, model, allow_unchanged=True)

    def pushed() -> torch.Tensor:
        push.push()
        return service.tensors["lm_head.weight"]

    base, one = layer.base_layer.weight, merge_lora(layer.base_layer.weight, layer.lora_A["one"].weight, layer.lora_B["one"].weight, 0.5)
    assert torch.equal(pushed(), one)
    layer.active_adapters = ["one", "two"]
    assert torch.equal(pushed(), merge_lora(one, layer.lora_A["two"].weight, layer.lora_B["two"].weight, 0.5))
    layer.disable_adapters = True
    assert torch.equal(pushed(), base)
    layer.disable_adapters, layer.merged = False, True
    assert torch.equal(pushed(), base)


def test_adapters_that_are_more_than_low_rank_products_are_refused(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    model, layer = adapted()
    layer.lora_magnitude_vector = torch.nn.ParameterDict({"default": torch.ones(32)})
    with pytest.raises(UnpushableTensor, match="DoRA"):
        WeightPush(service, model).push()
    stray = TinyNet()
    stray.lora_extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnpushableTensor, match="belongs to no layer"):
        WeightPush(service, stray).push()
    assert service.calls == [], "nothing is begun for a model that cannot go"


def test_modules_trained_as_a_whole_leave_as_their_active_copy(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    model, _ = adapted()
    net = model.base_model.model  # type: ignore[union-attr]
    kept = torch.nn.Module()
    kept.original_module = net.embed
    kept.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Embedding(32, 8)})
    kept.active_adapter = "default"
    kept.forward = lambda ids: kept.modules_to_save["default"](ids)  # type: ignore[operator]
    net.embed = kept
    WeightPush(service, model).push()
    assert torch.equal(service.tensors["embed.weight"], kept.modules_to_save["default"].weight)  # type: ignore[operator]
    assert set(service.tensors) == {"embed.weight", "lm_head.weight"}


@pytest.mark.parametrize("outer", ["", "module.", "model.", "module.model.", "model.model._orig_mod."])
@pytest.mark.parametrize("inner", ["", "module.", "_orig_mod.", "module.model."])
@pytest.mark.parametrize("plain", [LAYER, "lm_head.weight"])
def test_wrappers_around_and_within_an_adapter_librarys_module_are_taken_off(tmp_path: Path, outer: str, inner: str, plain: str) -> None:
    layer = LowRank(torch.nn.Linear(8, 8, bias=False))
    base = f"{outer}base_model.model.{inner}{plain.removesuffix('.weight')}"
    model = torch.nn.Module()
    at = model
    *path, last = base.split(".")
    for part in path:
        at.add_module(part, torch.nn.Module())
        at = getattr(at, part)
    at.add_module(last, layer)
    service = FakeWeightService(tmp_path)
    WeightPush(service, model, canary_ids=[]).push()
    assert set(service.tensors) == {plain}


def saved(module: torch.nn.Module) -> torch.nn.Module:
    """Return what an adapter library puts in a module's place that is trained as a whole."""
    kept = torch.nn.Module()
    kept.original_module = module
    kept.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Embedding(32, 8)})
    kept.active_adapter = "default"
    kept.forward = lambda ids: kept.modules_to_save["default"](ids)  # type: ignore[operator]
    return kept


@pytest.mark.parametrize("what", ["nothing", "embedding", "head"])
def test_a_tied_head_goes_out_where_adapters_made_it_another_tensor_than_the_embedding(tmp_path: Path, what: str) -> None:
    service, net = FakeWeightService(tmp_path), TinyNet(tied=True)
    tied = net.embed.weight
    net.inner = LowRank(torch.nn.Linear(8, 8, bias=False))
    if what == "embedding":
        net.embed = saved(net.embed)  # type: ignore[assignment]
    if what == "head":
        net.lm_head = LowRank(net.lm_head)  # type: ignore[assignment]
    WeightPush(service, Wrapped(net), canary_ids=[]).push()
    if what == "nothing":
        assert set(service.tensors) == {"embed.weight", "inner.weight"}
        return
    assert set(service.tensors) == {"embed.weight", "inner.weight", "lm_head.weight"} == set(service.manifests[0])
    expected = tied
    if what == "head":
        layer: LowRank = net.lm_head  # type: ignore[assignment]
        expected = merge_lora(tied, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 0.5)
    assert torch.equal(service.tensors["lm_head.weight"], expected)
    assert torch.equal(service.tensors["embed.weight"], tied) == (what == "head")


def test_a_model_that_is_held_under_two_names_goes_out_once(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    model, _ = adapted()
    model.alias = model.base_model.model  # type: ignore[union-attr]
    WeightPush(service, model).push()
    assert set(service.tensors) == {"embed.weight", "lm_head.weight"}


def test_an_adapter_that_is_left_out_of_the_push_is_noticed_by_the_third(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    model, layer = adapted()
    push = WeightPush(service, model)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)

    def step() -> list[tuple[str, torch.Tensor]]:
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 3]])).square().sum().backward()
        optimizer.step()
        # The mistake: the base alone, as if the adapter had been merged into it.
        return [("embed.weight", model.base_model.model.embed.weight), ("lm_head.weight", layer.base_layer.weight)]  # type: ignore[union-attr]

    push.push(step())
    for _ in range(2):
        with pytest.warns(PushWarning, match="equals the weights before it"):
            push.push(step())
    with pytest.raises(WeightsUnchanged, match="adapters merged"):
        push.push(step())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        assert push.push().changed_tensors == 1


def test_partial_pushes_are_for_those_who_ask(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    model = TinyNet()
    push = WeightPush(service, model)
    push.push([("embed.weight", model.embed.weight)], partial=True)
    push.push()
    assert service.partial == [True, False]
