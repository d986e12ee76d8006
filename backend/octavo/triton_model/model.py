"""The class Triton's Python backend looks for; it starts, feeds and stops a `Service`.

Knows nothing of how requests are read or answered.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from octavo.config import EngineConfig
from octavo.engine_client import EngineClient
from octavo.engine_host import start_host
from octavo.errors import ConfigError
from octavo.process_log import set_up_logging
from octavo.triton_model.codec import complete_config
from octavo.triton_model.options import read_config
from octavo.triton_model.shared_memory import keep_own_shared_memory_private
from octavo.triton_model.stray_variables import stray_variables
from octavo.triton_model.transformers_alone import import_transformers_alone

if TYPE_CHECKING:
    from octavo.triton_model.service import Service
    from octavo.triton_model.tracing import RequestTracer

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """One instance of a model in a Triton server."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Make the model decoupled and add every tensor that config.pbtxt does not name."""
        complete_config(auto_complete_model_config)
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model and wait until it can serve.

        Raises:
            ConfigError: it cannot; Triton shows the message and refuses the load.
        """
        config = read_config(args, os.environ)
        set_up_logging(config.log_format, "stub")
        for warning in stray_variables(os.environ):
            logger.warning(warning)
        keep_own_shared_memory_private()
        name, version = args["model_name"], args["model_version"]
        self._tracer = _load_tracer(config, name)
        # A thread cannot be ended, so a silent one is waited for.
        step_timeout_s = config.step_timeout_s if config.engine_process else math.inf
        client = EngineClient(functools.partial(start_host, config), step_timeout_s)
        try:
            # Imported late: it takes seconds, in which the engine starts already; and Triton
            # imports this file also just to complete the configuration.
            if config.engine_process:
                import_transformers_alone()
            from octavo.triton_model.loading import make_service

            told = () if self._tracer is None else (self._tracer,)
            self._service: Service = make_service(client, config, pb_utils, name, version, told)
        except BaseException:
            client.close(timeout_s=0.0)
            self._close_tracer()
            raise

    def execute(self, requests: list[Any]) -> None:
        """Hand requests over and return at once; every answer comes from another thread."""
        for request in requests:
            self._service.accept(request)

    def is_ready(self) -> bool:
        """Tell Triton (26.03 and later) whether the engine runs."""
        return self._service.is_ready

    def finalize(self) -> None:
        """Let running requests finish for `drain_timeout_s`, end the rest, and leave nothing."""
        self._service.close()
        self._close_tracer()

    def _close_tracer(self) -> None:
        if self._tracer is not None:
            self._tracer.close()


def _load_tracer(config: EngineConfig, model: str) -> RequestTracer | None:
    """Return what makes spans of requests, or None if nobody is to get them."""
    if config.otlp_endpoint is None:
        return None
    try:
        from octavo.triton_model.tracing import make_tracer
    except ImportError as error:
        raise ConfigError(
            f"option otlp_endpoint is set but OpenTelemetry is not installed ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, "
            "or leave the option out"
        ) from None
    return make_tracer(config.otlp_endpoint, model)
