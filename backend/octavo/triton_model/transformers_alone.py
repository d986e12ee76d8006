"""Loads transformers as it is where torch is not installed, for all that the stub asks of it.

transformers imports torch wherever it finds it, and so would take a second and 240 MB for every
stub; tokenizers and chat templates need none of it. Knows nothing of tokenizers.
"""

from __future__ import annotations

import logging
import sys


def import_transformers_alone() -> None:
    """Import transformers without torch, unless this process has imported either.

    transformers asks once whether there is torch, so it goes without for good. Who imports torch
    itself later, as code of a checkpoint may, gets it; while this runs no other thread may.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    logging.getLogger("transformers").addFilter(_is_no_news)
    # Python's own mark of a module that cannot be imported.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]


def _is_no_news(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
