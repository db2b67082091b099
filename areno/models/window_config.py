"""Which layers attend to the last tokens only, and to how many: the keys of config.json that decide it together. No torch here.

Qwen has a switch (`use_sliding_window`), a width and, for the layers, either `layer_types` or the index of the first
windowed layer (`max_window_layers`), which counts only without `layer_types`. Called by `model_config`.
"""

from __future__ import annotations

from areno.errors import CheckpointError
from areno.models.config_file import ConfigReader, unsupported

# What a config that lacks the key means, as Hugging Face's own config classes have it.
_DEFAULT_WIDTH = 4096
_DEFAULT_FIRST_LAYER = 28
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(reader: ConfigReader, num_layers: int, num_positions: int, *, may_slide: bool) -> tuple[int | None, ...]:
    """Return each layer's window: tokens that a token attends to, itself included; None for all.

    A window as long as the context hides nothing and is none. With `may_slide` false (Llama) the switch and the width have
    no meaning. Raises: CheckpointError, UnsupportedModel.
    """
    kinds = _read_kinds(reader, num_layers, known=(_FULL, _SLIDING) if may_slide else (_FULL,))
    switched_on = may_slide and reader.flag("use_sliding_window")
    width = reader.raw.get("sliding_window", _DEFAULT_WIDTH) if switched_on else None
    if kinds is not None:
        slides = [kind == _SLIDING for kind in kinds]
    elif width is not None:
        first = reader.raw.get("max_window_layers", _DEFAULT_FIRST_LAYER)
        if type(first) is not int or first < 0:
            raise reader.wrong("max_window_layers", first, "an integer from 0 on is needed")
        slides = [layer >= first for layer in range(num_layers)]
    else:
        slides = []
    if not any(slides):
        return (None,) * num_layers
    if width is None:
        raise _no_width(reader, switched_on)
    if type(width) is not int or width < 1:
        raise reader.wrong("sliding_window", width, "a positive integer is needed")
    return tuple(width if slides_here and width < num_positions else None for slides_here in slides)


def _read_kinds(reader: ConfigReader, num_layers: int, known: tuple[str, ...]) -> list[str] | None:
    kinds = reader.raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise reader.wrong("layer_types", kinds, "a list with a kind for each layer is needed")
    others = sorted({str(kind) for kind in kinds} - set(known))
    if others:
        raise unsupported("layer_types", ", ".join(others), ", ".join(known), "serve a model whose layers are of these kinds")
    if len(kinds) != num_layers:
        raise reader.wrong("layer_types", kinds, f"its {len(kinds)} entries must be num_hidden_layers ({num_layers})")
    return kinds


def _no_width(reader: ConfigReader, switched_on: bool) -> CheckpointError:
    off = "sliding_window=None" if switched_on else f"use_sliding_window={reader.raw.get('use_sliding_window', False)!r}"
    return CheckpointError(
        f"config.json contradicts itself: layer_types names {_SLIDING}, but {off}",
        field="sliding_window" if switched_on else "use_sliding_window",
        value=reader.raw.get("sliding_window") if switched_on else False,
        limit="a sliding layer needs a width",
        remedy=f"set use_sliding_window to true and sliding_window to the width of the training, or make every layer {_FULL}",
    )
