"""What a model of transformers would ask of paged attention, found by one call without weights.

The model is made on torch's meta device and run over a few tokens: who calls the attention
interface, with what heads and which mask, is noted; a model that does anything that paged attention
does not is refused with the reason. Knows nothing of how weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from octavo.errors import NotPaged, first_line
from octavo.model.hf_config import read_hf_config
from octavo.model.row_independence import CallRecorder
from octavo.model.transformers_advice import silence_advice

_TRACED = "octavo_traced"
#: The attribute of a module that holds the list of its model's calls.
_CALLS = "octavo_traced_calls"
_NUM_TOKENS = 5
#: Positions that a mask is asked for where a config does not say how many there are.
_SOME_POSITIONS = 4096
#: What a call may say beside what paged attention reads: it changes nothing where weights are not
#: trained and no cache object is used.
_HARMLESS_ARGUMENTS = frozenset(
    """dropout position_ids cache_position use_cache output_attentions output_hidden_states
    output_router_logits logits_to_keep sliding_window is_causal scaling softcap s_aux
    return_dict""".split()
)


@dataclass(frozen=True, slots=True)
class TracedModel:
    """What is known of a model that can run over paged KV."""

    config: PreTrainedConfig
    architecture: str
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    """Per layer, in the order of `layer_idx`."""
    num_kv_heads: int
    head_dim: int
    layers: str
    """Name of the module that is everything before the vocabulary projection."""
    row_dependent: frozenset[str]
    """Names of modules that call torch's functions whose bits depend on the number of rows."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for a causal mask in the call of the attention interface."""

    window: int | None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention interface."""

    layer: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None


def trace_model(directory: Path, *, trust_remote_code: bool) -> TracedModel:
    """Return what the model of a checkpoint asks of paged attention; needs no weights.

    Raises:
        NotPaged: it cannot run over paged KV; the message says why.
        NotMade: transformers cannot read the config at all.
    """
    silence_advice()
    config = read_hf_config(directory, trust_remote_code=trust_remote_code)
    _check_config(config)
    model = _make_without_weights(config, trust_remote_code)
    recorder, calls = _run(model)
    _check_calls(type(model).__name__, calls, config.get_text_config().num_hidden_layers)
    max_len = _max_positions(config)
    if max_len is None:
        raise NotPaged("its config does not say how many positions it has")
    return TracedModel(
        config=config,
        architecture=type(model).__name__,
        max_position_embeddings=max_len,
        windows=tuple(call.window for call in calls),
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        layers=recorder.called_first[0],
        row_dependent=frozenset(recorder.row_dependent),
    )


def _run(model: PreTrainedModel) -> tuple[CallRecorder, list[_Call]]:
    """Run a model over a few tokens; return what it calls, calls of attention by their layers."""
    calls: list[_Call] = []
    for module in model.modules():
        setattr(module, _CALLS, calls)
    recorder = CallRecorder(model)
    try:
        with recorder, torch.no_grad(), torch.device("meta"):
            model(
                input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.int64),
                attention_mask=torch.ones(1, _NUM_TOKENS, dtype=torch.int64),
                position_ids=torch.arange(_NUM_TOKENS)[None],
                use_cache=False,
            )
    except NotPaged:
        raise
    except Exception as error:  # whatever the code of hundreds of models raises
        raise NotPaged(
            f"{type(model).__name__} does not run without weights and masks "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    return recorder, sorted(calls, key=lambda call: call.layer)


def _max_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a model has, if its config says so."""
    number = getattr(config.get_text_config(), "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None


def _check_config(config: PreTrainedConfig) -> None:
    """Refuse what a config alone says is not paged."""
    if config.is_encoder_decoder:
        raise NotPaged("it has an encoder beside its decoder")
    for name, rope in _rope_parameters(config):
        if rope == "longrope":
            raise NotPaged(
                f"{name} is longrope, with which the longest sequence of a step changes the others"
            )


def _rope_parameters(config: PreTrainedConfig) -> list[tuple[str, object]]:
    """Return the kinds of rotation that a config names, each with where it stands."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return []
    kinds = [("rope_type", parameters.get("rope_type"))]
    return kinds + [
        (f"rope_type of {layers}", values.get("rope_type"))
        for layers, values in parameters.items()
        if isinstance(values, Mapping)
    ]


def _make_without_weights(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=_TRACED,
                experts_implementation=_TRACED,
                trust_remote_code=trust_remote_code,
            )
    except KeyError as error:
        if error.args != (_TRACED,):
            raise NotPaged(f"transformers makes no causal model of it (no {error})") from None
        raise NotPaged(f"{config.model_type} has attention of its own, with no interface") from None
    except Exception as error:  # whatever the code of hundreds of models raises
        raise NotPaged(
            f"transformers makes no causal model of it ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from None
    named = config.architectures
    if named and named != [type(model).__name__]:
        raise NotPaged(f"its architecture is {', '.join(named)} and not {type(model).__name__}")
    return model.eval()


def _check_calls(name: str, calls: list[_Call], num_layers: int) -> None:
    layers = [call.layer for call in calls]
    if not layers or layers != list(range(num_layers)):
        calling = (
            f"but the attention interface is called by layers {layers}"
            if layers
            else "none of which calls the attention interface"
        )
        raise NotPaged(f"{name} has {num_layers} layers, {calling}: something else mixes tokens")
    shapes = {(call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}
    if len(shapes) > 1 or calls[0].head_dim != calls[0].value_dim:
        raise NotPaged(
            f"{name} has keys and values of uneven sizes (heads, key and value size: "
            f"{sorted(shapes)}), but all blocks hold the same"
        )


def _traced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Note a call of the attention interface, and return a result of the right shape."""
    where = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise NotPaged(f"{where} calls attention and does not say of which layer")
    strange = {
        name
        for name, value in arguments.items()
        if value is not None and value is not False and name not in _HARMLESS_ARGUMENTS
    }
    if strange:
        raise NotPaged(f"{where} gives attention {', '.join(sorted(strange))}, which is not paged")
    is_causal = arguments.get("is_causal")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise NotPaged(f"{where} is not causal")
    if attention_mask is not None and not isinstance(attention_mask, _Mask):
        raise NotPaged(f"{where} gives attention a mask of its own")
    # Transformers' own attention goes by the mask; where there is none, by the argument.
    window = attention_mask.window if attention_mask else arguments.get("sliding_window")
    sizes = (key.shape[1], key.shape[-1], value.shape[-1])
    getattr(module, _CALLS).append(_Call(int(layer), *sizes, window))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _traced_mask(
    *, mask_function: Callable[..., torch.Tensor], config: PreTrainedConfig, **_: object
) -> _Mask:
    """Return what the mask function of a layer says, if that is a window or all that came before.

    Raises:
        NotPaged: it says something else.
    """
    last = (_max_positions(config) or _SOME_POSITIONS) - 1
    sees = {row: _positions_seen(mask_function, row) for row in (last, last - 1, last // 2, 0)}
    window = len(sees[last])
    if any(seen != list(range(max(0, row + 1 - window), row + 1)) for row, seen in sees.items()):
        raise NotPaged("its mask is neither causal nor a sliding window")
    return _Mask(window if window <= last else None)


def _positions_seen(mask_function: Callable[..., torch.Tensor], row: int) -> list[int]:
    with torch.device("cpu"):
        zero = torch.tensor(0)
        columns = torch.arange(row + 2)
        mask = mask_function(zero, zero, torch.tensor(row), columns)
        return mask.expand(len(columns)).nonzero().flatten().tolist()


def _traced_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Return a result of the right shape by a product, as all experts have some."""
    size = hidden_states.shape[-1]
    return torch.nn.functional.linear(hidden_states, hidden_states.new_empty(size, size))


AttentionInterface.register(_TRACED, _traced_attention)
AttentionMaskInterface.register(_TRACED, _traced_mask)
ALL_EXPERTS_FUNCTIONS.register(_TRACED, _traced_experts)
