"""Which engine serves a model: the one that pages KV, or the one of the traditional mode.

Knows nothing of how either works.
"""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import NotMade, NotPaged
from octavo.model.location import configured_checkpoint
from octavo.model.tiers import Tier, choose_tier, why_not_served
from octavo.static_engine.engine import StaticEngine

logger = logging.getLogger(__name__)


def load_chosen(config: EngineConfig) -> Engine:
    """Load the model that `config` names into the engine that suits it.

    Raises:
        ConfigError: the checkpoint, the device or the memory cannot be served.
        EngineError: a rank in another process is gone before it is loaded.
    """
    directory = configured_checkpoint(config)
    tier = choose_tier(directory, config)
    try:
        if tier.name != "static":
            try:
                return Engine.load(config)
            except NotPaged as error:
                tier = Tier("static", f"{tier.reason}; {error}")
        logger.info("the traditional mode serves %s: %s", directory, tier.reason)
        return StaticEngine(config)
    except NotMade as error:
        raise why_not_served(config, tier, error) from None
