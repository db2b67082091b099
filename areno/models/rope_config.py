"""The rope keys of config.json, in both styles: `rope_theta` beside `rope_scaling`, and `rope_parameters` with everything.

They mean what they mean to transformers. Where they contradict each other, lack a parameter, or give one that their type
doesn't use, the checkpoint is refused: a wrong frequency answers short prompts fluently. Called by `model_config`; no
torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from areno.errors import CheckpointError
from areno.layers.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from areno.models.config_file import ConfigReader, unsupported

DEFAULT_ROPE_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor",),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
ROPE_TYPES: tuple[str, ...] = tuple(_REQUIRED)
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_TYPE_REMEDY = "serve a model with one of these rope types"


def read_rope(reader: ConfigReader, num_positions: int) -> Rope:
    """Return the rotary positions of a model with a context of `num_positions`. Raises: CheckpointError, UnsupportedModel."""
    sections = [section for key in ("rope_scaling", "rope_parameters") if (section := reader.section(key)) is not None]
    types = [_read_type(section) for section in sections]
    _check_one_theta(reader, sections)
    theta = reader.raw.get("rope_theta")
    outer_theta = DEFAULT_ROPE_THETA if theta is None else reader.finite("rope_theta", theta)
    ropes = [_read_section(reader, section, kind, outer_theta, num_positions) for section, kind in zip(sections, types)]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise CheckpointError(
            "config.json contradicts itself: rope_scaling and rope_parameters differ",
            field="rope_scaling",
            value={key: reader.raw[key] for key in ("rope_scaling", "rope_parameters")},
            limit="both describe the same positions",
            remedy="keep what the model was trained with, as a whole and with its rope_theta, in rope_parameters and delete rope_scaling",
        )
    return ropes[0] if ropes else Rope(theta=outer_theta)


def _read_type(section: ConfigReader) -> str:
    names = {key: section.raw[key] for key in ("rope_type", "type") if section.raw.get(key) is not None}
    for key, name in names.items():
        if name not in ROPE_TYPES:
            raise unsupported(section.name(key), name, ", ".join(ROPE_TYPES), _TYPE_REMEDY)
    kinds = list(names.values())
    if len(set(kinds)) > 1:
        limit = f"{section.name('type')}={names['type']!r} says otherwise"
        raise section.wrong("rope_type", names["rope_type"], limit, f"keep {section.name('rope_type')} and delete {section.name('type')}")
    whole = section.raw.get("partial_rotary_factor")
    if whole not in (None, 1, 1.0):
        raise unsupported(section.name("partial_rotary_factor"), whole, "1.0", "serve a model that rotates whole heads")
    for key, value in section.raw.items():
        if isinstance(value, dict):
            raise unsupported(
                section.name(key), value, "one set of rope parameters for all layers", "serve a model whose layers rotate alike"
            )
    kind = str(kinds[0]) if kinds else "default"
    _refuse_unused(section, kind)
    return kind


def _parameters(kind: str) -> tuple[str, ...]:
    return _REQUIRED[kind] + _OPTIONAL.get(kind, ())


def _refuse_unused(section: ConfigReader, kind: str) -> None:
    for key, value in section.raw.items():
        if value is None or key in _COMMON or key in _parameters(kind):
            continue
        users = [name for name in ROPE_TYPES if key in _parameters(name)]
        remedy = f"delete {section.name(key)}" + (f", or set {section.name('rope_type')} to {' or '.join(users)}" if users else "")
        known = ", ".join(_parameters(kind)) or "none but rope_theta"
        raise section.wrong(key, value, f"rope type {kind!r} has no such parameter; known: {known}", remedy)


def _check_one_theta(reader: ConfigReader, sections: list[ConfigReader]) -> None:
    places = [reader, *sections]
    thetas = {
        place.name("rope_theta"): place.finite("rope_theta", place.raw["rope_theta"])
        for place in places
        if place.raw.get("rope_theta") is not None
    }
    if len(set(thetas.values())) > 1:
        told = " and ".join(f"{name}={value:g}" for name, value in thetas.items())
        raise CheckpointError(
            f"config.json contradicts itself: {told}",
            field="rope_theta",
            value=thetas,
            limit="the rope base is one number",
            remedy="keep the value that the model was trained with in rope_parameters.rope_theta and delete the other",
        )


def _read_section(reader: ConfigReader, section: ConfigReader, kind: str, outer_theta: float, num_positions: int) -> Rope:
    theta = _optional(section, "rope_theta", outer_theta)
    if kind == "linear":
        return Rope(theta=theta, scaling=LinearScaling(factor=_read_factor(section, kind)))
    if kind == "llama3":
        return Rope(theta=theta, scaling=_read_llama3(reader, section))
    if kind == "yarn":
        if theta <= 1:
            raise section.wrong("rope_theta", theta, "yarn needs a base above 1")
        return Rope(theta=theta, scaling=_read_yarn(reader, section, num_positions))
    return Rope(theta=theta)


def _missing(section: ConfigReader, key: str, kind: str) -> CheckpointError:
    return section.missing(key, f"rope type {kind!r} needs {', '.join(_REQUIRED[kind])}")


def _needed(section: ConfigReader, key: str, kind: str) -> float:
    if key not in section.raw:
        raise _missing(section, key, kind)
    return section.finite(key, section.raw[key])


def _optional(section: ConfigReader, key: str, default: float) -> float:
    """Return a positive number; `default` stands for an absent or null key."""
    value = section.raw.get(key)
    return default if value is None else section.finite(key, value)


def _read_factor(section: ConfigReader, kind: str) -> float:
    factor = _needed(section, "factor", kind)
    if factor < 1:
        raise section.wrong("factor", factor, "a number of at least 1 is needed")
    return factor


def _original_positions(reader: ConfigReader, section: ConfigReader) -> int | None:
    """Return the context before it was stretched, which some configs tell beside the rope parameters."""
    found = {place.name(_ORIGINAL): place.count(_ORIGINAL) for place in (section, reader) if place.raw.get(_ORIGINAL) is not None}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: {' and '.join(f'{name}={value}' for name, value in found.items())}",
            field=_ORIGINAL,
            value=found,
            limit="the original context is one number",
            remedy=f"keep the value of the training in {section.name(_ORIGINAL)} and delete the other",
        )
    return next(iter(found.values()), None)


def _read_llama3(reader: ConfigReader, section: ConfigReader) -> Llama3Scaling:
    kind = "llama3"
    factor = _read_factor(section, kind)
    low, high = (_needed(section, key, kind) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise section.wrong("high_freq_factor", high, f"it must be above low_freq_factor ({low:g})")
    original = _original_positions(reader, section)
    if original is None:
        raise _missing(section, _ORIGINAL, kind)
    return Llama3Scaling(factor=factor, low_turns=low, high_turns=high, original_positions=original)


def _read_yarn(reader: ConfigReader, section: ConfigReader, num_positions: int) -> YarnScaling:
    original = _original_positions(reader, section) or num_positions
    factor = _read_factor(section, "yarn")
    fast, slow = _optional(section, "beta_fast", 32.0), _optional(section, "beta_slow", 1.0)
    if fast < slow:
        raise section.wrong("beta_fast", fast, f"it must not be below beta_slow ({slow:g})")
    return YarnScaling(
        factor=factor,
        magnitude=_read_magnitude(section, factor),
        fast_turns=fast,
        slow_turns=slow,
        original_positions=original,
        whole_dimensions=section.flag("truncate", True),
    )


def _read_magnitude(section: ConfigReader, factor: float) -> float:
    """Return by how much YaRN lengthens queries and keys, so that attention over a longer context stays as sharp."""

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    absent = 0.0
    scale, divisor = _optional(section, "mscale", absent), _optional(section, "mscale_all_dim", absent)
    # One of the two alone has no meaning.
    computed = grown(scale) / grown(divisor) if scale and divisor else grown(1.0)
    return _optional(section, "attention_factor", computed)
