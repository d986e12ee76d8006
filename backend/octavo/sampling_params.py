"""How one request wants its tokens drawn and when it ends; validated once, frozen after.

Knows nothing of the server, tokenizers or tensors.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.request_keys import check_range, read_json, read_value, refused
from octavo.scheduling_params import SCHEDULING_KEYS
from octavo.structured_outputs import StructuredOutputs

MAX_N = 128
MAX_BEAM_WIDTH = 64
MAX_STOP_STRINGS = 256
#: Characters of all stop strings together: looking for them takes memory and time for each.
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 16_384
MAX_BIASED_TOKENS = 4096
#: Of all tokens of a prompt together: they are held as text until the first response.
MAX_PROMPT_LOGPROBS = 262_144

#: How many items a list or an object may have, and what they are.
_MOST_ITEMS = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "bad_words": (MAX_BAD_WORDS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logit_bias": (MAX_BIASED_TOKENS, "tokens"),
}

_INT32_MAX = 2**31 - 1
_POSITIVE = f"an integer from 1 to {_INT32_MAX:,}"

#: What may stand beside beams of keys that would change nothing of them, or their scores; and how
#: a message says it.
_VALUES_WITH_BEAMS: dict[str, tuple[tuple[object, ...], str]] = {
    "temperature": ((0.0, 1.0), "0 or 1"),
    "top_k": ((0, -1), "0 or -1"),
    "top_p": ((1.0,), "1"),
    "min_p": ((0.0,), "0"),
    "repetition_penalty": ((1.0,), "1"),
    "presence_penalty": ((0.0,), "0"),
    "frequency_penalty": ((0.0,), "0"),
    **dict.fromkeys(("logit_bias", "bad_words", "stop"), (((),), "absent")),
    **dict.fromkeys(("allowed_token_ids", "structured_outputs", "seed"), ((None,), "absent")),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request; numbers may be given as strings, lists as one item.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range.
    """

    n: int = 1
    """Answers to one prompt, each with random numbers of its own."""
    beam_width: int = 1
    """Above 1, the n best answers that a beam search finds, the best first; all at the end."""
    length_penalty: float = 1.0
    """Beams' scores are divided by their lengths to this power: above 0 favours long answers."""
    temperature: float = 1.0
    """0 takes the most likely token; higher is more random. At least 0."""
    top_k: int = 0
    """Draw among the k most likely tokens; 0 or -1 means all."""
    top_p: float = 1.0
    """Draw among the fewest tokens whose probabilities reach this sum. In (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one. In [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0 of tokens of prompt and answer, and multiplies those below."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer holds. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit each time that the answer holds it. In [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to logits, by token id; given as an object. Each in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are drawn. Absent: all."""
    bad_words: tuple[str, ...] = ()
    """Never generated as the tokenizer spells them, with and without a leading space."""
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
    logprobs: int | None = None
    """Report how likely each new token was by the model's own distribution, and that many of the
    likeliest tokens beside; 0 to `max_logprobs`."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first. The prompt is then always computed."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer must have; given as an object with one of the keys `json`, `regex`,
    `choice`, `grammar` and `json_object`."""
    lora_name: str | None = None
    """Answer with this adapter, one that the server has loaded. Absent: the model alone."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _read(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        check_range("n", self.n, 1, MAX_N, f"an integer from 1 to {MAX_N}")
        check_range("temperature", self.temperature, 0.0, 1e6, "a number in [0, 1,000,000]")
        check_range("top_k", self.top_k, -1, _INT32_MAX, f"-1 or 0 (all) or {_POSITIVE}")
        check_range("top_p", self.top_p, math.ulp(0.0), 1.0, "a number in (0, 1]")
        check_range("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        # Bounded on both sides so that no logit becomes infinite.
        allowed = "a number in [0.000001, 1,000,000]"
        check_range("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, allowed)
        for key in ("presence_penalty", "frequency_penalty"):
            check_range(key, getattr(self, key), -2.0, 2.0, "a number in [-2, 2]")
        if self.seed is not None:
            check_range("seed", self.seed, -(2**63), 2**63 - 1, "a signed 64-bit integer")
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 1, _INT32_MAX, _POSITIVE)
        limit = _INT32_MAX if self.max_tokens is None else self.max_tokens
        check_range("min_tokens", self.min_tokens, 0, limit, f"an integer in [0, {limit:,}]")
        for key in ("logprobs", "prompt_logprobs"):
            if getattr(self, key) is not None:
                check_range(key, getattr(self, key), 0, _INT32_MAX, "an integer of at least 0")
        _check_strings("stop", self.stop, MAX_STOP_CHARACTERS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORD_CHARACTERS)
        self._check_listed_tokens()
        self._check_beams()

    def _check_beams(self) -> None:
        allowed = f"an integer from 1 to {MAX_BEAM_WIDTH}"
        check_range("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH, allowed)
        # Bounded so that no power of a length is 0 or infinite.
        check_range("length_penalty", self.length_penalty, -10.0, 10.0, "a number in [-10, 10]")
        if self.beam_width == 1:
            if self.length_penalty != 1.0:
                raise refused("length_penalty", self.length_penalty, "1 where beam_width is 1")
            return
        allowed = f"an integer from 1 to {self.beam_width} (beam_width)"
        check_range("n", self.n, 1, self.beam_width, allowed)
        for key, (values, allowed) in _VALUES_WITH_BEAMS.items():
            value = getattr(self, key)
            if value not in values:
                raise refused(key, value, f"{allowed} where beam_width is above 1")

    def _check_listed_tokens(self) -> None:
        if self.allowed_token_ids == ():
            raise InvalidRequest("allowed_token_ids has 0 ids but must have at least 1")
        for key, ids in self._listed_token_ids().items():
            for token_id in (min(ids, default=0), max(ids, default=0)):
                check_range(key, token_id, 0, _INT32_MAX, f"token ids in [0, {_INT32_MAX:,}]")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias has {shown(bias)} for {token_id} "
                    "but must have numbers in [-100, 100]"
                )

    def _listed_token_ids(self) -> dict[str, tuple[int, ...]]:
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
        }

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse what names a token that the model does not have.

        Raises:
            InvalidRequest: names the key, the id and what is allowed.
        """
        allowed = f"an integer from 1 to {vocab_size} (the vocabulary)"
        check_range("beam_width", self.beam_width, 1, vocab_size, allowed)
        for key, ids in self._listed_token_ids().items():
            highest = max(ids, default=0)
            if highest >= vocab_size:
                raise InvalidRequest(f"{key} has {highest} but token ids are 0 to {vocab_size - 1}")

    def check_logprobs(self, num_prompt_tokens: int, max_logprobs: int) -> None:
        """Refuse more log-probabilities than an engine reports of a token, or of a prompt.

        Raises:
            InvalidRequest: names the key, the value and what is allowed.
        """
        allowed = f"an integer from 0 to {max_logprobs} (max_logprobs)"
        for key in ("logprobs", "prompt_logprobs"):
            check_range(key, getattr(self, key) or 0, 0, max_logprobs, allowed)
        if self.prompt_logprobs is None:
            return
        if num_prompt_tokens * (1 + self.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs} and the prompt has "
                f"{num_prompt_tokens:,} tokens, but tokens * (prompt_logprobs + 1) may be at most "
                f"{MAX_PROMPT_LOGPROBS:,}; ask for fewer or shorten it"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, or beams of the most likely."""
        return self.temperature == 0.0 or self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once."""
        return max(self.n, self.beam_width)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before."""
        given = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return given != (1.0, 0.0, 0.0)

    def resolve(self, room: int, default_max_tokens: int) -> SamplingParams:
        """Return a copy with `max_tokens` and `seed` set, of at most `room` tokens."""
        wanted = default_max_tokens if self.max_tokens is None else self.max_tokens
        seed = self.seed
        if seed is None and self.beam_width == 1:
            seed = secrets.randbits(63)
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
        for key in values:
            if key not in _KNOWN:
                raise InvalidRequest(_unknown_key(key[:64]))
        return cls(**{key: values[key] for key in _KEYS if values.get(key) is not None})


def _read(key: str, kind: str, value: object) -> object:
    if kind == "StructuredOutputs | None":
        return None if value is None else StructuredOutputs.from_value(key, value)
    if key == "logit_bias" and isinstance(value, str):
        value = read_json(key, value)
    # Before they are read, which takes a microsecond each.
    most, what = _MOST_ITEMS.get(key, (0, ""))
    if most and isinstance(value, Collection) and not isinstance(value, str) and len(value) > most:
        raise InvalidRequest(f"{key} has {len(value):,} {what} but at most {most:,} are allowed")
    return read_value(key, kind, value)


def _check_strings(key: str, strings: tuple[str, ...], most_characters: int) -> None:
    if "" in strings:
        raise InvalidRequest(f"{key} has an empty string but each must have a character")
    num_characters = sum(map(len, strings))
    if num_characters > most_characters:
        raise InvalidRequest(
            f"{key} has {num_characters:,} characters in all but at most "
            f"{most_characters:,} are allowed"
        )


def _unknown_key(key: str) -> str:
    nearest = difflib.get_close_matches(key, _KNOWN, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown sampling parameter {key!r}{hint} (known: {', '.join(_KNOWN)})"


#: What a request may name, of these and in all.
_KEYS = sorted(field.name for field in fields(SamplingParams))
_KNOWN = sorted([*_KEYS, *SCHEDULING_KEYS])
