"""Log-probabilities as clients read them: JSON, with each token as text.

Knows nothing of requests, or of where log-probabilities come from.
"""

from __future__ import annotations

import json

from octavo.request import TokenLogprobs
from octavo.text.tokenizer import Tokenizer

#: Stands for minus infinity, which JSON does not have; vLLM's and OpenAI's servers say the same.
LEAST_LOGPROB = -9999.0


def logprobs_json(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> str:
    """Return an object of what stands at one place: by token id, the token itself first."""
    return json.dumps(
        {
            str(each.token_id): {
                "logprob": max(each.logprob, LEAST_LOGPROB),
                "rank": each.rank,
                "decoded_token": tokenizer.token_text(each.token_id),
            }
            for each in logprobs
        }
    )
