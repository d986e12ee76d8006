"""What a caller receives: deltas as they come, or one `Completion` for the whole.

Knows nothing of tensors or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the server's time for a request went; with n answers, for the one that ended last."""

    queue_ms: float
    """From arrival until it was first scheduled."""
    prefill_ms: float
    """Running, before its first token."""
    decode_ms: float
    """Running, after its first token."""
    preempted_ms: float
    """Waiting after it had to make room for others."""
    cached_tokens: int
    """Prompt tokens that were found in the cache and not computed again."""
    preemptions: int
    """Times that it had to make room."""


class TokenLogprob(NamedTuple):
    """How likely a token was by the model's own distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely."""
    token: str
    """Its text by itself."""


TokenLogprobs = tuple[TokenLogprob, ...]
"""The token itself, then those of the most likely that it is not, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to one answer."""

    text: str
    """New text; may be empty while a character or a stop string is not yet complete."""
    token_ids: tuple[int, ...]
    """New token ids."""
    finish_reason: str | None
    """None while running, then `stop`, `length`, `abort`, `deadline` or `error`."""
    num_input_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    """Tokens generated since the answer's last delta; the sum over all is the true count."""
    index: int = 0
    """Which of the n answers this is of."""
    timing: Timing | None = None
    """On the last delta of the request."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each new token, if `logprobs` asked for them."""
    cumulative_logprob: float | None = None
    """Sum over all tokens of the answer so far, if `logprobs` asked for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first delta of the request, if `prompt_logprobs` asked for them: of each token of the
    prompt; None for the first, before which none stands."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer."""

    text: str
    """The generated text, without the prompt."""
    token_ids: tuple[int, ...]
    """The generated token ids."""
    finish_reason: str | None
    """`stop`, `length`, `abort`, `deadline` or `error`; None if the server named none."""
    num_output_tokens: int
    """Tokens generated."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each token, if `logprobs` asked for them."""
    cumulative_logprob: float | None = None
    """Their sum."""

    @classmethod
    def from_deltas(cls, deltas: Iterable[Delta]) -> Answer:
        """Join the deltas of one answer, in order."""
        parts = list(deltas)
        return cls(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            finish_reason=parts[-1].finish_reason if parts else None,
            num_output_tokens=sum(part.num_output_tokens for part in parts),
            logprobs=tuple(each for part in parts for each in part.logprobs),
            cumulative_logprob=parts[-1].cumulative_logprob if parts else None,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one request: n answers, of which the first is also here by itself."""

    answers: tuple[Answer, ...]
    """All n, in the order of their `index`."""
    num_input_tokens: int
    """Tokens of the prompt."""
    timing: Timing | None = field(default=None, compare=False)
    """None if the server sent none; completions of the same answers are equal whatever it is."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of each token of the prompt but the first, if `prompt_logprobs` asked for them."""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first answer."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended."""
        return self.answers[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the first answer."""
        return self.answers[0].num_output_tokens

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the first answer's tokens."""
        return self.answers[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the first answer's."""
        return self.answers[0].cumulative_logprob

    @classmethod
    def from_deltas(cls, deltas: Iterable[Delta]) -> Completion:
        """Join the deltas of one request, in order."""
        parts = list(deltas)
        num_answers = 1 + max((part.index for part in parts), default=0)
        return cls(
            tuple(
                Answer.from_deltas(part for part in parts if part.index == index)
                for index in range(num_answers)
            ),
            num_input_tokens=parts[-1].num_input_tokens if parts else 0,
            timing=parts[-1].timing if parts else None,
            prompt_logprobs=parts[0].prompt_logprobs if parts else None,
        )
