"""Starts everything a model needs to serve; knows nothing of requests.

Apart from `service`, for it alone reaches down to checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config import EngineConfig
from octavo.engine_client import EngineClient
from octavo.engine_host import start_host
from octavo.local.demo_model import resolve_model
from octavo.model.loader import checkpoint_directory
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.pb_utils import PbUtils
from octavo.triton_model.service import Service


def load_service(config: EngineConfig, pb_utils: PbUtils, model: str, version: str) -> Service:
    """Load a model and its tokenizer, side by side, and begin to serve.

    `model` and `version` name it in Triton's metrics.

    Raises:
        ConfigError: it cannot be served; the message says why.
    """
    directory = str(checkpoint_directory(resolve_model(config.model)))
    resolved = replace(config, model=directory)
    client = EngineClient(lambda: start_host(resolved))
    try:
        tokenizer = Tokenizer.load(config.tokenizer or directory)
        client.wait_ready()
        return Service(client, tokenizer, pb_utils, EngineMetrics(pb_utils, model, version))
    except BaseException:
        client.close()
        raise
