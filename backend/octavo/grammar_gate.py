"""Requests whose grammar is being compiled: they wait here, and join the queue with it.

Knows nothing of how a grammar is compiled, nor of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from octavo.errors import InvalidRequest, OctavoError, QueueFull
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.matcher import GrammarMatcher
from octavo.request import FinishReason, TokenOutput
from octavo.scheduler.admission import that_wait
from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.ending import last_outputs
from octavo.sequence import Sequence


class GrammarGate:
    """The way in for sequences with structured outputs.

    Args:
        compiler: compiles what they ask for.
        max_requests: how many may wait here; None for any number.
    """

    def __init__(self, compiler: GrammarCompiler, max_requests: int | None) -> None:
        self.num_requests_refused = 0
        self._compiler = compiler
        self._max_requests = max_requests
        self._waiting: dict[str, tuple[Sequence, Future[GrammarMatcher]]] = {}
        """By request id, in order of arrival."""
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._waiting)

    def check_id(self, request_id: str) -> None:
        """Raise InvalidRequest if a request of that id waits here."""
        if request_id in self._waiting:
            raise InvalidRequest(f"request id {request_id!r} is already in use")

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its grammar, whose compilation begins.

        Raises:
            QueueFull: too many wait already.
        """
        if self._max_requests is not None and len(self) >= self._max_requests:
            self.num_requests_refused += 1
            raise QueueFull(
                f"{that_wait(len(self), 'request')} for a grammar and max_num_queued_requests is "
                f"{self._max_requests:,}; send the request again later"
            )
        wanted = sequence.params.structured_outputs
        assert wanted is not None, "there is nothing to compile"
        self._waiting[sequence.request_id] = sequence, self._compiler.start(wanted)
        if sequence.request.deadline_s is not None:
            self._deadlines.add(sequence.request_id, sequence.request.deadline_s)

    def end(self, request_id: str, reason: FinishReason) -> list[Sequence]:
        """End a request; return its sequence if it waited here."""
        if request_id not in self._waiting:
            return []
        sequence = self._leave(request_id)
        sequence.finish_reason = reason
        return [sequence]

    def let_in(
        self, admit: Callable[[Sequence], None], now_s: float, timeout_s: float
    ) -> list[TokenOutput]:
        """Hand on the sequences whose grammars are compiled, in order of arrival.

        Waits for one up to `timeout_s`. Returns last outputs of requests whose deadline has passed,
        whose grammar cannot be followed, or that `admit` refuses by an OctavoError.
        """
        if not self._waiting:
            return []
        if timeout_s > 0.0:
            wait([matcher for _, matcher in self._waiting.values()], timeout_s, FIRST_COMPLETED)
        outputs: list[TokenOutput] = []
        for request_id in self._deadlines.pop_due(now_s):
            outputs += last_outputs(self.end(request_id, FinishReason.DEADLINE), now_s)
        for sequence, matcher in [*self._waiting.values()]:
            if not matcher.done():
                continue
            self._leave(sequence.request_id)
            try:
                sequence.follow(matcher.result())
                admit(sequence)
            except OctavoError as error:
                sequence.finish_reason = FinishReason.ERROR
                outputs += last_outputs([sequence], now_s, error)
        return outputs

    def _leave(self, request_id: str) -> Sequence:
        sequence, matcher = self._waiting.pop(request_id)
        matcher.cancel()
        self._deadlines.discard(request_id)
        return sequence
