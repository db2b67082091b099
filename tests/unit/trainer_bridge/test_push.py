"""A push is whole, proven and cleaned up, and leaves the trainer's model as it was."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areno.weights.digest import digest
from rollout.errors import DrainTimeout, WeightUpdateError
from tests.hostile_values import check_refusal
from tests.unit.trainer_bridge.fakes import FakeWeightService, TinyNet
from trainer_bridge.errors import InvalidOption, PushError, PushWarning, UnpushableTensor, WeightsUnchanged
from trainer_bridge.hooks import after_step_hook
from trainer_bridge.weights.names import plain_name
from trainer_bridge.weights.push import PushReport, WeightPush

torch.set_num_threads(1)


@pytest.fixture
def service(tmp_path: Path) -> FakeWeightService:
    return FakeWeightService(tmp_path)


def nudge(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(0.01)


def test_a_push_brings_every_tensor_under_a_new_version(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    assert push.version == 0
    report = push.push()
    assert push.version == report.version == service.version == 1
    assert {name: tensor.tolist() for name, tensor in service.tensors.items()} == {
        name: parameter.tolist() for name, parameter in model.named_parameters()
    }
    assert (report.num_tensors, report.num_bytes) == (2, 2 * 32 * 8 * 4)
    assert service.manifests == [
        {"embed.weight": {"dtype": "float32", "shape": [32, 8]}, "lm_head.weight": {"dtype": "float32", "shape": [32, 8]}}
    ]
    assert service.calls == ["begin", "stage", "commit"]
    assert list(service.weights_dir.iterdir()) == []


def test_a_push_is_logged_with_all_its_figures(service: FakeWeightService, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "trainer_bridge.push"):
        report = WeightPush(service, TinyNet(), transport="file").push()
    (line,) = caplog.messages
    assert line.startswith("weights pushed: version 1 by file (asked for): ")
    for figure in ("tensors", "MB", "changed", "prepared", "staged", "swap", "proof", "pause", "canary gap"):
        assert figure in line
    assert f"{report.num_tensors} tensors" in line and f"pause {report.pause_ms:.1f} ms" in line


def test_a_later_push_reports_what_changed_since_the_last(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    nudge(model)
    report = push.push()
    assert (report.changed_tensors, report.changed_bytes, report.warning) == (1, 32 * 8 * 4, None)


def test_tensors_are_cast_to_the_serving_dtype_before_their_digests(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path, dtype="bfloat16")
    model = TinyNet()
    WeightPush(service, model).push()
    assert torch.equal(service.tensors["embed.weight"], model.embed.weight.detach().to(torch.bfloat16))
    assert digest(service.tensors["embed.weight"]) == digest(model.embed.weight.detach().to(torch.bfloat16))
    assert service.manifests[0]["embed.weight"]["dtype"] == "bfloat16"


def test_small_buckets_bring_the_same_tensors_in_more_files(service: FakeWeightService) -> None:
    model = TinyNet()
    WeightPush(service, model, bucket_bytes=1).push()
    assert service.calls == ["begin", "stage", "stage", "commit"]
    assert set(service.tensors) == {"embed.weight", "lm_head.weight"}


def test_a_tied_head_is_not_sent_unless_it_is_named(service: FakeWeightService) -> None:
    model = TinyNet(tied=True)
    push = WeightPush(service, model)
    push.push()
    nudge(model)
    push.push(list(model.named_parameters(remove_duplicate=False)))
    both = {"embed.weight", "lm_head.weight"}
    assert set(service.tensors) == both and [set(manifest) for manifest in service.manifests] == [{"embed.weight"}, both]


def test_a_head_that_is_another_tensor_is_sent_whatever_the_config_says(service: FakeWeightService) -> None:
    model = TinyNet(tied=True)
    model.config = SimpleNamespace(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.embed.weight.detach() * 2)
    WeightPush(service, model).push()
    assert torch.equal(service.tensors["lm_head.weight"], 2 * service.tensors["embed.weight"])


@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_tensors_that_share_memory_leave_in_files_as_they_are(service: FakeWeightService, bucket_bytes: int | None) -> None:
    buffer = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    model = TinyNet()
    model.embed.weight, model.lm_head.weight = torch.nn.Parameter(buffer[:32]), torch.nn.Parameter(buffer[16:])
    WeightPush(service, model, transport="file", bucket_bytes=bucket_bytes).push()
    assert torch.equal(service.tensors["embed.weight"], buffer[:32]) and torch.equal(service.tensors["lm_head.weight"], buffer[16:])


def test_a_negated_view_is_sent_with_its_sign(service: FakeWeightService) -> None:
    embed, head = torch.ones(32, 8), torch.imag(torch.full((32, 8), 1 + 2j).conj())
    assert head.is_neg()
    WeightPush(service).push([("embed.weight", embed), ("lm_head.weight", head)], canary=lambda ids: np.zeros(len(ids) - 1))
    assert (service.tensors["lm_head.weight"] == -2).all()


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids)


def test_the_names_of_wrapped_models_are_those_of_the_plain_one(service: FakeWeightService) -> None:
    assert plain_name("module._orig_mod.model.layers.0._orig_mod.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert plain_name("module.module.lm_head.weight") == "lm_head.weight"
    WeightPush(service, Wrapper(TinyNet(tied=True))).push()
    assert set(service.tensors) == {"embed.weight"}


def test_two_tensors_of_one_name_are_refused(service: FakeWeightService) -> None:
    model = TinyNet()
    pairs = [*model.named_parameters(), ("module.embed.weight", model.embed.weight)]
    with pytest.raises(UnpushableTensor, match=r"module.embed.weight and embed.weight are both embed.weight"):
        WeightPush(service, model).push(pairs)
    assert service.version == 0 and service.calls[-1] == "abort"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_values_that_are_not_finite_are_refused_by_name_and_the_update_aborted(tmp_path: Path, value: float) -> None:
    service = FakeWeightService(tmp_path)
    model = TinyNet().double()
    with torch.no_grad():
        model.lm_head.weight[3, 2] = value
    with pytest.raises(UnpushableTensor, match=r"lm_head\.weight holds 1 non-finite values"):
        WeightPush(service, model).push()
    assert service.calls[-1] == "abort" and list(tmp_path.iterdir()) == []


def test_adapters_and_integer_tensors_are_refused_with_the_remedy(service: FakeWeightService) -> None:
    push = WeightPush(service, TinyNet())
    with pytest.raises(UnpushableTensor, match="its adapters"):
        push.push([("base_model.model.embed.weight", torch.zeros(2, 2))])
    with pytest.raises(UnpushableTensor, match=r"dtype torch\.int8"):
        push.push([("embed.weight", torch.zeros(2, 2, dtype=torch.int8))])


@pytest.mark.parametrize("operation", ["stage", "commit"])
def test_any_failure_aborts_keeps_the_version_and_leaves_no_file(tmp_path: Path, operation: str) -> None:
    service = FakeWeightService(tmp_path, fail_at={operation: ConnectionError("gone")})
    push = WeightPush(service, TinyNet())
    with pytest.raises(ConnectionError, match="gone"):
        push.push()
    assert service.calls[-1] == "abort" and push.version == 0
    assert list(tmp_path.iterdir()) == []
    service.fail_at = {}
    assert push.push().version == 1


def test_an_interrupt_aborts_as_well_and_a_failed_abort_does_not_hide_it(tmp_path: Path) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    service = FakeWeightService(tmp_path, on_stage=interrupt, fail_at={"abort": ConnectionError("gone too")})
    with pytest.raises(KeyboardInterrupt) as caught:
        WeightPush(service, TinyNet()).push()
    assert service.calls[-1] == "abort" and "gone too" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ConnectionError])
def test_an_update_whose_abort_did_not_get_through_is_aborted_by_the_next_push(tmp_path: Path, kind: type[BaseException]) -> None:
    def fail(path: Path) -> None:
        raise ConnectionError("gone")

    service = FakeWeightService(tmp_path, on_stage=fail, fail_at={"abort": kind("no abort")})
    model = TinyNet()
    push = WeightPush(service, model, transport="file")
    with pytest.raises(kind):
        push.push()
    service.fail_at, service.on_stage = {}, None
    service.calls.clear()
    assert push.push().version == 1
    assert service.calls == ["abort", "begin", "stage", "commit"]
    service.calls.clear()
    nudge(model)
    push.push()
    assert service.calls == ["begin", "stage", "commit"], "one that was committed is over"


def test_an_interrupt_while_the_transport_is_aborted_does_not_keep_the_abort_from_the_service(service: FakeWeightService) -> None:
    push = WeightPush(service, TinyNet(), transport="file")

    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    push._transport.send = push._transport.abort = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        push.push()
    assert service.calls == ["begin", "abort"]


def test_a_refused_begin_is_not_aborted(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path, fail_at={"begin": RuntimeError("busy")})
    with pytest.raises(RuntimeError, match="busy"):
        WeightPush(service, TinyNet()).push()
    assert service.calls == ["begin"]


def test_files_are_complete_when_the_service_sees_them_and_leftovers_of_dead_pushes_go(tmp_path: Path) -> None:
    (tmp_path / "push-dead-00000-aa.safetensors").write_bytes(b"x")
    (tmp_path / "push-dead-00001-aa.safetensors.tmp").write_bytes(b"x")
    (tmp_path / "somebody-else.safetensors").write_bytes(b"x")
    seen: list[list[str]] = []
    service = FakeWeightService(tmp_path, on_stage=lambda path: seen.append(sorted(entry.name for entry in tmp_path.iterdir())))
    WeightPush(service, TinyNet()).push()
    ((ours, other),) = seen
    assert ours.startswith("push-update0-") and ours.endswith(".safetensors") and other == "somebody-else.safetensors"
    assert [entry.name for entry in tmp_path.iterdir()] == ["somebody-else.safetensors"]


def test_a_weights_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PushError, match="--weights-dir on a disk that trainer and service both see"):
        WeightPush(FakeWeightService(tmp_path / "elsewhere"), TinyNet(), transport="file").push()


def test_the_third_unchanged_push_in_a_row_raises_before_the_commit(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    for _ in range(2):
        with pytest.warns(PushWarning, match="equals the weights before it"):
            assert push.push().warning is not None
    with pytest.raises(WeightsUnchanged, match="changes no tensor, like the 2 before it"):
        push.push()
    assert service.version == 3 and service.calls[-1] == "abort" and "commit" not in service.calls[-2:]
    nudge(model)
    assert push.push().version == 4
    with pytest.warns(PushWarning):
        push.push()


def test_a_push_over_another_trainers_warns_and_ones_own_do_not(service: FakeWeightService) -> None:
    model = TinyNet()
    one, other = WeightPush(service, model), WeightPush(service, model)
    one.push()
    nudge(model)
    with pytest.warns(PushWarning, match="version 1 was pushed by another trainer, and this push goes over it"):
        other.push()
    nudge(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.push()
        nudge(model)
        other.push()
    nudge(model)
    with pytest.warns(PushWarning, match="version 4 was pushed by another trainer"):
        one.push()


def test_pushing_what_the_service_already_had_counts_from_the_first_push(service: FakeWeightService) -> None:
    model = TinyNet()
    WeightPush(service, model).push()
    push = WeightPush(service, model)
    for _ in range(2):
        with pytest.warns(PushWarning):
            push.push()
    with pytest.raises(WeightsUnchanged):
        push.push()


def test_unchanged_pushes_pass_when_they_are_allowed(service: FakeWeightService) -> None:
    push = WeightPush(service, TinyNet(), allow_unchanged=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [push.push().version for _ in range(6)] == [1, 2, 3, 4, 5, 6]


def test_weights_that_the_service_lost_are_pushed_again_as_often_as_it_asks(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in range(2, 7):
            service.lose_weights()
            assert push.push().version == version and service.needs_weights is None
    for _ in range(2):
        with pytest.warns(PushWarning, match="equals the weights before it"):
            push.push()
    with pytest.raises(WeightsUnchanged):
        push.push()


def test_lost_weights_that_equal_the_folders_count_as_no_unchanged_push(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    folder = dict(service.tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            service.lose_weights(folder=folder)
            assert push.push().changed_tensors == 0


def test_after_the_push_of_another_trainer_the_same_weights_count_anew(service: FakeWeightService) -> None:
    model, other = TinyNet(), TinyNet(seed=1)
    push, theirs = WeightPush(service, model), WeightPush(service, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "version . was pushed by another trainer")
        for _ in range(3):
            assert push.push().changed_tensors == len(dict(model.named_parameters()))
            theirs.push()


def test_a_safe_point_pushes_only_what_is_asked_for_and_leaves_outages_to_the_source(service: FakeWeightService) -> None:
    push = WeightPush(service, TinyNet())
    assert push.push_if_needed() is None and service.calls == []
    push.push()
    service.lose_weights()
    service.calls.clear()
    report = push.push_if_needed()
    assert report is not None and report.version == service.version == push.version == 1
    assert service.calls == ["restore", "stage", "commit"]
    assert push.push_if_needed() is None
    service.lose_weights()
    for operation, error in (("info", Away("away")), ("restore", Away("the host is gone again"))):
        service.fail_at = {operation: error}
        assert push.push_if_needed() is None
    service.fail_at = {"restore": RuntimeError("something else")}
    with pytest.raises(RuntimeError, match="something else"):
        push.push_if_needed()


def test_a_service_that_was_started_again_gets_the_weights_once_at_the_safe_point(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    for number in range(3):
        service.start_again(folder=dict(model.named_parameters()) if number else None)
        service.fail_at = {"info": Away("away")}
        assert push.push_if_needed() is None
        service.fail_at = {}
        # No warning either where the folder has these weights already: nobody forgot a step.
        report = push.push_if_needed()
        assert report is not None and report.version == push.version == service.version and report.warning is None
        assert push.push_if_needed() is None
    # The push of another trainer is not undone.
    WeightPush(service, TinyNet(seed=1)).push()
    assert push.push_if_needed() is None


class Away(Exception):
    """What a client raises while the service is away."""

    code = "host_failed"


def test_canaries_come_from_the_models_own_forward_in_eval_mode(service: FakeWeightService) -> None:
    model = TinyNet().train()
    model.embed.eval()
    ids = [3, 1, 4, 1, 5]
    random_state = torch.get_rng_state()
    WeightPush(service, model, canary_ids=[ids]).push()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training and model.drop.training and not model.embed.training
    (canary,) = service.canaries
    with torch.no_grad():
        logits = model.lm_head(model.embed(torch.tensor(ids))).double()
    expected = torch.log_softmax(logits[:-1], -1)[torch.arange(4), torch.tensor(ids[1:])]
    np.testing.assert_allclose(canary.expected_logprobs, expected, atol=1e-5)
    assert list(canary.ids) == ids


def test_canaries_run_under_the_autocast_that_training_uses(service: FakeWeightService) -> None:
    seen: list[bool] = []

    class Watching(TinyNet):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(input_ids)

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16):
            yield

    WeightPush(service, Watching(), canary_ids=[[1, 2, 3]], autocast=autocast).push()
    assert seen == [True]


def test_default_canaries_are_fixed_sequences_that_the_model_accepts(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    first = service.canaries
    nudge(model)
    push.push()
    assert len(first) == 3 and all(len(canary.ids) == len(canary.expected_logprobs) + 1 <= 64 for canary in first)
    for before, after in zip(first, service.canaries):
        assert list(before.ids) == list(after.ids) and not np.array_equal(before.expected_logprobs, after.expected_logprobs)


def test_an_iterator_is_proven_by_digests_alone_with_a_warning(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service)
    with pytest.warns(PushWarning, match=r"pass canary=fn\(ids\) -> logprobs"):
        report = push.push(iter(model.named_parameters()))
    assert service.manifests == [None] and service.canaries == [] and report.canary_gap is None
    nudge(model)
    push.push(iter(model.named_parameters()), canary=lambda ids: np.full(len(ids) - 1, -1.5))
    assert [canary.expected_logprobs.tolist() for canary in service.canaries] == [[-1.5] * (len(c.ids) - 1) for c in service.canaries]


def test_a_canary_function_of_the_wrong_length_is_refused(service: FakeWeightService) -> None:
    push = WeightPush(service)
    with pytest.raises(InvalidOption, match="leave out the first id"):
        push.push(iter(TinyNet().named_parameters()), canary=lambda ids: np.zeros(len(ids)))
    assert service.calls[-1] == "abort"


def test_a_push_without_anything_to_send_is_refused(service: FakeWeightService) -> None:
    with pytest.raises(InvalidOption, match=r"push\(model\.named_parameters"):
        WeightPush(service).push()


def test_the_hook_pushes_after_every_nth_optimizer_step(service: FakeWeightService) -> None:
    model = TinyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports: list[PushReport] = []
    handle = after_step_hook(optimizer, WeightPush(service, model), every=2, on_report=reports.append)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 3]])).sum().backward()
        optimizer.step()
    assert [(report.version, report.trainer_step) for report in reports] == [(1, 2), (2, 4)]
    handle.remove()
    optimizer.step()
    assert service.version == 2
    with pytest.raises(InvalidOption, match="every=0"):
        after_step_hook(optimizer, WeightPush(service, model), every=0)


def test_a_push_says_what_becomes_of_running_requests_and_an_unknown_way_is_refused_before_a_byte_goes(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    assert service.commit_mode == ("inflight", 60.0)
    nudge(model)
    push.push(mode="drain", drain_s=5.0)
    assert service.commit_mode == ("drain", 5.0)
    service.calls.clear()
    with pytest.raises(InvalidOption, match="known: inflight, drain, abort_requests; leave mode out"):
        push.push(mode="wait")
    assert service.calls == []


@pytest.mark.parametrize("why", ["another step was made", "nothing proves it", "another trainer's"])
def test_weights_that_cannot_come_back_under_their_version_are_pushed_under_a_new_one(service: FakeWeightService, why: str) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    service.lose_weights()
    if why == "another step was made":
        nudge(model)
    elif why == "nothing proves it":
        service.fail_at = {"restore": WeightUpdateError("restore=1 cannot be proven", remedy="leave restore out")}
    else:
        push = WeightPush(service, model)
    report = push.push_if_needed()
    assert report is not None and report.version == push.version == service.version == 2
    assert service.needs_weights is None and list(service.weights_dir.iterdir()) == []


def test_the_async_client_and_what_is_no_model_are_refused_by_name(service: FakeWeightService) -> None:
    class AsyncService:
        async def info(self) -> None: ...

    with pytest.raises(InvalidOption, match=r"client is an AsyncService; .* blocking client; pass rollout\.connect\(\)"):
        WeightPush(AsyncService(), TinyNet())  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"model is a str; a torch\.nn\.Module; pass the model that is trained"):
        WeightPush(service, "a/model")  # type: ignore[arg-type]


@pytest.mark.parametrize("stranger", ["ipc:///a/socket", 3, TinyNet(), [], {"client": 1}])
def test_what_is_no_client_is_refused_by_name(stranger: Any) -> None:
    with pytest.raises(InvalidOption, match=r"a blocking client of the service; pass rollout\.connect\(address\)") as refusal:
        WeightPush(stranger, TinyNet(), process_group=None)
    check_refusal(refusal.value, stranger)
    assert refusal.value.field == "client"


@pytest.mark.parametrize("stranger", [None, 3, object(), ["memory"], {"name": "file"}, np.zeros(2)])
def test_what_is_no_transport_is_refused_before_an_update_is_open(service: FakeWeightService, stranger: Any) -> None:
    with pytest.raises(InvalidOption, match=r"known: auto, .* or an object with name, .*; leave it at 'auto'") as refusal:
        WeightPush(service, TinyNet(), transport=stranger)
    check_refusal(refusal.value, stranger)
    assert refusal.value.field == "transport" and "begin" not in service.calls


@pytest.mark.parametrize("step", ["open", "send", "close"])
def test_a_transport_of_the_users_own_that_fails_in_its_abort_too_leaves_no_update_open(service: FakeWeightService, step: str) -> None:
    class Broken:
        name, reason, bucket_bytes = "mine", "asked for", 1 << 20

        def open(self, info: Any, update_id: str) -> None:
            self._reach("open")

        def send(self, bucket: Any) -> None:
            self._reach("send")

        def close(self) -> None:
            self._reach("close")

        def abort(self) -> None:
            raise OSError("nor can this")

        def _reach(self, here: str) -> None:
            if here == step:
                raise OSError(f"{here} broke")

    with pytest.raises(OSError, match=f"{step} broke") as failure:
        WeightPush(service, TinyNet(), transport=Broken()).push()
    assert service.calls[-1] == "abort" and failure.value.__notes__ == ["the abort of the update failed too: nor can this"]


def test_a_warning_stands_where_the_trainer_pushed_and_not_in_the_bridge(service: FakeWeightService) -> None:
    model = TinyNet()
    push = WeightPush(service, model)
    push.push()
    with pytest.warns(PushWarning, match="equals the weights before it") as published:
        push.push()
    push = WeightPush(service, allow_unchanged=True)
    with pytest.warns(PushWarning, match="no canary") as proven:
        push.push(list(model.named_parameters()))
    nudge(model)
    push = WeightPush(service, model)
    push.push()
    with pytest.warns(PushWarning, match="equals the weights before it") as staged:
        push.push(wait="staged").result()
    assert {Path(one.filename).name for told in (published, proven, staged) for one in told} == {Path(__file__).name}


def test_a_drain_that_took_too_long_says_that_the_push_is_over(tmp_path: Path) -> None:
    late = DrainTimeout("1 requests were still running after 1 s", field="drain_s", limit="the update is staged", remedy="commit again")
    service = FakeWeightService(tmp_path, fail_at={"commit": late})
    with pytest.raises(DrainTimeout) as refusal:
        WeightPush(service, TinyNet()).push(mode="drain", drain_s=1)
    assert service.calls[-1] == "abort" and any("push again" in note for note in refusal.value.__notes__)
