"""Steps that no request asked for: they have everything built and warm before a model is ready.

Between them they take every way that a later step can take: few and many tokens, a short and a
long context (attention merges its splits in one of two ways), one and many sequences, every kind
of sampling. Knows what a step is made of, not how it is run; whoever runs one returns its logits
[rows, vocab_size] float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from octavo.executor.device_inputs import StepSizes
from octavo.executor.prompt_scores import PIECE_ROWS
from octavo.request import Request
from octavo.sampling.batch import build_sampling_batch
from octavo.sampling.sampler import sample
from octavo.sampling_params import SamplingParams
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.scheduler.scoring import score_prompts
from octavo.sequence import Sequence

#: A context longer than what any attention kernel reduces in one piece, in tokens.
_LONG_CONTEXT = 2048

#: The most tokens that a GPU multiplies by weights with kernels for few; more of them take what the
#: last of these took, or the largest step.
_FEW_TOKENS = (64, 128)

#: How long the prefill rate is measured, about.
_MEASURED_PREFILL_S = 0.5

RunStep = Callable[[SchedulerOutput], torch.Tensor]

_PLAIN = SamplingParams()

#: Every way that a row can go in the sampler. The first draws from all that is left by filters.
_KINDS_OF_SAMPLING = (
    SamplingParams(temperature=1.0, top_k=1000, top_p=0.99, min_p=1e-6, seed=0),
    SamplingParams(temperature=1.0, top_p=0.9, seed=0),
    SamplingParams(temperature=0.7, seed=0),
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=0.0, logprobs=0, min_tokens=1),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.1, logit_bias=((0, 1.0),), allowed_token_ids=(0,)
    ),
)


class WarmUpSteps:
    """Make steps whose sequences share the blocks of one small cache.

    What they compute means nothing, as sequences overwrite each other's keys and values.

    Args:
        sizes: the most that a step holds.
    """

    def __init__(self, sizes: StepSizes) -> None:
        self._sizes = sizes
        self.max_prefill = min(sizes.max_num_tokens, sizes.max_model_len)
        """Most tokens of one sequence that a step computes."""
        self.min_prefill = min(self.max_prefill, sizes.block_size)
        """Tokens of a small prompt."""
        self.num_blocks = -(-self.max_prefill // sizes.block_size)
        """Blocks that the cache must have."""

    def run_all(self, run: RunStep) -> None:
        """Run every kind of step, and sample in every way."""
        for output in (self.largest(), self.prefill(self.min_prefill)):
            sample_every_way(run(output))
        for output in (*self.prompts(), self.scored_prompt(), *self.decodes(), *self.adapted()):
            run(output)

    def measure_prefill(self, run: RunStep) -> float:
        """Return the tokens per second of as long a prompt as is soon computed."""

        def seconds(num_tokens: int) -> float:
            started_s = time.perf_counter()
            # A device computes behind the caller's back until its result is read.
            run(self.prefill(num_tokens)).argmax().item()
            return time.perf_counter() - started_s

        num_soon_done = int(self.min_prefill * _MEASURED_PREFILL_S / seconds(self.min_prefill))
        num_measured = min(max(num_soon_done, self.min_prefill), self.max_prefill)
        return num_measured / seconds(num_measured)

    def largest(self) -> SchedulerOutput:
        """Return a step of as many tokens and as many rows of logits as there can be."""
        num_seqs, longest = self._sizes.max_num_seqs, self._sizes.max_model_len
        each, more = divmod(self._sizes.max_num_tokens, num_seqs)
        return self._step([(0, min(each + (i < more), longest)) for i in range(num_seqs)])

    def prefill(self, num_tokens: int) -> SchedulerOutput:
        """Return a step of one prompt, of at most `max_prefill` tokens."""
        return self._step([(0, num_tokens)])

    def prompts(self) -> Iterator[SchedulerOutput]:
        """Yield steps of one prompt each, for which products may have kernels of their own."""
        for num_tokens in _FEW_TOKENS:
            if num_tokens < self.max_prefill:
                yield self.prefill(num_tokens)

    def scored_prompt(self) -> SchedulerOutput:
        """Return a step of one prompt whose tokens are scored, as many as are at a time."""
        num_tokens = min(1 + PIECE_ROWS, self.max_prefill)
        return self._step([(0, num_tokens)], SamplingParams(prompt_logprobs=20))

    def decodes(self) -> Iterator[SchedulerOutput]:
        """Yield steps of sequences that compute one token each."""
        long = min(_LONG_CONTEXT, self._sizes.max_model_len) - 1
        yield self._step([(0, 1)])
        yield self._step([(long, 1)])
        yield self._step([(0, 1)] * self._sizes.max_num_seqs)

    def adapted(self) -> Iterator[SchedulerOutput]:
        """Yield, if there are adapters, the largest step with one for each sequence in turn."""
        num_slots = self._sizes.num_adapter_slots
        if num_slots:
            largest = self.largest()
            for index, (sequence, *_) in enumerate(largest.scheduled):
                sequence.lora_slot = index % num_slots
            yield largest

    def _step(
        self, shares: list[tuple[int, int]], params: SamplingParams = _PLAIN
    ) -> SchedulerOutput:
        """Return a step from (computed, scheduled) numbers of tokens, each sequence drawing one."""
        scheduled = []
        for num_computed, num_scheduled in shares:
            num_tokens = num_computed + num_scheduled
            sequence = Sequence(Request("warm-up", (0,) * num_tokens, params))
            sequence.num_computed_tokens = num_computed
            num_blocks = -(-num_tokens // self._sizes.block_size)
            sequence.block_table = [index % self.num_blocks for index in range(num_blocks)]
            scheduled.append(ScheduledSequence(sequence, num_scheduled, draws=(sequence,)))
        return SchedulerOutput(tuple(scheduled), scored=score_prompts(scheduled))


def sample_every_way(logits: torch.Tensor) -> None:
    """Draw from logits [rows, vocab_size] float32 in every way; mutates them."""
    for params in _KINDS_OF_SAMPLING:
        rows = [Sequence(Request("warm-up", (0,), params)) for _ in range(len(logits))]
        sample(logits, build_sampling_batch(rows, lambda sequence: frozenset({0}))).tokens()
