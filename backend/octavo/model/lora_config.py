"""What a PEFT `adapter_config.json` says, of plain LoRA on linear layers; all else is refused.

Modules are named as in the model: `model.layers.0.self_attn.q_proj`; or as in one that reads images
too, whose text the model is. Knows nothing of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, shown
from octavo.model.checkpoint import read_json
from octavo.model.config_fields import ConfigFields
from octavo.model.text_tensors import text_name

#: What would change an answer, and is not computed here.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias of the adapter's own",
    "modules_to_save": "a module that is replaced as a whole",
    "trainable_token_indices": "an embedding that is changed",
    "target_parameters": "a parameter that is no linear layer",
    "layer_replication": "a layer that is there more than once",
    "alora_invocation_tokens": "an adapter that begins within a prompt",
}
#: Bookkeeping and training, or what the names of the tensors say too.
_HARMLESS = frozenset(
    """auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_dropout
    megatron_core peft_version qalora_group_size revision target_modules task_type""".split()
)
#: What leaves out some of the modules that are named.
_PARTIAL = ("exclude_modules", "layers_to_transform")
#: How adapters may have begun; others begin by taking something out of the model's own weights.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
_NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and factors of one adapter."""

    rank: int
    alpha: float
    by_root: bool
    """Whether the factor is alpha / sqrt(rank), not alpha / rank (rsLoRA)."""
    ranks: tuple[tuple[str, int], ...]
    """Those of modules that differ: the first whose name or last parts are as here."""
    alphas: tuple[tuple[str, float], ...]
    """The same."""
    targets: tuple[str, ...] | None
    """Names or last parts of all that is adapted; None where the file says it in another way."""

    @classmethod
    def read(cls, path: Path) -> LoraConfig:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, or says what is not supported or not understood.
        """
        values = read_json(path)
        for name, what in _UNSUPPORTED.items():
            if values.pop(name, None):
                raise ConfigError(f"{path} has {name}, but {what} is not supported")
        fields = ConfigFields(values, str(path))
        fields.choice("peft_type", ("LORA",))
        fields.choice("bias", ("none",), "none")
        beginning = fields.raw("init_lora_weights", True)
        if beginning not in _BEGINNINGS:
            allowed = "one of " + ", ".join(str(each).lower() for each in _BEGINNINGS)
            raise fields.error("init_lora_weights", beginning, allowed)
        config = cls(
            rank=fields.integer("r"),
            alpha=fields.number("lora_alpha"),
            by_root=fields.flag("use_rslora", False),
            ranks=tuple((name, int(rank)) for name, rank in _pattern(fields, "rank_pattern")),
            alphas=_pattern(fields, "alpha_pattern"),
            targets=_targets(values),
        )
        fields.refuse_the_rest(_HARMLESS)
        return config

    def rank_of(self, module: str) -> int:
        """Return the rank that a module's matrices have."""
        return next((rank for name, rank in self.ranks if _is_named(module, name)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of what is added to a module's output."""
        alpha = next((each for name, each in self.alphas if _is_named(module, name)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def targeted(self, modules: Iterable[str]) -> list[str] | None:
        """Return those of a model's modules that are adapted, or None if that is not said here."""
        targets = self.targets
        if targets is None:
            return None
        return [each for each in modules if any(_is_named(each, name) for name in targets)]


def _targets(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    targets = values.get("target_modules")
    is_partial = any(values.get(name) not in (None, []) for name in _PARTIAL)
    if is_partial or not isinstance(targets, list):
        return None
    names = (text_name(str(target)) for target in targets)
    return tuple(name for name in names if name is not None)


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _pattern(fields: ConfigFields, name: str) -> tuple[tuple[str, float], ...]:
    """Return a field of numbers by names of modules.

    Names may be regular expressions, in theory; such a one may take forever, and tools write names.
    """
    values = fields.raw(name) or {}
    if not isinstance(values, Mapping):
        raise fields.error(name, values, "an object")
    pairs = []
    for key, value in values.items():
        module = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not _NAME.fullmatch(module):
            raise fields.error(name, key, "names of modules, not regular expressions")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise fields.error(f"{name} of {shown(key)}", value, "a positive number")
        name_of_text = text_name(module)
        if name_of_text is not None:
            pairs.append((name_of_text, float(value)))
    return tuple(pairs)
