"""Makes a service of a starting engine; apart from `service`, for it reaches down to checkpoints.

Knows nothing of requests.
"""

from __future__ import annotations

import os

from octavo.config import EngineConfig
from octavo.engine_client import EngineClient
from octavo.free_memory import release_free_memory
from octavo.local.demo_model import resolve_model
from octavo.model.location import checkpoint_directory
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.pb_utils import PbUtils
from octavo.triton_model.readiness_page import ReadinessPage, command_of, readiness_url
from octavo.triton_model.request_log import log_request
from octavo.triton_model.request_record import Reporter
from octavo.triton_model.service import Service


def make_service(
    client: EngineClient,
    config: EngineConfig,
    pb_utils: PbUtils,
    model: str,
    version: str,
    reporters: tuple[Reporter, ...] = (),
) -> Service:
    """Load the tokenizer while the engine starts, wait for it, and begin to serve.

    `model` and `version` name the model in Triton's metrics. `reporters` are told of every request,
    beside the metrics and the log.

    Raises:
        ConfigError: engine or tokenizer cannot be loaded; the message says why.
    """
    trust = config.trust_remote_code
    directory = checkpoint_directory(
        resolve_model(config.model), trust_remote_code=trust, allow_pickle=config.allow_pickle
    )
    tokenizer = Tokenizer.load(config.tokenizer or str(directory), trust_remote_code=trust)
    # What its file is parsed into takes more memory than what is made of that.
    release_free_memory()
    client.wait_ready()
    metrics = EngineMetrics(pb_utils, model, version)
    logs = (log_request,) if config.log_requests else ()
    told = (metrics.report, *logs, *reporters)
    service = Service(client, tokenizer, pb_utils, metrics, told, config)
    url = readiness_url(command_of(os.getppid()), model, version)
    if url is not None:
        service.watch_unloads(ReadinessPage(url).is_refusing)
    return service
