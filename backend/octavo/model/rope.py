"""Rotary position embedding: its parameters, and the table of cosines and sines made from them.

The frequencies are transformers' own, to the bit, computed once in float32. Knows nothing of the
rest of the model; the rotation itself is `octavo_kernels.apply_rope`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.model.config_fields import ConfigFields

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one rotary embedding; fields that its kind does not use keep their default."""

    dim: int
    """Leading entries of each head that are rotated, an even number."""
    theta: float
    kind: str = "default"
    """`dynamic` is not one: what it does begins past the context of the model."""
    factor: float = 1.0
    """How many times longer the context became by scaling."""
    original_max_len: int = 0
    """Context length before scaling, in tokens (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """What cosines and sines are multiplied by (yarn, longrope)."""
    short_factors: tuple[float, ...] = ()
    """What each wavelength is multiplied by in a context as it was before scaling (longrope)."""
    long_factors: tuple[float, ...] = ()
    """The same in a longer one."""

    @classmethod
    def from_fields(
        cls,
        values: Mapping[str, Any],
        head_dim: int,
        theta: float | None,
        max_len: int,
        partial: float | None = None,
    ) -> RopeSpec:
        """Read `rope_parameters`, or the older `rope_scaling` with `theta` from beside it.

        Args:
            values: the fields.
            head_dim: size of a head.
            theta: where the fields have none.
            max_len: the model's context, in tokens.
            partial: the part of a head that is rotated, where the fields do not say it; None where
                it must be all.

        Raises:
            ConfigError: the kind is not supported, or a field is missing, wrong or not understood.
        """
        fields = ConfigFields(values, "rope_parameters of the model config")
        older_name = fields.raw("type") or "default"
        kind = str(fields.raw("rope_type") or older_name)
        if kind not in _KINDS:
            raise fields.error("rope_type", kind, "one of " + ", ".join(_KINDS))
        part = fields.number("partial_rotary_factor", partial or 1.0)
        dim = int(head_dim * part)
        if (partial is None and part != 1.0) or not 2 <= dim <= head_dim or dim % 2:
            allowed = "all, and evenly many" if partial is None else "evenly many"
            raise ConfigError(
                f"the model config rotates {dim} of a head's {head_dim} entries but must rotate "
                f"{allowed} of them"
            )
        theta = fields.number("rope_theta", theta or _DEFAULT_THETA)
        if theta <= 1:
            raise fields.error("rope_theta", theta, "a number above 1")
        options = _scaling_options(kind, fields, max_len)
        # transformers writes the field for every kind it ever set; only some of them use it.
        fields.refuse_the_rest(harmless=("original_max_position_embeddings",))
        rope = cls(dim=dim, theta=theta, kind=kind, **options)
        return _unscaled(rope, max_len) if kind == "dynamic" else _checked_factors(rope, fields)


def rotary_table(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """Return cos_sin [num_positions, dim] float32: a row's cosines, then its sines.

    longrope has other frequencies past its original context: a table that reaches there has them
    for all positions, for a cache of rotated keys cannot change as its sequence grows.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, num_positions)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """Return the angle per position of each rotated pair, [dim / 2] float32."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    wavelengths = rope.theta**exponents
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths)
    if rope.kind == "longrope":
        is_long = num_positions > rope.original_max_len
        return 1.0 / (
            torch.tensor(rope.long_factors if is_long else rope.short_factors) * wavelengths
        )
    return (1.0 / wavelengths) / rope.factor


def _scaling_options(kind: str, fields: ConfigFields, max_len: int) -> dict[str, Any]:
    if kind == "default":
        return {}
    if kind == "longrope":
        return _longrope_options(fields, max_len)
    options: dict[str, Any] = {"factor": fields.number("factor")}
    if kind in ("linear", "dynamic"):
        return options
    options["original_max_len"] = fields.integer("original_max_position_embeddings", max_len)
    if kind == "llama3":
        options["low_freq_factor"] = fields.number("low_freq_factor")
        options["high_freq_factor"] = fields.number("high_freq_factor")
        return options
    options["beta_fast"] = fields.number("beta_fast", 32.0)
    options["beta_slow"] = fields.number("beta_slow", 1.0)
    options["truncate"] = fields.flag("truncate", True)
    options["attention_factor"] = _attention_factor(fields, options["factor"])
    return options


def _longrope_options(fields: ConfigFields, max_len: int) -> dict[str, Any]:
    original_max_len = fields.integer("original_max_position_embeddings", max_len)
    if original_max_len < 2:
        raise fields.error("original_max_position_embeddings", original_max_len, "at least 2")
    factor = fields.number("factor", max_len / original_max_len)
    attention_factor = fields.optional_number("attention_factor")
    if attention_factor is None:
        growth = 1 + math.log(factor) / math.log(original_max_len) if factor > 1.0 else 1.0
        attention_factor = math.sqrt(growth)
    return {
        "factor": factor,
        "original_max_len": original_max_len,
        "attention_factor": attention_factor,
        "short_factors": fields.numbers("short_factor"),
        "long_factors": fields.numbers("long_factor"),
    }


def _checked_factors(rope: RopeSpec, fields: ConfigFields) -> RopeSpec:
    """Return a rope whose lists are as long as it has pairs."""
    if rope.kind == "longrope":
        for name, factors in (
            ("short_factor", rope.short_factors),
            ("long_factor", rope.long_factors),
        ):
            if len(factors) != rope.dim // 2:
                raise fields.error(name, list(factors), f"{rope.dim // 2} numbers")
    return rope


def _unscaled(rope: RopeSpec, max_len: int) -> RopeSpec:
    """Return what a dynamic rope is within the model's context, in transformers' own rounding."""
    growth = (rope.factor * max_len / max_len) - (rope.factor - 1)
    theta = rope.theta * growth ** (rope.dim / (rope.dim - 2)) if rope.dim > 2 else rope.theta
    return RopeSpec(dim=rope.dim, theta=theta)


def _attention_factor(fields: ConfigFields, factor: float) -> float:
    given = fields.optional_number("attention_factor")
    scale, scale_all = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if given is not None:
        return given
    if scale and scale_all:
        return growth(scale) / growth(scale_all)
    return growth(1.0)


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep short waves, stretch long ones by `factor`, blend between."""
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_len
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / rope.factor, frequencies)
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    is_medium = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_medium, blended, scaled)


def _yarn(rope: RopeSpec, wavelengths: torch.Tensor) -> torch.Tensor:
    """Blend from kept to stretched frequencies along the dimensions between the two betas."""

    def dimension_of(num_rotations: float) -> float:
        span = rope.original_max_len / (num_rotations * 2 * math.pi)
        return (rope.dim * math.log(span)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
