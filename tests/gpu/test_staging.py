"""Updates on a card: staged beside decode in the device's memory or the host's, proven, swapped and swapped back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from areno import Engine, Request, SamplingParams
from areno.errors import CanaryMismatch, DigestMismatch, ManifestMismatch
from areno.weights.canary import Canary
from areno.weights.digest import digest
from areno.weights.names import TensorSpec
from areno.weights.slices import Slice
from tests.gpu.test_engine import engine_of, run

pytestmark = pytest.mark.gpu
PLACES = pytest.mark.parametrize("place", ["device", "host"])


def newer(engine: Engine, *, on: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        name: (tensor.cpu().float() + 0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype).to(on)
        for name, tensor in engine.tensors().items()
    }


def stage(engine: Engine, tensors: dict[str, torch.Tensor], version: int) -> None:
    engine.begin_update(None, version=version)
    for name, tensor in tensors.items():
        engine.stage(name, tensor)


def test_what_comes_last_of_a_tensor_counts_however_it_came(checkpoint: Callable[..., Path]) -> None:
    engine = engine_of(checkpoint("qwen3"), dtype="bfloat16")
    tensors = newer(engine, on="cuda")
    manifest = {name: TensorSpec("bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items()}
    old = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    engine.begin_update(manifest, version=1)
    for number, (name, tensor) in enumerate(tensors.items()):
        flat, half = tensor.reshape(-1), tensor.numel() // 2
        engine.stage_slices([Slice(name, old[name].reshape(-1), 0, manifest[name])])
        if number % 2:
            engine.stage(name, tensor)
            continue
        engine.stage_slices([Slice(name, flat, 0, manifest[name])])
        with pytest.raises(ManifestMismatch, match="reach into each other"):
            engine.stage_slices([Slice(name, flat[half:], half, manifest[name])])
    report = engine.commit_update(digests={name: digest(tensor) for name, tensor in tensors.items()})
    assert report.changed_tensors == len(tensors)


@PLACES
@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_beside_decode_is_whole_and_counted(checkpoint: Callable[..., Path], place: str, source: str, dtype: str) -> None:
    engine = engine_of(checkpoint("qwen3"), weight_staging=place, dtype=dtype)
    tensors = newer(engine, on=source)
    one = next(iter(tensors))
    tensors[one] = engine.tensors()[one].clone().to(source)
    names, staged = list(tensors), 0
    asked = [
        Request(request_id=n, prompt_ids=np.arange(3, 30 + n), sampling=SamplingParams(max_new_tokens=60, seed=n, ignore_eos=True))
        for n in range(3)
    ]

    def some(engine: Engine) -> None:
        nonlocal staged
        if not staged:
            engine.begin_update(None, version=1)
        if staged < len(names):
            engine.stage(names[staged], tensors[names[staged]])
            staged += 1
            if staged == len(names):
                report = engine.commit_update(digests={name: digest(tensor) for name, tensor in tensors.items()})
                assert report.changed_tensors == len(names) - 1 == report.num_tensors - 1
                assert report.changed_bytes == report.num_bytes - tensors[one].nbytes

    told = run(engine, asked, before_step=some)
    assert engine.version == 1 and all(len(output.ids) == 60 for output in told.values())
    assert engine.digests() == {name: digest(tensor) for name, tensor in tensors.items()}
    assert engine._table.staging().device.type == ("cuda" if place == "device" else "cpu")


@PLACES
def test_what_is_wrong_is_named_and_the_old_bits_serve_on(checkpoint: Callable[..., Path], place: str) -> None:
    engine = engine_of(checkpoint("qwen3"), weight_staging=place, dtype="float32")
    before, tensors = engine.digests(), newer(engine, on="cuda")
    name = "model.layers.1.mlp.down_proj.weight"
    good = {one: digest(tensor) for one, tensor in tensors.items()}
    broken = tensors[name].clone()
    broken[3, 5] = float("nan")
    stage(engine, {**tensors, name: broken}, 1)
    with pytest.raises(ManifestMismatch, match=rf"NaN or infinity.*{name}"):
        engine.commit_update(digests=good)
    flipped = tensors[name].clone()
    flipped.view(torch.int32)[3, 5] ^= 1
    stage(engine, {**tensors, name: flipped}, 1)
    with pytest.raises(DigestMismatch, match=name):
        engine.commit_update(digests=good)
    stage(engine, tensors, 1)
    canary = Canary(ids=np.arange(3, 20), expected_logprobs=np.full(16, -1.0, np.float32))
    with pytest.raises(CanaryMismatch, match="canary 0, token"):
        engine.commit_update(digests=good, canaries=[canary])
    assert engine.version == 0 and engine.digests() == before
    stage(engine, tensors, 1)
    engine.commit_update(digests=good)
    assert engine.version == 1 and engine.digests() == good
