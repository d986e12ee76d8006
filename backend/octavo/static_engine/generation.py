"""One batch in transformers' `generate`, a token at a time.

`generate` runs on a thread of its own and hands the logits of each step to a logits processor. Ours
hands them on, waits for the tokens that are drawn from them, and says these are the only ones
possible. So caches, masks and positions are transformers' own affair, whatever the architecture,
and who steps may stop between two tokens. Knows nothing of sequences or sampling.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from transformers import GenerationConfig, LogitsProcessorList

from octavo.errors import first_line
from octavo.model.devices import use_device
from octavo.model.pretrained import PretrainedModel
from octavo.static_engine.module_state import ModuleState

_END_TIMEOUT_S = 5.0

#: Stands where a row has no token: nothing attends to it.
PADDING_ID = 0

#: What a model's own generation config may say that belongs to the model rather than to a request.
_OF_THE_MODEL = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "suppress_tokens",
)


class LacksMemory(Exception):
    """A step of a batch takes more memory than there is; the batch is over."""


class _Left(Exception):
    """Nobody wants more of the batch."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Prompts padded to one length."""

    token_ids: torch.Tensor
    """[rows, longest] int64"""
    mask: torch.Tensor
    """The same, 1 where there is a token."""
    most_tokens: int
    """That are generated of any row."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What the thread of `generate` and whoever steps hand to each other."""

    batches: SimpleQueue[_Batch | None] = field(default_factory=SimpleQueue)
    """None ends the thread."""
    logits: SimpleQueue[torch.Tensor | Exception | None] = field(default_factory=SimpleQueue)
    """Of each step; in the end, why there are no more: an error, or None when it was asked for."""
    tokens: SimpleQueue[torch.Tensor | None] = field(default_factory=SimpleQueue)
    """Drawn from them; None ends the batch."""

    def process(self, _: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Hand on logits [rows, vocab], and return others in which only the tokens drawn stand."""
        self.logits.put(logits)
        drawn = self.tokens.get()
        if drawn is None:
            raise _Left
        return torch.full_like(logits, -torch.inf).scatter_(1, drawn[:, None], 0.0)


class Generation:
    """Batches of one model, one at a time: `begin`, `step` again and again, `leave`.

    Mutates the model's generation config: what it says of sampling is for requests to say.
    """

    def __init__(self, model: PretrainedModel) -> None:
        given = model.module.generation_config
        model.module.generation_config = GenerationConfig(
            **{name: getattr(given, name, None) for name in _OF_THE_MODEL}
        )
        self._pads_left = not model.is_encoder_decoder
        self._device = model.device
        self._exchange = _Exchange()
        self._is_under_way = False
        # One thread for all batches: each thread that computes gets helpers of its own. It knows
        # nothing of this object, so that the model goes with it.
        thread = threading.Thread(
            target=_run, args=(model, self._exchange), name="generate", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._exchange, thread)

    def begin(self, prompts: Sequence[Sequence[int]], most_tokens: int) -> torch.Tensor:
        """Compute prompts, one a row, of which each gets at most `most_tokens`.

        Returns:
            logits [rows, vocab] float32 of what follows each, which the caller may change.
        """
        assert not self._is_under_way, "the batch before has not been left"
        self._exchange.batches.put(self._pad(prompts, most_tokens))
        self._is_under_way = True
        return self._next()

    def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute one token of each row; return the logits that follow, as `begin` does."""
        self._exchange.tokens.put(torch.tensor(token_ids, device=self._device))
        return self._next()

    def leave(self) -> None:
        """End the batch, if one is under way, and free what it holds."""
        if self._is_under_way:
            self._is_under_way = False
            self._exchange.tokens.put(None)
            self._exchange.logits.get()

    def _next(self) -> torch.Tensor:
        answer = self._exchange.logits.get()
        if isinstance(answer, torch.Tensor):
            return answer
        self._is_under_way = False
        raise answer or RuntimeError("transformers ended a batch by itself")

    def _pad(self, prompts: Sequence[Sequence[int]], most_tokens: int) -> _Batch:
        """Pad on the left, for the model goes on from the last token; an encoder's on the right."""
        longest = max(map(len, prompts))
        token_ids = torch.full((len(prompts), longest), PADDING_ID)
        mask = torch.zeros_like(token_ids)
        for row, prompt in enumerate(prompts):
            start = longest - len(prompt) if self._pads_left else 0
            token_ids[row, start : start + len(prompt)] = torch.tensor(prompt)
            mask[row, start : start + len(prompt)] = 1
        return _Batch(token_ids.to(self._device), mask.to(self._device), most_tokens)


def _run(model: PretrainedModel, exchange: _Exchange) -> None:
    use_device(model.device)
    state = ModuleState(model.module)
    while (batch := exchange.batches.get()) is not None:
        end: Exception | None = None
        state.clear()
        try:
            _generate(model, batch, exchange)
        except _Left:
            pass
        except Exception as error:
            # Without its traceback, whose frames hold what the step had allocated.
            end = LacksMemory(first_line(error)) if _is_about_memory(error) else error
        state.clear()
        exchange.logits.put(end)


def _is_about_memory(error: Exception) -> bool:
    """Return whether an allocation failed: on a CPU, torch has no class for that."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _generate(model: PretrainedModel, batch: _Batch, exchange: _Exchange) -> None:
    model.module.generate(
        batch.token_ids,
        attention_mask=batch.mask,
        generation_config=GenerationConfig(
            max_new_tokens=batch.most_tokens, do_sample=False, pad_token_id=PADDING_ID
        ),
        logits_processor=LogitsProcessorList([exchange.process]),
    )


def _end(exchange: _Exchange, thread: threading.Thread) -> None:
    """End the thread, and a batch that is under way; a model that hangs is left behind."""
    exchange.tokens.put(None)
    exchange.batches.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_TIMEOUT_S)
