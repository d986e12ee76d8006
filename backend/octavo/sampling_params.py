"""How one request wants its tokens drawn and when it ends; validated once, frozen after.

Knows nothing of the server, tokenizers or tensors.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from octavo.errors import InvalidRequest
from octavo.request_keys import check_range, read_value
from octavo.scheduling_params import SCHEDULING_KEYS

MAX_N = 128
MAX_STOP_STRINGS = 256
#: Characters of all stop strings together: looking for them takes memory and time for each.
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 256

_INT32_MAX = 2**31 - 1
_POSITIVE = f"an integer from 1 to {_INT32_MAX:,}"

#: Keys of the contract that a later version will take; refused rather than ignored.
UNSUPPORTED_KEYS = frozenset(
    """repetition_penalty presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words
    logprobs prompt_logprobs structured_outputs lora_name beam_width length_penalty""".split()
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request; numbers may be given as strings, lists as one item.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range.
    """

    n: int = 1
    """Answers to one prompt, each with random numbers of its own."""
    temperature: float = 1.0
    """0 takes the most likely token; higher is more random. At least 0."""
    top_k: int = 0
    """Draw among the k most likely tokens; 0 or -1 means all."""
    top_p: float = 1.0
    """Draw among the fewest tokens whose probabilities reach this sum. In (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one. In [0, 1]."""
    seed: int | None = None
    """64-bit signed; the same seed gives the same tokens. Absent: drawn at random."""
    max_tokens: int | None = None
    """Tokens to generate at most. Absent: the room left, bounded by `default_max_tokens`."""
    min_tokens: int = 0
    """End-of-text, stop ids and stop strings are ignored before this many tokens."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with any of these ids."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-text ids."""
    include_stop_str_in_output: bool = False
    """The text ends with the stop string, or with the text of the token that ended it."""
    skip_special_tokens: bool = True
    """Special tokens, such as end-of-text, give no text."""
    spaces_between_special_tokens: bool = True
    """Keep the space that some tokenizers put between two special tokens, if these give text."""
    return_logprob: bool = False
    """Report the log-probability of each sampled token (before temperature and filters)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = read_value(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        check_range("n", self.n, 1, MAX_N, f"an integer from 1 to {MAX_N}")
        check_range("temperature", self.temperature, 0.0, 1e6, "a number in [0, 1,000,000]")
        check_range("top_k", self.top_k, -1, _INT32_MAX, f"-1 or 0 (all) or {_POSITIVE}")
        check_range("top_p", self.top_p, math.ulp(0.0), 1.0, "a number in (0, 1]")
        check_range("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        if self.seed is not None:
            check_range("seed", self.seed, -(2**63), 2**63 - 1, "a signed 64-bit integer")
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 1, _INT32_MAX, _POSITIVE)
        limit = _INT32_MAX if self.max_tokens is None else self.max_tokens
        check_range("min_tokens", self.min_tokens, 0, limit, f"an integer in [0, {limit:,}]")
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(self.stop):,} strings but at most {MAX_STOP_STRINGS} are allowed"
            )
        if "" in self.stop:
            raise InvalidRequest("stop has an empty string but each must have a character")
        num_characters = sum(map(len, self.stop))
        if num_characters > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has {num_characters:,} characters in all but at most "
                f"{MAX_STOP_CHARACTERS:,} are allowed"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids):,} ids "
                f"but at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token_id in self.stop_token_ids:
            check_range(
                "stop_token_ids", token_id, 0, _INT32_MAX, f"token ids in [0, {_INT32_MAX:,}]"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def resolve(
        self, num_prompt_tokens: int, max_model_len: int, default_max_tokens: int
    ) -> SamplingParams:
        """Return a copy with `max_tokens` and `seed` set, bounded by the room in the context."""
        room = max_model_len - num_prompt_tokens
        wanted = default_max_tokens if self.max_tokens is None else self.max_tokens
        seed = secrets.randbits(63) if self.seed is None else self.seed
        # A prompt that leaves no room is refused by the scheduler, with a better message.
        max_tokens = max(1, min(wanted, room))
        return replace(
            self, max_tokens=max_tokens, seed=seed, min_tokens=min(self.min_tokens, max_tokens)
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from request keys, leaving out those of `SchedulingParams`, which stand beside.

        A key of None counts as absent.

        Raises:
            InvalidRequest: a value is wrong, or a key is of neither kind.
        """
        for key, value in values.items():
            if key in UNSUPPORTED_KEYS and value is not None:
                raise InvalidRequest(f"sampling parameter {key!r} is not supported yet")
            if key not in _KNOWN and key not in UNSUPPORTED_KEYS:
                raise InvalidRequest(_unknown_key(key[:64]))
        return cls(**{key: values[key] for key in _KEYS if values.get(key) is not None})


def _unknown_key(key: str) -> str:
    nearest = difflib.get_close_matches(key, _KNOWN, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown sampling parameter {key!r}{hint} (known: {', '.join(_KNOWN)})"


#: What a request may name, of these and in all.
_KEYS = sorted({field.name for field in fields(SamplingParams)} - {"return_logprob"})
_KNOWN = sorted([*_KEYS, *SCHEDULING_KEYS])
