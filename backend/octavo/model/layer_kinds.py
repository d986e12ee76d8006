"""What a config says of single layers: whose window is how wide, and how each rotates.

Knows the ways in which transformers configs say it, and no family by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.model.config_fields import ConfigFields
from octavo.model.rope import RopeSpec

Windows = tuple[int | None, ...]
Ropes = tuple[RopeSpec | None, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What other fields are read by."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int


def rope_parameters(fields: ConfigFields) -> dict[str, Any]:
    """Return `rope_parameters`, or `rope_scaling`, as it was called before."""
    # The older field wins where both stand, as in transformers.
    parameters = fields.raw("rope_parameters") or {}
    parameters = fields.raw("rope_scaling") or parameters
    if not isinstance(parameters, Mapping):
        raise fields.error("rope_parameters", parameters, "an object")
    return dict(parameters)


def one_rope(
    fields: ConfigFields, sizes: Sizes, *, theta: float | None = None, partial: float | None = None
) -> Ropes:
    """Return the rotation that all layers share.

    Args:
        fields: of the config.
        sizes: of the config.
        theta: where no field has it.
        partial: the part of a head that is rotated where no field has it; None where it must be
            all.
    """
    if partial is not None:
        partial = fields.number("partial_rotary_factor", partial)
    theta = fields.optional_number("rope_theta") or theta
    values = rope_parameters(fields)
    rope = RopeSpec.from_fields(values, sizes.head_dim, theta, sizes.max_len, partial)
    return (rope,) * sizes.num_layers


def ropes_by_type(
    fields: ConfigFields, sizes: Sizes, windows: Windows, theta: float, window_theta: float
) -> Ropes:
    """Return the rotations of layers without and with a window; each has parameters of its own."""
    nested = fields.raw("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(nested, Mapping) or not set(nested) <= set(kinds):
        raise fields.error("rope_parameters", nested, "an object of " + " and ".join(kinds))
    full, narrow = (nested.get(kind) or {"rope_type": "default"} for kind in kinds)
    if not isinstance(full, Mapping) or not isinstance(narrow, Mapping):
        raise fields.error("rope_parameters", nested, "an object for each kind of layer")
    scaling = fields.raw("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise fields.error("rope_scaling", scaling, "an object")
    wide = RopeSpec.from_fields({**full, **scaling}, sizes.head_dim, theta, sizes.max_len)
    near = RopeSpec.from_fields(narrow, sizes.head_dim, window_theta, sizes.max_len)
    return tuple(wide if window is None else near for window in windows)


def rotating_layers(fields: ConfigFields, sizes: Sizes) -> tuple[bool, ...]:
    """Return which layers rotate: `no_rope_layers` has 1 for one that does, despite its name."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.raw("no_rope_layers")
    if rotates is None:
        return tuple((index + 1) % interval != 0 for index in range(sizes.num_layers))
    is_known = isinstance(rotates, list) and all(own in (0, 1) for own in rotates)
    if not is_known or len(rotates) != sizes.num_layers:
        raise fields.error("no_rope_layers", rotates, f"{sizes.num_layers} times 0 or 1")
    return tuple(map(bool, rotates))


def full_windows(sizes: Sizes) -> Windows:
    """Return the windows of a model that has none."""
    return (None,) * sizes.num_layers


def same_windows(fields: ConfigFields, sizes: Sizes, absent: int | None) -> Windows:
    """Return the one `sliding_window` for all layers; null is none, and `absent` is said for it."""
    window = fields.raw("sliding_window", absent)
    return (None if window is None else checked_window(fields, window),) * sizes.num_layers


def optional_window(fields: ConfigFields) -> int | None:
    """Return `sliding_window` where `use_sliding_window` says that it counts."""
    window = fields.raw("sliding_window")
    return checked_window(fields, window) if fields.flag("use_sliding_window", False) else None


def windows_by_type(
    fields: ConfigFields, sizes: Sizes, window: int | None, absent: list[str]
) -> Windows:
    """Return the windows that `layer_types` names, `absent` being said for it; window: of some."""
    layer_types = fields.raw("layer_types")
    layer_types = absent if layer_types is None else layer_types
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    is_known = isinstance(layer_types, list) and all(
        isinstance(kind, str) and kind in kinds for kind in layer_types
    )
    if not is_known or len(layer_types) != sizes.num_layers:
        raise fields.error(
            "layer_types", layer_types, f"{sizes.num_layers} times one of {', '.join(kinds)}"
        )
    return tuple(kinds[kind] for kind in layer_types)


def late_windows(fields: ConfigFields, sizes: Sizes) -> Windows:
    """Return the windows of a model whose layers from `max_window_layers` on may have one."""
    window = optional_window(fields)
    count = sizes.num_layers
    first = fields.integer("max_window_layers") if window is not None else count
    names = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    return windows_by_type(fields, sizes, window, names)


def checked_window(fields: ConfigFields, window: Any) -> int:
    """Return a window, a positive number of tokens."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise fields.error("sliding_window", window, "a positive integer")
    return window
