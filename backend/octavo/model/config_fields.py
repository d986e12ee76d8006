"""Reads a transformers config so that no field is guessed and none is overlooked.

Every field is taken by name and type. What nobody took must be known to be harmless, or empty; all
else is refused, for a field that is not understood may change what the model computes. Knows
nothing of any particular model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.errors import ConfigError, shown

_MOST = 2**31 - 1
_MOST_FLOAT = 1e300
_ABSENT = object()

#: Bookkeeping, training and generation fields: none changes a logit of the forward pass.
HARMLESS_FIELDS = frozenset(
    """_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path
    attention_dropout auto_map bos_token_id cache_implementation chunk_size_feed_forward
    embd_pdrop hidden_dropout id2label initializer_range is_llama_config label2id
    max_window_layers model_max_length output_attentions output_hidden_states
    output_router_logits pad_token_id pretraining_tp resid_pdrop residual_dropout return_dict
    router_aux_loss_coef router_jitter_noise sep_token_id task_specific_params tokenizer_class
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache""".split()
)


class ConfigFields:
    """The fields of one JSON object, each taken once.

    `where` names the object in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._rest = dict(values)
        self._where = where

    def has(self, name: str) -> bool:
        """Tell whether the field is there, not taken yet, and not null."""
        return self._rest.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """Take a field as it is, null included; `default` when it is absent."""
        return self._rest.pop(name, default)

    def integer(self, name: str, default: int | None = None, *, most: int = _MOST) -> int:
        """Take an integer from 1 to `most`; without a default the field must be there."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive integer")
        if value > most:
            raise self.error(name, value, f"at most {most:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Take a positive number; without a default the field must be there."""
        value = self._value(name, default)
        if not _is_positive(value):
            raise self.error(name, value, "a positive number")
        return float(value)

    def optional_number(self, name: str, absent: float | None = None) -> float | None:
        """Take a positive number, or None when the field is null; `absent` when there is none."""
        if self.has(name):
            return self.number(name)
        return None if self._rest.pop(name, _ABSENT) is None else absent

    def numbers(self, name: str) -> tuple[float, ...]:
        """Take a list of positive numbers, which must be there."""
        values = self._value(name, None)
        if not isinstance(values, list) or not values:
            raise self.error(name, values, "a list of positive numbers")
        if not all(map(_is_positive, values)):
            raise self.error(name, values, "a list of positive numbers")
        return tuple(map(float, values))

    def only(self, name: str, allowed: float) -> None:
        """Take a field that may be absent or null, and else has this one value."""
        value = self._value(name, allowed)
        if value != allowed:
            raise self.error(name, value, f"{allowed}")

    def flag(self, name: str, default: bool) -> bool:
        """Take true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Iterable[str], default: str | None = None) -> str:
        """Take one of the allowed words; without a default the field must be there."""
        value = self._value(name, default)
        words = tuple(allowed)
        if value not in words:
            raise self.error(name, value, "one of " + ", ".join(words))
        return str(value)

    def refuse_the_rest(self, harmless: Iterable[str] = ()) -> None:
        """Refuse fields that nobody took, unless they are harmless, null, false or empty."""
        known = set(harmless)
        for name, value in self._rest.items():
            if name in known or value is None or value is False or value in ("", [], {}):
                continue
            raise ConfigError(
                f"{self._where} has {name} = {shown(value)}, which is not understood; "
                "remove it if it does not change what the model computes"
            )

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        """Return the error for a field with a wrong value."""
        return ConfigError(f"{self._where} has {name} = {shown(value)} but must have {allowed}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._rest.pop(name, None)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self._where} has no {name}, which is needed")
        return value


def _is_positive(value: Any) -> bool:
    """Tell whether a value of JSON, which may be Infinity, is a positive number and finite."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST_FLOAT
    )
