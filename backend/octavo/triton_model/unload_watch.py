"""Finds out that Triton unloads a model, which hears of it only when its requests have ended.

Until then it says of the model that it is not ready, and that can be asked. Knows nothing of what
is done about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


class UnloadWatch:
    """Asks now and then; each question is a round trip to the server.

    Args:
        is_model_ready: asks Triton whether it takes requests for the model.
    """

    def __init__(self, is_model_ready: Callable[[], bool]) -> None:
        self._is_model_ready = is_model_ready
        self._ask_at_s = 0.0
        self._num_refusals = 0

    def sees_unload(self, now_s: float, is_serving: bool) -> bool:
        """Return whether Triton takes no more requests for a model that would serve them.

        Triton may have asked the model itself (from 26.03 on), which is why one that is not
        `is_serving` learns nothing here, and why two answers are needed.
        """
        if not is_serving:
            self._num_refusals = 0
        elif now_s >= self._ask_at_s:
            self._ask_at_s = now_s + INTERVAL_S
            self._num_refusals = 0 if self._is_ready() else self._num_refusals + 1
        return self._num_refusals > 1

    def _is_ready(self) -> bool:
        try:
            return self._is_model_ready()
        except Exception:
            logger.exception("Triton did not say whether the model is ready")
            return True
