"""One sequence's life inside the engine; private to the engine thread.

State is few numbers: the known tokens, how many of them have their KV computed, and the blocks that
hold it. Knows nothing of queues, tensors or text.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import KW_ONLY, dataclass, field

from octavo.adapter import Adapter
from octavo.beam_search import BeamSearch
from octavo.cache.block_hash import BlockKey
from octavo.grammar.matcher import GrammarMatcher
from octavo.request import FinishReason, Request, SequenceTiming
from octavo.sampling.token_rules import TokenRules, make_token_rules
from octavo.sampling_params import SamplingParams

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


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Tokens of one answer and the KV blocks that hold them.

    `num_computed_tokens` catches up with `num_tokens`; whatever lies between is scheduled next,
    be it a prompt, a chunk of one, a single decoded token or a recomputation after preemption.
    Whoever puts a block into the middle of `block_table` makes a new list of it: readers compare
    by identity, and else look only at what was appended.

    A step may be planned while others are under way. What they compute counts as computed, and a
    token that one has drawn as known, by a `PENDING_TOKEN` until the step has landed.
    """

    request: Request
    rules: TokenRules | None = None
    """What its parameters say of single tokens, if anything; its own, and updated by draws."""
    adapter: Adapter | None = None
    """What is added to the model for it, if anything."""
    _: KW_ONLY
    lora_slot: int = -1
    """Where that is in memory, from its admission on."""
    params: SamplingParams = field(init=False)
    index: int = 0
    """Which of the request's n answers this is."""
    num_prompt_tokens: int = field(init=False)
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    max_num_tokens: int = sys.maxsize
    """Most tokens it may ever have; the scheduler sets it. The last one is never computed."""
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None

    block_table: list[int] = field(default_factory=list)
    """Device blocks in order; `NO_BLOCK` where no token sees the block any more."""
    host_table: list[int] = field(default_factory=list)
    """Host blocks in order, while swapped or restoring."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Keys of its first full blocks, as far as the cache has needed them."""
    num_published_blocks: int = 0
    """First blocks of the table that the prefix cache has been offered."""
    num_writable_slots: int = 0
    """Slots of its table, from the first, that it can fill without asking the cache."""

    num_steps_under_way: int = 0
    """Steps that compute or draw tokens of it and have not landed."""
    num_unlanded_tokens: int = 0
    """Last computed tokens that steps under way compute, into the table it has now."""
    num_unscored_tokens: int = field(init=False)
    """Last tokens of the prompt that are to be scored and by no step launched yet have been."""
    num_pending_tokens: int = 0
    """Last known tokens whose ids are not known yet."""
    pending_row: int = -1
    """Row of the last launched step from which its last pending token is drawn."""
    needs_names: bool = field(init=False)
    """Whether its next token depends on the ids of those before by more than the model."""
    grammar: GrammarMatcher | None = None
    """Where it stands in the form that it must have, if any."""
    num_logprobs: int | None = field(init=False)
    """Most likely tokens that it wants told beside each that it draws; None: not even that."""
    search: BeamSearch | None = None
    """What it is a beam of, in the slot of its index."""

    arrival_number: int = sys.maxsize
    """Place in the order of arrival; behind all others until the scheduler gives it one."""
    num_seats: int = field(init=False)
    """Places it takes among `max_num_seqs`: those of its forks too, until they begin."""
    num_served_tokens: int = 0
    """Tokens of progress its tenant was charged for."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    clock: SequenceClock = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.params = params = request.params
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        is_scored = params.prompt_logprobs is not None
        self.num_unscored_tokens = self.num_prompt_tokens - 1 if is_scored else 0
        self.rules = self.rules or make_token_rules(request)
        self.needs_names = self.rules is not None and self.rules.reads_tokens
        self.num_logprobs = params.logprobs
        self.num_seats = params.num_sequences
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
        fork = Sequence(
            self.request,
            self.rules and self.rules.fork(),
            self.adapter,
            lora_slot=self.lora_slot,
            index=index,
            max_num_tokens=self.max_num_tokens,
            block_keys=list(self.block_keys),
            num_pending_tokens=self.num_pending_tokens,
            search=self.search,
            arrival_number=self.arrival_number,
            num_served_tokens=self.num_served_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )
        if self.grammar is not None:
            fork.follow(self.grammar.fork())
        fork.token_ids = list(self.token_ids)
        fork.num_unscored_tokens = 0
        fork.needs_names = self.needs_names
        fork.num_logprobs = self.num_logprobs
        fork.num_seats = 1
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
