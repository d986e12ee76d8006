"""One sequence's life inside the engine; private to the engine thread.

State is few numbers: the known tokens, how many of them have their KV computed, and the blocks that
hold it. Knows nothing of queues, tensors or text.
"""

from __future__ import annotations

import enum
import sys

from octavo.adapter import Adapter
from octavo.beam_search import BeamSearch
from octavo.cache.block_hash import BlockKey
from octavo.grammar.matcher import GrammarMatcher
from octavo.request import FinishReason, Request, SequenceTiming
from octavo.sampling.token_rules import TokenRules, make_token_rules

#: Stands in a block table for a block that no token sees any more.
NO_BLOCK = -1

#: Stands among token ids for a token that is drawn by a step under way: it counts, but its id is
#: not known yet.
PENDING_TOKEN = -1


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """In the queue, without blocks."""
    SWAPPED = "swapped"
    """In the queue, with its KV in host blocks."""
    RESTORING = "restoring"
    """Admitted; its KV is on the way from host blocks to its table."""
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens of one answer and the KV blocks that hold them.

    `num_computed_tokens` catches up with `num_tokens`; whatever lies between is scheduled next,
    be it a prompt, a chunk of one, a single decoded token or a recomputation after preemption.
    Whoever puts a block into the middle of `block_table` makes a new list of it: readers compare
    by identity, and else look only at what was appended.

    A step may be planned while others are under way. What they compute counts as computed, and a
    token that one has drawn as known, by a `PENDING_TOKEN` until the step has landed.
    """

    __slots__ = (
        "adapter",
        "arrival_number",
        "block_keys",
        "block_table",
        "clock",
        "finish_reason",
        "grammar",
        "host_table",
        "index",
        "max_num_tokens",
        "needs_names",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_logprobs",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_seats",
        "num_served_tokens",
        "num_steps_under_way",
        "num_unlanded_tokens",
        "num_unscored_tokens",
        "num_writable_slots",
        "params",
        "pending_row",
        "request",
        "rules",
        "search",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        rules: TokenRules | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.request = request
        self.params = request.params
        self.adapter = adapter
        """What is added to the model for it, if anything."""
        self.index = 0
        """Which of the request's n answers this is."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_num_tokens = sys.maxsize
        """Most tokens it may ever have; the scheduler sets it. The last one is never computed."""
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None

        self.block_table: list[int] = []
        """Device blocks in order; `NO_BLOCK` where no token sees the block any more."""
        self.host_table: list[int] = []
        """Host blocks in order, while swapped or restoring."""
        self.block_keys: list[BlockKey] = []
        """Keys of its first full blocks, as far as the cache has needed them."""
        self.num_published_blocks = 0
        """First blocks of the table that the prefix cache has been offered."""
        self.num_writable_slots = 0
        """Slots of its table, from the first, that it can fill without asking the cache."""

        self.num_steps_under_way = 0
        """Steps that compute or draw tokens of it and have not landed."""
        self.num_unlanded_tokens = 0
        """Last computed tokens that steps under way compute, into the table it has now."""
        self.num_unscored_tokens = 0
        """Last tokens of the prompt that are to be scored and by no step launched yet have been."""
        if self.params.prompt_logprobs is not None:
            self.num_unscored_tokens = self.num_prompt_tokens - 1
        self.num_pending_tokens = 0
        """Last known tokens whose ids are not known yet."""
        self.pending_row = -1
        """Row of the last launched step from which its last pending token is drawn."""
        self.rules = rules or make_token_rules(request)
        """What its parameters say of single tokens, if anything; its own, and updated by draws."""
        self.needs_names = self.rules is not None and self.rules.reads_tokens
        """Whether its next token depends on the ids of those before by more than the model."""
        self.grammar: GrammarMatcher | None = None
        """Where it stands in the form that it must have, if any."""
        self.num_logprobs = request.params.logprobs
        """Most likely tokens that it wants told beside each that it draws; None: not even that."""
        self.search: BeamSearch | None = None
        """What it is a beam of, in the slot of its index."""

        self.arrival_number = sys.maxsize
        """Place in the order of arrival; behind all others until the scheduler gives it one."""
        self.num_seats = request.params.num_sequences
        """Places it takes among `max_num_seqs`: those of its forks too, until they begin."""
        self.num_served_tokens = 0
        """Tokens of progress its tenant was charged for."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.clock = SequenceClock(request.arrival_s)

    @property
    def request_id(self) -> str:
        """The request it answers."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_named_tokens(self) -> int:
        """Known tokens whose ids are known too."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def answers(self) -> range:
        """Indices of its request's answers that it stands for: its forks' too, until they begin.

        Which answers come of beams is not known before the end; the first n beams stand for them.
        """
        n = self.params.n
        return range(min(self.index, n), min(self.index + self.num_seats, n))

    def append_token(self, token_id: int) -> None:
        """Add a token; its KV is computed in a later step."""
        self.token_ids.append(token_id)

    def expect_token(self, row: int) -> None:
        """Add a token that a step under way draws from its `row` of logits."""
        self.append_token(PENDING_TOKEN)
        self.num_pending_tokens += 1
        self.pending_row = row

    def name_token(self, token_id: int) -> None:
        """Give the first pending token its id."""
        self.token_ids[-self.num_pending_tokens] = token_id
        self.num_pending_tokens -= 1
        if self.grammar is not None:
            self.grammar.advance(token_id)

    def follow(self, grammar: GrammarMatcher) -> None:
        """Have all tokens to come follow a grammar, which nobody else follows."""
        self.grammar = grammar
        self.needs_names = True

    def fork(self, index: int) -> Sequence:
        """Return another answer that begins with the tokens known now, without blocks."""
        fork = Sequence(self.request, self.rules and self.rules.fork(), self.adapter)
        fork.index = index
        if self.grammar is not None:
            fork.follow(self.grammar.fork())
        fork.token_ids = list(self.token_ids)
        fork.block_keys = list(self.block_keys)
        fork.num_pending_tokens = self.num_pending_tokens
        fork.max_num_tokens = self.max_num_tokens
        fork.needs_names = self.needs_names
        fork.num_logprobs = self.num_logprobs
        fork.search = self.search
        fork.num_unscored_tokens = 0
        fork.arrival_number = self.arrival_number
        fork.num_seats = 1
        fork.num_served_tokens = self.num_served_tokens
        fork.num_cached_tokens = self.num_cached_tokens
        fork.num_preemptions = self.num_preemptions
        fork.clock = self.clock.copy()
        return fork

    def timing(self, now_s: float) -> SequenceTiming:
        """Return where its time went until now."""
        return SequenceTiming(
            **self.clock.seconds(now_s),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}[{self.index}], {self.status.value}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens}, "
            f"blocks={self.block_table})"
        )


class SequenceClock:
    """Adds up where a sequence's time goes; told when that changes."""

    __slots__ = ("_bucket", "_seconds", "_since_s")

    def __init__(self, arrival_s: float) -> None:
        self._bucket = "queue_s"
        self._seconds: dict[str, float] = {}
        self._since_s = arrival_s

    def copy(self) -> SequenceClock:
        """Return a clock with the same past."""
        clock = SequenceClock(self._since_s)
        clock._bucket = self._bucket
        clock._seconds = dict(self._seconds)
        return clock

    @property
    def since_s(self) -> float:
        """When it was last turned."""
        return self._since_s

    def turn(self, bucket: str, now_s: float) -> None:
        """Count the time since the last turn, and from now on count for `bucket`.

        Buckets are the fields of `SequenceTiming` that end in `_s`.
        """
        # A request may come from a clock that is read a little later than this one.
        passed_s = max(0.0, now_s - self._since_s)
        self._seconds[self._bucket] = self._seconds.get(self._bucket, 0.0) + passed_s
        self._bucket, self._since_s = bucket, max(self._since_s, now_s)

    def seconds(self, now_s: float) -> dict[str, float]:
        """Return the sum of each bucket until now."""
        self.turn(self._bucket, now_s)
        return self._seconds
