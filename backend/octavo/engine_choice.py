"""Which engine serves a model: the one that pages KV, or the one of the traditional mode.

Knows nothing of how either works.
"""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.model.checkpoint import read_json
from octavo.model.families import FAMILIES
from octavo.model.location import checkpoint_directory
from octavo.static_engine.engine import StaticEngine

logger = logging.getLogger(__name__)


def load_chosen(config: EngineConfig) -> Engine:
    """Load the model that `config` names into the engine that suits it.

    Raises:
        ConfigError: the checkpoint, the device or the memory cannot be served.
        EngineError: a rank in another process is gone before it is loaded.
    """
    return StaticEngine(config) if _is_static(config) else Engine.load(config)


def _is_static(config: EngineConfig) -> bool:
    if config.model_impl != "auto":
        return config.model_impl == "static"
    directory = checkpoint_directory(
        config.model,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    model_type = read_json(directory / "config.json").get("model_type")
    if model_type in FAMILIES:
        return False
    logger.info("%s has no native code here, so the traditional mode serves it", model_type)
    return True
