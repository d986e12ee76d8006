"""How configs say which layers have a mixture of experts, and of what kind.

Knows the ways in which transformers configs say it, and no family by name.
"""

from __future__ import annotations

from octavo.model.config_fields import ConfigFields
from octavo.model.layer_kinds import Sizes
from octavo.model.spec import ExpertSpec

#: Of all layers together, far beyond any model: names are made for each before a tensor is seen.
_MOST_EXPERTS = 2**17


def experts_of_all_layers(
    fields: ConfigFields, sizes: Sizes, *, inner: int, normalizes: bool
) -> ExpertSpec:
    """Return experts that stand for the MLP of every layer.

    Args:
        fields: of the config.
        sizes: of the config.
        inner: inner columns of an expert.
        normalizes: whether the probabilities of a token's experts are made to add up to one.
    """
    # Either name may be written: transformers takes one for the other.
    other = fields.raw("num_local_experts")
    most = _MOST_EXPERTS // sizes.num_layers
    num_experts = fields.integer("num_experts", other, most=most)
    if other is not None and other != num_experts:
        raise fields.error("num_local_experts", other, f"num_experts, {num_experts}")
    count = fields.integer("num_experts_per_tok")
    if count > num_experts:
        raise fields.error(
            "num_experts_per_tok", count, f"at most the {num_experts} experts there are"
        )
    return ExpertSpec(
        num_experts=num_experts,
        experts_per_token=count,
        intermediate_size=inner,
        normalizes_weights=normalizes,
        layers=(True,) * sizes.num_layers,
    )


def sparse_layers(fields: ConfigFields, sizes: Sizes) -> tuple[bool, ...]:
    """Return which layers have experts: every `decoder_sparse_step`-th one that is not excepted."""
    step = fields.integer("decoder_sparse_step", 1)
    excepted = fields.raw("mlp_only_layers") or []
    layers = range(sizes.num_layers)
    # Numbers past the last layer name none, as in transformers.
    if not isinstance(excepted, list) or not all(type(index) is int for index in excepted):
        raise fields.error("mlp_only_layers", excepted, "a list of layers")
    return tuple(index not in excepted and (index + 1) % step == 0 for index in layers)
