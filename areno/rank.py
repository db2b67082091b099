"""One device's share of the engine, put together: weights, pages, row state, results, and the executor that runs commands.

The engine makes one and hands it the scheduler's log. What differs between devices is chosen here and nowhere else: on
the CPU the torch forms, on a CUDA device fused kernels, captured graphs and a result ring in mapped memory where the device takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from areno.config import LANE_MULTIPLE, DeviceLimits, EngineConfig, ResolvedConfig
from areno.decode.capture import CapturePermit
from areno.decode.path import DecodePath
from areno.decode.rebuilt import RebuiltPath
from areno.decode.resident import ResidentPath
from areno.decode.results import ResultRing
from areno.decode.tables import DecodeTables
from areno.decode.transport import CudaTransport, Transport, choose_transport
from areno.errors import InvalidConfig, UnsupportedModel
from areno.executor import Executor
from areno.forward import Forward, vocabulary_shard
from areno.kv.store import KVStore
from areno.models.dense import DenseDecoder
from areno.models.model_config import ModelConfig
from areno.models.registry import build_model
from areno.models.shards import ModelShard, shard_model
from areno.parallel import TPGroup
from areno.sampling.penalties import SlotTables
from areno.sampling.variant import Variant

if TYPE_CHECKING:
    from areno.models.dense_cuda import FusedDecoder

DEFAULT_KV_BYTES = 1 << 30
_SLACK_BYTES = 1 << 29


def find_device(name: str) -> torch.device:
    """Return the device that an option means. Raises: InvalidConfig where there is no such device."""
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if available else 0
    index = device.index if device.index is not None else 0
    if index >= count:
        raise InvalidConfig(
            f"device={name!r} does not exist",
            field="device",
            value=name,
            limit=f"{count} CUDA devices are there",
            remedy="use device='cpu'" if not count else f"use cuda:0 to cuda:{count - 1}, or 'auto'",
        )
    return torch.device("cuda", index)


def measure_device(device: torch.device, config: EngineConfig, model: ModelConfig, group: TPGroup | None = None) -> DeviceLimits:
    """Return what the device has room for before anything is allocated. Raises: InvalidConfig where the weights do not fit.

    Of several ranks the first one's part counts, which is the largest, and the device with the least room. Blocks: for the other ranks,
    which call `free_memory`.
    """
    group = group or TPGroup.single(device)
    shard = shard_model(model, 0, group.size)
    free, total = free_memory(group)
    if device.type == "cpu":
        # The host's memory is that of all ranks.
        return DeviceLimits(name="cpu", kind="cpu", kv_bytes=DEFAULT_KV_BYTES // group.size)
    item = 4 if config.dtype == "float32" else 2
    model = shard.local
    live = item * _sketch(shard).table.num_local_parameters
    rows, tokens = config.max_rows or 256, config.max_prefill_tokens or 8192
    widest = 3 * model.intermediate_size + 2 * model.num_heads * model.head_dim + 6 * model.hidden_size
    # Logits and the scratch of filters; of several ranks also the gathered scores that filters look at.
    buffers = (3 if shard.size == 1 else 5) * 4 * rows * model.vocab_size + tokens * widest * item + _SLACK_BYTES
    room = int(free - (1.0 - config.gpu_memory_fraction) * total) - live - buffers
    staged = 0 if config.weight_staging == "host" or (config.weight_staging == "auto" and room <= live) else live
    # Staged weights that do not fit beside the live ones wait in pinned host memory.
    weights, room = live + staged, room - staged
    name = f"{torch.cuda.get_device_name(device)} ({device})"
    if room <= 0:
        raise InvalidConfig(
            f"the model does not fit on {name}",
            field="model",
            value=config.model,
            limit=f"{free / 2**30:,.1f} of {total / 2**30:,.1f} GiB are free, gpu_memory_fraction={config.gpu_memory_fraction:g} of all "
            f"may be used; weights and their staging take {weights / 2**30:,.1f} GiB, buffers {buffers / 2**30:,.1f}",
            remedy="free memory on the device, raise gpu_memory_fraction, lower max_rows, or take a larger device",
        )
    return DeviceLimits(name=str(device), kind="cuda", kv_bytes=room, weight_bytes=weights // 2)


def free_memory(group: TPGroup) -> tuple[int, int]:
    """Return the bytes that are free on the rank's device and all that it has; of several ranks the least of each. Blocks: for them."""
    words = list(torch.cuda.mem_get_info(group.device)) if group.device.type == "cuda" else [0, 0]
    ranks = group.gather_words(words) if group.size > 1 else [words]
    return min(rank[0] for rank in ranks), min(rank[1] for rank in ranks)


def _sketch(shard: ModelShard) -> DenseDecoder:
    """Return the rank's part of the model without memory, to count what it takes."""
    meta = torch.device("meta")
    return build_model(
        shard.whole, dtype=torch.bfloat16, device=meta, num_positions=1, group=TPGroup(shard.rank, shard.size, meta, None, None)
    )


def check_kernels(config: EngineConfig, resolved: ResolvedConfig, model: ModelConfig) -> None:
    """Refuse what the kernels of a CUDA device do not take, by name. Raises: UnsupportedModel, InvalidConfig."""
    powers = (16, 32, 64, 128, 256)
    if model.head_dim not in powers:
        raise UnsupportedModel(
            f"head_dim={model.head_dim} is not for the kernels of a CUDA device",
            field="head_dim",
            value=model.head_dim,
            limit=f"they take {', '.join(map(str, powers))}",
            remedy="serve this model with device='cpu'",
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(model, name) % 16:
            raise UnsupportedModel(
                f"{name}={getattr(model, name)} is not for the kernels of a CUDA device",
                field=name,
                value=getattr(model, name),
                limit="they take multiples of 16",
                remedy="serve this model with device='cpu'",
            )
    if resolved.page_size & (resolved.page_size - 1) or resolved.page_size < 16:
        raise InvalidConfig(
            f"page_size={resolved.page_size} is not for the kernels of a CUDA device",
            field="page_size",
            value=resolved.page_size,
            limit="they take powers of two from 16 on",
            remedy="leave page_size out, or use device='cpu'",
        )


def check_host_memory(config: EngineConfig, resolved: ResolvedConfig, page_bytes: int) -> None:
    """Refuse a pool that was asked for and that free memory cannot hold, before anything is allocated. Raises: InvalidConfig.

    Pages that were not asked for are bounded by their default; the system hands out their memory as they are used.
    """
    wanted, free = resolved.store_pages * page_bytes, psutil.virtual_memory().available
    if config.num_pages is not None and wanted > free:
        raise InvalidConfig(
            f"num_pages={config.num_pages} needs {wanted / 2**30:,.1f} GiB for keys and values",
            field="num_pages",
            value=config.num_pages,
            limit=f"{free / 2**30:,.1f} GiB of memory are free, one page of {resolved.page_size} tokens takes {page_bytes:,} bytes",
            remedy=f"set num_pages to {max(1, free // 2 // page_bytes)} or less, or leave it out",
        )


def packs_weights(model: ModelConfig, size: int = 1) -> bool:
    """Whether a packed copy of the weights leaves enough of the host's memory: live, staged and packed ones in half of what is free."""
    return 3 * 4 * size * _sketch(shard_model(model, 0, size)).table.num_local_parameters <= psutil.virtual_memory().available // 2


_WARM = Variant(noise=True, sums=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one device holds and runs. `proof_path` and `proof_ring` are for canaries, on rows of their own; both rings use `transport`.

    `fused` and `graphs` are of a CUDA device: the model by kernels, and whether prompts and steps are captured.
    """

    model: DenseDecoder
    store: KVStore
    fused: FusedDecoder | None
    graphs: bool
    forward: Forward
    path: DecodePath
    ring: ResultRing
    executor: Executor
    proof_path: DecodePath
    proof_ring: ResultRing
    transport: Transport

    def warm_up(self, buckets: tuple[int, ...]) -> None:
        """Compile and capture what the first steps and the first update of weights would wait for."""
        self.capture(buckets)
        table = self.model.table
        if table.device.type == "cuda":
            from areno.kernels import weights

            weights.warm_up(table.dtype, table.device, cut=bool(table.shards))

    def capture(self, buckets: tuple[int, ...]) -> None:
        """Compile and capture the steps that most engines begin with."""
        self.path.warm_up(buckets, _WARM)

    def release_kv(self) -> None:
        """Give the memory of keys and values back, and drop what was captured over it and what waits to be swapped."""
        self.model.table.release_staging()
        self.forget_captures()
        self.store.release()

    def forget_captures(self) -> None:
        """Drop what was captured. Blocks: until the device has done what was launched."""
        self.path.forget_captures()
        self.forward.forget_captures()


def fill_randomly(model: DenseDecoder, seed: int) -> None:
    """Give every tensor seeded random numbers in place of a checkpoint's: norms near one, the rest with a deviation of 0.02.

    A rank's part has the numbers that the whole tensor would have there.
    """
    table = model.table
    generator = torch.Generator(device=table.device).manual_seed(seed % 2**63)
    for name, view in table.views.items():
        mean, shard = 1.0 if "norm" in name else 0.0, table.shards.get(name)
        if shard is None:
            view.normal_(mean, 0.02, generator=generator)
        else:
            view.copy_(shard.take(torch.empty(shard.shape, dtype=view.dtype, device=view.device).normal_(mean, 0.02, generator=generator)))
    table.rebuild_derived()


def build_rank(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model_config: ModelConfig,
    device: torch.device,
    *,
    beside: Rank | None = None,
    group: TPGroup | None = None,
) -> Rank:
    """Allocate everything on `device`; the weights are NaN until a checkpoint is loaded. Raises: as `choose_transport`.

    With `beside`, weights and K/V memory are that rank's, and its captured prompts too where both capture. Of a `group` it is this rank's
    part; all of its ranks must be given the same options and then the same commands.
    """
    transport = _choose_transport(config, device)
    if beside is None:
        model, store, fused = _build_model(config, resolved, model_config, device, group)
    else:
        model, store, fused = beside.model, beside.store, beside.fused
    if beside is not None and beside.graphs == config.graphs:
        forward = beside.forward
    else:
        forward = _build_forward(config, resolved, model, store, fused)
    # The rebuilt path has waited for a launch before its results enter the ring.
    rings: dict[str, Any] = {"kept": config.kept_ids, "transport": None if config.decode_tables == "rebuilt" else transport}
    ring = ResultRing(slots=config.ring_slots, lanes=resolved.table_rows, run_ahead=resolved.run_ahead, **rings)
    proof_ring = ResultRing(slots=2, lanes=LANE_MULTIPLE, run_ahead=0, **rings)
    build = _PathBuilder(config=config, resolved=resolved, model=model, device=device, forward=forward, fused=fused, transport=transport)
    path = build.path(ring, num_rows=resolved.table_rows, num_slots=max(config.sampling_slots, 1), graphs=config.graphs)
    return Rank(
        model=model,
        store=store,
        fused=fused,
        graphs=config.graphs,
        forward=forward,
        path=path,
        ring=ring,
        executor=Executor(forward, store, path, ring, version=config.initial_version),
        proof_path=build.path(proof_ring, num_rows=LANE_MULTIPLE, num_slots=1, graphs=False),
        proof_ring=proof_ring,
        transport=transport,
    )


def _choose_transport(config: EngineConfig, device: torch.device) -> Transport:
    if config.decode_tables != "rebuilt" or device.type == "cpu":
        return choose_transport(config.result_transport, device)
    if config.result_transport == "mapped":
        raise InvalidConfig(
            "result_transport='mapped' does not go with decode_tables='rebuilt'",
            field="result_transport",
            value="mapped",
            limit="rebuilt rows read every launch back in one copy",
            remedy="leave result_transport at 'auto', or use decode_tables='resident'",
        )
    return CudaTransport(device, mapped=False, reason="decode_tables='rebuilt' reads every launch back")


def _build_model(
    config: EngineConfig, resolved: ResolvedConfig, model_config: ModelConfig, device: torch.device, group: TPGroup | None
) -> tuple[DenseDecoder, KVStore, FusedDecoder | None]:
    dtype: torch.dtype = getattr(torch, resolved.dtype)
    pack = device.type == "cpu" and packs_weights(model_config, 1 if group is None else group.size)
    model = build_model(model_config, dtype=dtype, device=device, num_positions=resolved.max_model_len, pack_weights=pack, group=group)
    model.table.stages_on = config.weight_staging
    store = KVStore(
        num_layers=model_config.num_layers,
        num_pages=resolved.store_pages,
        page_size=resolved.page_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=dtype,
        device=device,
    )
    if device.type == "cpu":
        return model, store, None
    from areno.models.dense_cuda import FusedDecoder

    tokens = resolved.max_prefill_tokens
    return model, store, FusedDecoder(model, store, lanes=resolved.table_rows, prefill_tokens=tokens, max_tokens=resolved.max_model_len)


def _build_forward(
    config: EngineConfig, resolved: ResolvedConfig, model: DenseDecoder, store: KVStore, fused: FusedDecoder | None
) -> Forward:
    dtype: torch.dtype = getattr(torch, resolved.dtype)
    if fused is None:
        return Forward(model, store, dtype)
    from areno.prefill_graphs import PrefillGraphs

    permit = CapturePermit(model.group, enabled=config.graphs)
    return Forward(model, store, dtype, PrefillGraphs(fused, store, max_tokens=resolved.max_prefill_tokens, permit=permit))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathBuilder:
    """Makes the decode paths that the options and the device ask for."""

    config: EngineConfig
    resolved: ResolvedConfig
    model: DenseDecoder
    device: torch.device
    forward: Forward
    fused: FusedDecoder | None
    transport: Transport

    def path(self, ring: ResultRing, *, num_rows: int, num_slots: int, graphs: bool) -> DecodePath:
        """Return a path of this many rows and sampling slots."""
        device, longest = self.device, self.resolved.max_model_len
        slots = SlotTables(num_slots=num_slots, vocab_size=self.model.config.vocab_size, max_forced=longest, device=device)
        sizes = {"num_rows": num_rows, "pages_per_row": self.resolved.pages_per_row, "page_size": self.resolved.page_size}
        rebuilt = self.config.decode_tables == "rebuilt"
        if self.fused is None:
            if rebuilt:
                return RebuiltPath(self.forward, slots=slots, **sizes)
            return ResidentPath(self.forward, DecodeTables(slots=slots, device=device, **sizes))
        from areno.decode.graphs import GraphPath
        from areno.decode.graphs_rebuilt import RebuiltGraphPath
        from areno.decode.steps import DecodeSteps

        page_size = self.resolved.page_size
        permit = CapturePermit(self.model.group, enabled=graphs)
        steps = DecodeSteps(
            self.fused,
            slots,
            self.model.config,
            lanes=num_rows,
            page_size=page_size,
            device=device,
            permit=permit,
            shard=vocabulary_shard(self.model),
        )
        if rebuilt:
            return RebuiltGraphPath(steps, slots, kept=self.config.kept_ids, device=device, **sizes)
        return GraphPath(steps, DecodeTables(slots=slots, device=device, **sizes), ring, self.transport)
