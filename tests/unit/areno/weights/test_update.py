"""Weight updates: whole or refused with names, proven before the swap, undone bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from areno.errors import DigestMismatch, InvalidRequest, ManifestMismatch
from areno.models.dense import DenseDecoder
from areno.weights.canary import Canary
from areno.weights.digest import digest
from areno.weights.live_digests import digests
from areno.weights.names import ParameterTable, dtype_name
from areno.weights.report import UpdateCounts
from areno.weights.update import UpdateState, WeightUpdate
from tests.fixtures_models import checkpoint_tensors, decoder_logprobs, load_decoder, manifest_of, reference_logprobs, write_checkpoint

IDS = np.random.default_rng(11).integers(0, 256, 48)
ATTENTION = "model.layers.0.self_attn"
Q, K, V = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"
HEAD = "lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints "old" and "new" of each kind, made once and only read."""
    folder = tmp_path_factory.mktemp("updates")
    for seed, age in enumerate(("old", "new")):
        write_checkpoint(folder / f"llama-{age}", seed=seed)
        write_checkpoint(folder / f"qwen2-{age}", "qwen2", seed=seed)
        write_checkpoint(folder / f"qwen3-{age}", "qwen3", seed=seed)
        write_checkpoint(folder / f"tied-{age}", seed=seed, tie_word_embeddings=True)
    return folder


@pytest.fixture
def old(made: Path) -> DenseDecoder:
    return load_decoder(made / "llama-old")


@pytest.fixture
def new(made: Path) -> Tensors:
    return checkpoint_tensors(made / "llama-new")


def begin(table: ParameterTable, tensors: Mapping[str, torch.Tensor] | None = None, *, partial: bool = False) -> WeightUpdate:
    return WeightUpdate(table, None if tensors is None else manifest_of(tensors), version=1, partial=partial)


def stage_all(update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
    for name, tensor in tensors.items():
        update.stage(name, tensor)
    return update


def bits(table: ParameterTable) -> Tensors:
    return {name: storage.clone() for name, storage in table.live.items()}


def assert_unchanged(table: ParameterTable, before: Tensors) -> None:
    table.check_integrity()
    for name, storage in table.live.items():
        assert torch.equal(storage, before[name]), name


def digests_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, int]:
    return {name: digest(tensor.to(dtype)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_update_serves_the_new_model_and_a_second_swap_the_old_bits(made: Path, family: str, dtype: torch.dtype) -> None:
    decoder = load_decoder(made / f"{family}-old", dtype)
    tensors, before, logprobs = checkpoint_tensors(made / f"{family}-new"), bits(decoder.table), decoder_logprobs(decoder, IDS)
    update = stage_all(begin(decoder.table, tensors), tensors)
    assert_unchanged(decoder.table, before)
    update.verify(digests_of(tensors, dtype))
    assert_unchanged(decoder.table, before)
    update.swap()
    assert update.state is UpdateState.SWAPPED
    decoder.table.check_integrity()
    assert np.array_equal(decoder_logprobs(decoder, IDS), decoder_logprobs(load_decoder(made / f"{family}-new", dtype), IDS))
    if dtype == torch.float32:
        np.testing.assert_allclose(decoder_logprobs(decoder, IDS), reference_logprobs(made / f"{family}-new", IDS), atol=1e-4, rtol=0)
    assert digests(decoder.table) == digests_of(tensors, dtype)
    update.swap()
    assert_unchanged(decoder.table, before)
    assert np.array_equal(decoder_logprobs(decoder, IDS), logprobs)


def test_q_k_and_v_are_read_back_from_the_fused_storage(old: DenseDecoder, new: Tensors) -> None:
    update = stage_all(begin(old.table), new)
    update.verify(None)
    update.swap()
    fused = old.table.live[f"{ATTENTION}.qkv_proj.weight"]
    assert torch.equal(fused, torch.cat((new[Q], new[K], new[V])))
    assert [digests(old.table)[name] for name in (Q, K, V)] == [digest(new[name]) for name in (Q, K, V)]


def test_the_fp32_head_of_a_bf16_model_follows_the_swap_both_ways(made: Path, new: Tensors) -> None:
    decoder = load_decoder(made / "llama-old", torch.bfloat16)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = decoder.logits(hidden)
    update = stage_all(begin(decoder.table, {HEAD: new[HEAD]}, partial=True), {HEAD: new[HEAD]})
    update.verify(None)
    assert torch.equal(decoder.logits(hidden), before)
    update.swap()
    torch.testing.assert_close(decoder.logits(hidden), hidden.float() @ new[HEAD].bfloat16().float().t())
    update.swap()
    assert torch.equal(decoder.logits(hidden), before)


@pytest.mark.parametrize("offered", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_the_cast_is_tensor_to(made: Path, new: Tensors, offered: torch.dtype, served: torch.dtype) -> None:
    decoder = load_decoder(made / "llama-old", served)
    tensors = {name: tensor.to(offered) for name, tensor in new.items()}
    update = stage_all(begin(decoder.table, tensors), tensors)
    update.verify(digests_of(tensors, served))
    update.swap()
    for name, tensor in tensors.items():
        assert torch.equal(decoder.table.views[name], tensor.to(served)), name


def test_strided_tensors_and_parameters_with_gradients_are_taken(old: DenseDecoder, new: Tensors) -> None:
    strided = {name: tensor.t().contiguous().t().requires_grad_() if tensor.dim() == 2 else tensor for name, tensor in new.items()}
    update = stage_all(begin(old.table), strided)
    update.verify(digests_of(new))
    update.swap()
    assert digests(old.table) == digests_of(new)
    assert not any(view.requires_grad for view in old.table.views.values())


def test_the_order_of_tensors_and_repeating_one_do_not_matter(old: DenseDecoder, new: Tensors) -> None:
    update = stage_all(begin(old.table, new), dict(reversed(new.items())))
    update.stage(Q, torch.zeros(64, 64))
    update.stage(Q, new[Q])
    update.verify(digests_of(new))
    update.swap()
    assert digests(old.table) == digests_of(new)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_names_of_wrapped_models_are_understood(old: DenseDecoder, new: Tensors, prefix: str) -> None:
    wrapped = {prefix + name: tensor for name, tensor in new.items()}
    update = stage_all(begin(old.table, wrapped), wrapped)
    update.verify(digests_of(wrapped))
    update.swap()
    assert digests(old.table) == digests_of(new)


def test_a_tensor_that_never_came_is_named_at_verification(old: DenseDecoder, new: Tensors) -> None:
    before = bits(old.table)
    for manifest in (None, new):
        update = stage_all(begin(old.table, manifest), {name: tensor for name, tensor in new.items() if name not in (K, HEAD)})
        with pytest.raises(ManifestMismatch, match=r"2 of 21 tensors never came: lm_head.weight, model.layers.0.self_attn.k_proj.weight"):
            update.verify(None)
        with pytest.raises(AssertionError, match="verified before its swap"):
            update.swap()
        assert_unchanged(old.table, before)


@pytest.mark.parametrize("shape", [(64,), (1,), (1, 64), (64, 1), (64, 32), (4096,), ()])
def test_a_staged_tensor_is_never_broadcast_or_reshaped(old: DenseDecoder, new: Tensors, shape: tuple[int, ...]) -> None:
    before = bits(old.table)
    for manifest in (None, new):
        with pytest.raises(ManifestMismatch, match="nothing is broadcast"):
            begin(old.table, manifest).stage(Q, torch.zeros(shape))
    assert_unchanged(old.table, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q, "model.norm.weight"])
def test_values_that_are_not_finite_are_refused_and_the_tensor_counts_as_not_staged(
    old: DenseDecoder, new: Tensors, name: str, poison: float
) -> None:
    before = bits(old.table)
    update = stage_all(begin(old.table, new), new)
    poisoned = new[name].clone()
    poisoned.view(-1)[13] = poison
    with pytest.raises(ManifestMismatch, match=f"{name} holds NaN or infinity"):
        update.stage(name, poisoned)
    with pytest.raises(ManifestMismatch, match=f"1 of 21 tensors never came: {name}"):
        update.verify(None)
    assert_unchanged(old.table, before)
    update.stage(name, new[name])
    update.verify(digests_of(new))


def test_what_overflows_in_the_serving_dtype_is_refused(made: Path, new: Tensors) -> None:
    update = begin(load_decoder(made / "llama-old", torch.bfloat16).table)
    with pytest.raises(ManifestMismatch, match=r"as torch\.bfloat16"):
        update.stage(Q, torch.full((64, 64), 3.4e38))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_that_are_not_floating_are_refused(old: DenseDecoder, dtype: torch.dtype) -> None:
    with pytest.raises(ManifestMismatch, match=rf"dtype {dtype_name(dtype)}.*send float64, float32"):
        begin(old.table).stage(Q, torch.zeros(64, 64, dtype=dtype))


def test_what_the_manifest_did_not_announce_is_refused(old: DenseDecoder, new: Tensors) -> None:
    update = begin(old.table, {Q: new[Q]}, partial=True)
    with pytest.raises(ManifestMismatch, match="not announced"):
        update.stage(K, new[K])
    with pytest.raises(ManifestMismatch, match="dtype float16, the manifest says float32"):
        update.stage(Q, new[Q].half())
    with pytest.raises(ManifestMismatch, match=f"not in the model.*did you mean {Q}"):
        update.stage(Q.replace("q_proj", "q_prj"), new[Q])


def test_another_tensor_under_an_alias_is_an_offer_made_twice(old: DenseDecoder, new: Tensors) -> None:
    update = stage_all(begin(old.table, new), new)
    update.stage(f"module.{Q}", new[Q].clone())
    with pytest.raises(ManifestMismatch, match=f"{Q} was offered twice, as module.{Q} and as _orig_mod.{Q}"):
        update.stage(f"_orig_mod.{Q}", new[Q] + 1)
    update.verify(digests_of(new))


@pytest.mark.parametrize("fault", ["transposed", "one bit", "k and v swapped", "old value"])
def test_faults_of_the_right_shape_are_caught_by_the_digests(old: DenseDecoder, new: Tensors, fault: str) -> None:
    before, sent = bits(old.table), dict(new)
    if fault == "transposed":
        sent[Q], wrong = new[Q].t(), [Q]
    elif fault == "one bit":
        changed = new["model.norm.weight"].clone()
        changed.view(torch.int32)[63] ^= 1
        sent["model.norm.weight"], wrong = changed, ["model.norm.weight"]
    elif fault == "k and v swapped":
        sent[K], sent[V], wrong = new[V], new[K], [K, V]
    else:
        sent[HEAD], wrong = old.table.views[HEAD].clone(), [HEAD]
    update = stage_all(begin(old.table, new), sent)
    with pytest.raises(DigestMismatch, match="the old weights serve on") as caught:
        update.verify(digests_of(new))
    assert caught.value.value == wrong
    assert all(name in str(caught.value) for name in wrong)
    with pytest.raises(AssertionError):
        update.swap()
    assert_unchanged(old.table, before)


def test_digests_must_cover_what_was_staged_and_nothing_else(old: DenseDecoder, new: Tensors) -> None:
    update = stage_all(begin(old.table, new), new)
    with pytest.raises(DigestMismatch, match=f"missing for {Q}"):
        update.verify({name: value for name, value in digests_of(new).items() if name != Q})
    with pytest.raises(ManifestMismatch, match=r"not staged: model\.extra"):
        update.verify({**digests_of(new), "extra": 1})
    with pytest.raises(ManifestMismatch, match=f"no integers: {Q}"):
        update.verify({**digests_of(new), Q: str(digest(new[Q]))})  # type: ignore[dict-item]
    update.verify(digests_of(new))


def test_digests_taken_before_the_cast_do_not_pass(made: Path, new: Tensors) -> None:
    update = stage_all(begin(load_decoder(made / "llama-old", torch.bfloat16).table), new)
    with pytest.raises(DigestMismatch, match=r"cast on the trainer with tensor\.to"):
        update.verify(digests_of(new))


def test_a_partial_update_changes_only_what_it_brings(old: DenseDecoder, new: Tensors) -> None:
    before, part = digests(old.table), {name: new[name] for name in (K, "model.norm.weight")}
    update = stage_all(begin(old.table, part, partial=True), part)
    update.verify(digests_of(part))
    update.swap()
    assert digests(old.table) == {**before, **digests_of(part)}
    update.swap()
    assert digests(old.table) == before


def test_a_partial_update_must_bring_all_it_announced_and_something(old: DenseDecoder, new: Tensors) -> None:
    announced = {name: new[name] for name in (K, V)}
    with pytest.raises(ManifestMismatch, match=f"1 of 2 tensors never came: {V}"):
        stage_all(begin(old.table, announced, partial=True), {K: new[K]}).verify(None)
    with pytest.raises(ManifestMismatch, match="no tensor was staged"):
        begin(old.table, partial=True).verify(None)


def test_an_abandoned_update_leaves_nothing_to_the_next(old: DenseDecoder, new: Tensors) -> None:
    before = bits(old.table)
    stage_all(begin(old.table, new), new)
    assert_unchanged(old.table, before)
    update = stage_all(begin(old.table, partial=True), {K: new[K]})
    with pytest.raises(ManifestMismatch, match="never came"):
        begin(old.table, new).verify(None)
    update.verify(None)
    update.swap()
    assert digests(old.table) == {**{name: digest(before_view(before, old.table, name)) for name in old.table.views}, K: digest(new[K])}


def before_view(before: Tensors, table: ParameterTable, name: str) -> torch.Tensor:
    """Return the old rows of `name` by its place in the storage that holds it."""
    view = table.views[name]
    for live_name, storage in table.live.items():
        offset = (view.data_ptr() - storage.data_ptr()) // storage.element_size()
        if 0 <= offset < storage.numel():
            return before[live_name].view(-1)[offset : offset + view.numel()].view(view.shape)
    raise AssertionError(name)


def test_staging_storage_is_kept_between_updates_and_given_back_on_request(old: DenseDecoder, new: Tensors) -> None:
    first = old.table.staging()
    begin(old.table, new)
    assert old.table.staging() is first
    old.table.release_staging()
    assert old.table.staging() is not first
    update = stage_all(begin(old.table, new), new)
    update.verify(digests_of(new))
    update.swap()
    old.table.check_integrity()


def test_a_tied_head_may_be_offered_if_it_is_the_embedding(made: Path) -> None:
    for order in (1, -1):
        decoder = load_decoder(made / "tied-old", torch.bfloat16)
        tensors = checkpoint_tensors(made / "tied-new")
        offered = dict(list({**tensors, HEAD: tensors["model.embed_tokens.weight"]}.items())[::order])
        update = stage_all(begin(decoder.table, offered), offered)
        update.verify(digests_of(offered, torch.bfloat16))
        update.swap()
        assert digests(decoder.table) == digests_of(tensors, torch.bfloat16)
        assert np.array_equal(decoder_logprobs(decoder, IDS), decoder_logprobs(load_decoder(made / "tied-new", torch.bfloat16), IDS))


def test_a_tied_head_that_differs_is_refused(made: Path) -> None:
    table = load_decoder(made / "tied-old").table
    tensors = checkpoint_tensors(made / "tied-new")
    update = stage_all(begin(table), {**tensors, HEAD: tensors["model.embed_tokens.weight"] * 2})
    with pytest.raises(ManifestMismatch, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight"):
        update.verify(None)
    for shape in ((256,), (64, 256)):
        with pytest.raises(ManifestMismatch, match="nothing is broadcast"):
            begin(table).stage(HEAD, torch.zeros(shape))


def test_counts_say_what_changed(old: DenseDecoder, new: Tensors) -> None:
    same = {name: view.clone() for name, view in old.table.views.items()}
    update = stage_all(begin(old.table, same), {**same, K: new[K], "model.norm.weight": new["model.norm.weight"]})
    assert update.counts is None
    update.verify(None)
    total = sum(tensor.nbytes for tensor in same.values())
    assert update.counts == UpdateCounts(21, total, 2, new[K].nbytes + new["model.norm.weight"].nbytes)
    assert 0 <= update.staging_s < 60
    unchanged = stage_all(begin(old.table, same), same)
    unchanged.verify(digests(old.table))
    assert unchanged.counts == UpdateCounts(21, total, 0, 0)


def test_a_change_from_zero_to_minus_zero_counts_as_a_change(old: DenseDecoder) -> None:
    old.table.views["model.norm.weight"].zero_()
    update = begin(old.table, partial=True)
    update.stage("model.norm.weight", -torch.zeros(64))
    update.verify(None)
    assert update.counts == UpdateCounts(1, 256, 1, 256)


def test_a_tensor_after_verification_needs_another_verification(old: DenseDecoder, new: Tensors) -> None:
    update = stage_all(begin(old.table), new)
    update.verify(digests_of(new))
    update.stage(Q, torch.zeros(64, 64))
    assert update.state is UpdateState.OPEN
    with pytest.raises(AssertionError, match="verified before its swap"):
        update.swap()
    with pytest.raises(DigestMismatch):
        update.verify(digests_of(new))
    update.stage(Q, new[Q])
    update.verify(digests_of(new))
    update.swap()
    for call in (lambda: update.stage(Q, new[Q]), lambda: update.verify(None)):
        with pytest.raises(AssertionError, match="swap"):
            call()


def test_a_swap_larger_than_its_scratch_buffer_is_exact(monkeypatch: pytest.MonkeyPatch, made: Path, new: Tensors) -> None:
    monkeypatch.setattr("areno.weights.swap.HOST_SCRATCH_BYTES", 1000)
    decoder = load_decoder(made / "llama-old")
    before = bits(decoder.table)
    update = stage_all(begin(decoder.table), new)
    update.verify(digests_of(new))
    update.swap()
    assert digests(decoder.table) == digests_of(new)
    update.swap()
    assert_unchanged(decoder.table, before)


def test_updates_work_from_inference_mode_and_outside_of_it(made: Path, new: Tensors) -> None:
    decoder = load_decoder(made / "llama-old", torch.bfloat16)
    with torch.inference_mode():
        update = stage_all(begin(decoder.table), new)
        update.verify(digests_of(new, torch.bfloat16))
    update.swap()
    with torch.inference_mode():
        update.swap()
    update.swap()
    assert digests(decoder.table) == digests_of(new, torch.bfloat16)


def canaries() -> Iterable[tuple[dict[str, object], str]]:
    good: dict[str, object] = {"ids": [1, 2, 3], "expected_logprobs": np.array([-1.0, -2.0], np.float32)}
    yield {**good, "ids": [1]}, "at least two integers"
    yield {**good, "ids": [[1, 2, 3]]}, "one dimension"
    yield {**good, "ids": [1.0, 2.0, 3.0]}, "integers"
    yield {**good, "expected_logprobs": np.array([-1.0], np.float32)}, r"floats of shape \(2,\)"
    yield {**good, "expected_logprobs": np.array([-1, -2])}, "floats"
    yield {**good, "expected_logprobs": np.array([-1.0, np.nan])}, "finite"
    yield {**good, "expected_logprobs": np.array([-np.inf, -1.0])}, "finite"
    yield {**good, "expected_logprobs": np.array([-1.0, 0.5])}, "at most 0"
    yield {**good, "temperature": -1.0}, "temperature"
    yield {**good, "temperature": float("nan")}, "temperature"


@pytest.mark.parametrize(("arguments", "named"), list(canaries()))
def test_a_canary_that_cannot_be_scored_is_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Canary(**arguments)  # type: ignore[arg-type]


def test_a_canary_keeps_its_arrays_in_their_own_types() -> None:
    canary = Canary(ids=np.array([5, 6], np.int32), expected_logprobs=np.array([-0.5], np.float64))
    assert canary.ids.dtype == np.int64 and canary.expected_logprobs.dtype == np.float32 and canary.temperature == 1.0
