"""Which decoder runs which model type.

`model_config.read_model_config` has already refused everything that is not listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from areno.models.dense import DenseDecoder
from areno.models.model_config import MODEL_TYPES, ModelConfig
from areno.parallel import TPGroup

_BUILDERS: Mapping[str, Callable[..., DenseDecoder]] = {name: DenseDecoder for name in MODEL_TYPES}


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int | None = None,
    pack_weights: bool = False,
    group: TPGroup | None = None,
) -> DenseDecoder:
    """Return the decoder for `config`, allocated and filled with NaN; `weights.load` fills it. Of a `group` it is this rank's part.

    `num_positions` bounds the rotary table (default: the config's whole context); a forward may not go beyond it.
    `pack_weights` keeps packed copies of the projections, which takes their memory once more, where that is possible.
    """
    with torch.inference_mode(False):
        return _BUILDERS[config.model_type](
            config,
            dtype=dtype,
            device=device,
            num_positions=num_positions or config.max_position_embeddings,
            pack_weights=pack_weights,
            group=group,
        )
