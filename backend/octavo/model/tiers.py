"""Which of the three ways a checkpoint is served in, and why.

The native decoder is the fastest; any other causal model of transformers whose attention can be
replaced runs by its own code over the same KV blocks; what can do neither is left to the
traditional mode. No weights are read to choose. Knows what each way needs, not how it works.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotMade, NotPaged, shown
from octavo.model.families import FAMILIES
from octavo.model.image_models import IMAGE_MODELS
from octavo.model.interface import ServedModel
from octavo.model.loader import load_model, read_model_config, read_spec
from octavo.model.location import configured_checkpoint

if TYPE_CHECKING:
    from octavo.model.transformers_trace import TracedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tier:
    """How a checkpoint is served."""

    name: str
    """`native`, `transformers` or `static`."""
    reason: str
    """Why in no faster way, in words for the log."""
    traced: TracedModel | None = None
    """Of `transformers`: what its model asks of paged attention."""


def choose_tier(directory: Path, config: EngineConfig) -> Tier:
    """Return how a checkpoint is to be served, by option `model_impl` or the fastest way there is.

    Raises:
        ConfigError: it cannot be served at all, or not in the way that the options ask for.
    """
    wanted = config.model_impl
    values = read_model_config(directory, trust_remote_code=config.trust_remote_code)
    if wanted == "static":
        return Tier("static", "option model_impl is 'static'")
    refusal = None
    if wanted != "transformers":
        try:
            spec = read_spec(directory, trust_remote_code=config.trust_remote_code)
            return Tier("native", f"{spec.architecture} has a native decoder")
        except ConfigError as error:
            refusal = error
    why_not_native = str(refusal or "option model_impl is 'transformers'")
    for asked, what, otherwise in (
        (wanted == "native", "option model_impl is 'native'", "'auto' serves other models too"),
        (
            config.num_ranks > 1,
            f"{config.num_ranks} ranks take the native decoder",
            "serve it on one",
        ),
        (config.enable_lora, "option enable_lora takes the native decoder", "serve it without"),
    ):
        if asked:
            why = (
                f"which does not serve this model: {refusal}"
                if refusal
                else f"but {why_not_native}"
            )
            raise ConfigError(f"{what}, {why}; {otherwise}")
    reason = _native_refusal(values, refusal) if refusal else why_not_native
    return _not_native(directory, config, reason)


def _not_native(directory: Path, config: EngineConfig, reason: str) -> Tier:
    """Return which of the other ways a checkpoint is served in; `reason` is why not natively."""
    # Imported late: transformers' models take seconds, and a native decoder needs none of them.
    from octavo.model.transformers_trace import trace_model

    try:
        traced = trace_model(directory, trust_remote_code=config.trust_remote_code)
    except NotPaged as error:
        if config.model_impl == "transformers":
            raise ConfigError(f"option model_impl is 'transformers' but {error}") from None
        return Tier("static", f"{reason}; {error}")
    except NotMade as error:
        raise why_not_served(config, Tier("static", reason), error) from None
    return Tier("transformers", reason, traced)


def why_not_served(config: EngineConfig, tier: Tier, error: NotMade) -> ConfigError:
    """Return the error of a checkpoint that is served in no way: why not in each, native first."""
    if config.model_impl != "auto":
        return error
    return ConfigError(f"{config.model} is served in no way: {tier.reason}; {error}")


def _native_refusal(values: Mapping[str, Any], refusal: ConfigError) -> str:
    """Say why a model is not native, without the list of those that are, for a log line."""
    model_type = values.get("model_type")
    if model_type in (*FAMILIES, *IMAGE_MODELS):
        return f"the native decoder refuses it: {refusal}"
    return f"{shown(model_type)} is of no native family"


def load_served_model(config: EngineConfig) -> ServedModel:
    """Load the model an engine is configured for, by the native decoder or through transformers.

    Raises:
        NotPaged: it runs over paged KV in neither way, and no option asks for one of them.
        ConfigError: the checkpoint or the device cannot be served.
    """
    directory = configured_checkpoint(config)
    tier = choose_tier(directory, config)
    if tier.name == "native":
        return load_model(config)
    if tier.traced is None:
        raise NotPaged(f"{directory} cannot be served over paged KV: {tier.reason}")
    from octavo.model.transformers_loader import load_transformers_model

    try:
        model = load_transformers_model(config, directory, tier.traced)
    except NotPaged as error:
        if config.model_impl == "transformers":
            raise ConfigError(f"option model_impl is 'transformers' but {error}") from None
        raise
    logger.info(
        "%s runs by transformers' own code over paged KV: %s", tier.traced.architecture, tier.reason
    )
    return model
