"""Which part of a model each rank of a tensor-parallel engine holds. No torch here.

Query heads, MLP columns and the vocabulary are cut into equal runs, one a rank, in order. Key and value heads are too; where there
are fewer of them than ranks, neighbours hold copies of one. A vocabulary that the ranks do not divide is cut as if it were longer,
so that the last rank holds fewer ids than the others; no rank holds an id that the model does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from areno.errors import InvalidConfig
from areno.models.model_config import ModelConfig
from areno.weights.cut import Cut

MAX_TP = 64
_ALIGNED_IDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """What rank `rank` of `size` holds; `whole` is the model's shape, `local` the same with the rank's own heads and MLP columns.

    `width` ids are cut off for a rank; the last one has those that are left in `ids`.
    """

    rank: int
    size: int
    whole: ModelConfig
    local: ModelConfig
    heads: Cut
    kv_heads: Cut
    mlp: Cut
    ids: Cut
    width: int


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuse a number of ranks that does not cut the model evenly, naming those that do. Raises: InvalidConfig."""
    problem = _problem(config, tp)
    if problem is None:
        return
    works = [str(size) for size in range(1, MAX_TP + 1) if _problem(config, size) is None]
    raise InvalidConfig(
        f"tp={tp} does not cut the model evenly: {problem}",
        field="tp",
        value=tp,
        limit=f"what works: {', '.join(works)}",
        remedy="set tp to one of them",
    )


def _problem(config: ModelConfig, tp: int) -> str | None:
    if config.num_heads % tp:
        return f"{config.num_heads} attention heads"
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        return f"{config.num_kv_heads} key and value heads"
    if config.intermediate_size % tp:
        return f"intermediate_size {config.intermediate_size}"
    if _ids_of_rank(config.vocab_size, tp) * (tp - 1) >= config.vocab_size:
        return f"a vocabulary of {config.vocab_size}"
    return None


def _ids_of_rank(vocab_size: int, tp: int) -> int:
    if tp == 1:
        return vocab_size
    even = -(-vocab_size // tp)
    aligned = -(-even // _ALIGNED_IDS) * _ALIGNED_IDS
    return aligned if aligned * (tp - 1) < vocab_size else even


def shard_model(config: ModelConfig, rank: int = 0, size: int = 1) -> ModelShard:
    """Return what a rank holds; of one rank that is the whole model. Raises: InvalidConfig as `check_tp`."""
    check_tp(config, size)
    copies = max(1, size // config.num_kv_heads)
    heads, mlp = Cut.part(config.num_heads, rank, size), Cut.part(config.intermediate_size, rank, size)
    kv_heads = Cut.part(config.num_kv_heads, rank // copies, size // copies, copies=copies)
    width = _ids_of_rank(config.vocab_size, size)
    return ModelShard(
        rank=rank,
        size=size,
        whole=config,
        local=replace(config, num_heads=heads.size, num_kv_heads=kv_heads.size, intermediate_size=mlp.size),
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        ids=Cut(config.vocab_size, rank * width, min((rank + 1) * width, config.vocab_size)),
        width=width,
    )
