"""A model's vocabulary as llguidance takes it; knows nothing of grammars."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from llguidance import LLTokenizer

from octavo.errors import EngineError

logger = logging.getLogger(__name__)


def load_vocabulary(name: str, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Load the tokens of a checkpoint directory or hub id; takes seconds.

    `eos_token_ids` are allowed where an answer may end; without any, the tokenizer's own are.

    Raises:
        EngineError: there is no tokenizer that llguidance reads.
    """
    # Imported late: it takes seconds, which an engine that nobody asks for a form need not spend.
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer

    started_s = time.monotonic()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        vocabulary = from_tokenizer(tokenizer, eos_token=sorted(eos_token_ids) or None)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        logger.error("structured outputs have no vocabulary: %s", error)
        raise EngineError("structured_outputs need a tokenizer, and it cannot be loaded") from None
    logger.info("vocabulary for grammars ready in %.1f s", time.monotonic() - started_s)
    return vocabulary
