"""The limits that docs/security.md tells are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.config import EngineConfig
from octavo.sampling_params import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_BIASED_TOKENS,
    MAX_N,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from octavo.scheduling_params import MAX_NAME_LENGTH
from octavo.structured_outputs import MAX_BYTES, MAX_CHOICES
from octavo.text.chat_messages import MAX_ITEMS
from octavo.triton_model.admission import ALWAYS_TOKENIZED
from octavo.triton_model.arrival import MAX_CONTEXT_LENGTH, MAX_ID_LENGTH
from octavo.triton_model.codec import MAX_ERROR_LENGTH
from octavo.triton_model.prompt_threads import HUGE_PROMPT, LONG_PROMPT, MAX_WAITING_LENGTH
from octavo.triton_model.tensor_values import MAX_PARAMETERS_LENGTH

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
LIMITS = {
    "`text_input`, `messages`, `input_ids` (4 bytes each)": [EngineConfig("demo").max_prompt_bytes],
    "text, also after the chat template": [ALWAYS_TOKENIZED],
    "prompt and answer": [],
    "`sampling_parameters`, or the request's own parameters": [MAX_PARAMETERS_LENGTH],
    "messages, tools, documents, or parts of a message": [MAX_ITEMS],
    "`stop`": [MAX_STOP_STRINGS, MAX_STOP_CHARACTERS],
    "`bad_words`": [MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS],
    "`stop_token_ids`": [MAX_STOP_TOKEN_IDS],
    "`logit_bias`": [MAX_BIASED_TOKENS],
    "`allowed_token_ids`": [],
    "`n`": [MAX_N],
    "`beam_width`": [MAX_BEAM_WIDTH],
    "`logprobs`, `prompt_logprobs`": [],
    "log-probabilities of a prompt": [MAX_PROMPT_LOGPROBS],
    "`structured_outputs`": [MAX_BYTES, MAX_CHOICES],
    "`tenant`, `cache_salt`": [MAX_NAME_LENGTH],
    "the protocol's request id": [MAX_ID_LENGTH],
    "trace context": [MAX_CONTEXT_LENGTH],
    "an error's message": [MAX_ERROR_LENGTH],
}


def _numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\b\d[\d,]*\b", text)]


def test_the_table_of_limits_is_that_of_the_code() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| what | at most |\n|---|---|\n")[1]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", table.split("\n\n")[0], re.M)
    assert {name: _numbers(limit) for name, limit in rows} == LIMITS


def test_the_limits_of_what_waits_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (paragraph,) = re.findall(r"^Long prompts are(?:.+\n)+", text, re.M)
    for limit in (LONG_PROMPT, HUGE_PROMPT, MAX_WAITING_LENGTH):
        assert f"{limit:,} characters" in paragraph or f"{limit:,}." in paragraph
