"""From a decoded request to one the engine can run: prompt to ids, limits, resolved parameters.

Knows nothing of tensors or threads.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from octavo.adapter import check_adapter_name
from octavo.errors import InvalidRequest, PromptTooLong
from octavo.request import EngineInfo, Request
from octavo.sampling_params import SamplingParams
from octavo.text.bad_words import bad_words_token_ids
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.exchange import Arrival, DecodedRequest, ResponseOptions
from octavo.triton_model.live_request import LiveRequest
from octavo.triton_model.pb_utils import ResponseSender

#: Characters of a prompt whose tokens are always counted: it takes less than a second.
ALWAYS_TOKENIZED = 1_048_576

# Clients choose their own request ids, so these cannot name requests to the engine.
_ids = itertools.count()


def admit(
    decoded: DecodedRequest,
    sender: ResponseSender,
    tokenizer: Tokenizer,
    info: EngineInfo,
    arrival: Arrival,
) -> LiveRequest:
    """Build the request for the engine and the state that waits for its tokens.

    The request's deadline counts from its arrival.

    Raises:
        InvalidRequest: the prompt or a parameter does not fit the model.
        PromptTooLong: the prompt and one more token can never fit.
    """
    prompt, token_ids = _tokenize(decoded, tokenizer, info)
    _check_prompt(token_ids, info)
    check_adapter_name(decoded.params.lora_name, info.adapters)
    decoded.params.check_vocabulary(info.vocab_size)
    _check_seats(decoded.params, info)
    params = _with_what_is_sent(decoded.params, decoded.options)
    for each in (decoded.params, params):
        each.check_logprobs(len(token_ids), info.max_logprobs)
    request = Request(
        str(next(_ids)),
        token_ids,
        params.resolve(info.room_behind(len(token_ids)), info.default_max_tokens),
        arrival.time_s,
        decoded.scheduling.deadline_s(arrival.time_s),
        decoded.scheduling.priority,
        decoded.scheduling.tenant,
        decoded.scheduling.cache_salt,
        bad_words_token_ids(decoded.params.bad_words, tokenizer, info.eos_token_ids),
        info.encodes_prompt,
    )
    return LiveRequest(request, arrival, decoded.options, sender, tokenizer, prompt)


def _check_seats(params: SamplingParams, info: EngineInfo) -> None:
    if params.num_sequences > info.max_num_seqs:
        key, what = ("n", "answers") if params.beam_width == 1 else ("beam_width", "beams")
        raise InvalidRequest(
            f"{key} is {params.num_sequences} but max_num_seqs is {info.max_num_seqs}; ask for "
            f"fewer {what} or raise max_num_seqs in engine.json"
        )


def _with_what_is_sent(params: SamplingParams, options: ResponseOptions) -> SamplingParams:
    """Return parameters that ask the engine for the log-probabilities of a request's outputs.

    Its flags say what is sent; its keys, how many of the most likely tokens stand there beside.
    """
    logprobs = prompt_logprobs = None
    if "cumulative_logprob" in options.outputs:
        logprobs = 0
    if "logprobs" in options.outputs:
        logprobs = params.logprobs or 0
    if "prompt_logprobs" in options.outputs:
        prompt_logprobs = params.prompt_logprobs or 0
    if (logprobs, prompt_logprobs) == (params.logprobs, params.prompt_logprobs):
        return params
    return replace(params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _tokenize(
    decoded: DecodedRequest, tokenizer: Tokenizer, info: EngineInfo
) -> tuple[str, tuple[int, ...]]:
    """Return the prompt as text (empty if no response shows it) and as ids."""
    if decoded.token_ids is not None:
        if not decoded.options.include_prompt:
            return "", decoded.token_ids
        skip = decoded.params.skip_special_tokens
        return tokenizer.decode(decoded.token_ids, skip), decoded.token_ids
    if decoded.text is not None:
        _check_length(decoded.text, tokenizer, info)
        return decoded.text, tuple(tokenizer.encode(decoded.text))
    text = render_chat(tokenizer, decoded.messages)
    _check_length(text, tokenizer, info)
    return text, tuple(tokenizer.encode(text, add_special_tokens=False))


def _check_length(text: str, tokenizer: Tokenizer, info: EngineInfo) -> None:
    """Refuse a text that is far too long, for which tokenizing takes 100 bytes a character."""
    if len(text) <= ALWAYS_TOKENIZED:
        return
    limit = max(ALWAYS_TOKENIZED, info.max_num_tokens * tokenizer.max_token_length)
    if len(text) > limit:
        raise PromptTooLong(
            f"prompt has {len(text):,} characters but at most {limit:,} can be "
            f"{info.max_num_tokens:,} tokens, of which the longest has "
            f"{tokenizer.max_token_length:,}; shorten it"
        )


def _check_prompt(token_ids: tuple[int, ...], info: EngineInfo) -> None:
    if not token_ids:
        raise InvalidRequest("the prompt has 0 tokens but must have at least 1")
    if len(token_ids) > info.max_prompt_tokens:
        if info.max_num_tokens == info.max_model_len:
            limit = f"max_model_len is {info.max_model_len:,}"
            remedy = "raise max_model_len in engine.json"
        else:
            limit = f"the {info.num_blocks:,} KV blocks hold {info.max_num_tokens:,}"
            remedy = "raise num_kv_blocks in engine.json"
        room = "" if info.encodes_prompt else ", with room for the answer"
        raise PromptTooLong(
            f"prompt has {len(token_ids):,} tokens but {limit}{room}; shorten it or {remedy}"
        )
    if max(token_ids) >= info.vocab_size:
        raise InvalidRequest(
            f"the prompt has token {max(token_ids)} of the tokenizer but the model knows "
            f"0 to {info.vocab_size - 1}"
        )
