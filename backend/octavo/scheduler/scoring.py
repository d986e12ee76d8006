"""Which tokens of prompts a step says the log-probability of.

A row of a step says how likely the token behind it is. A sequence whose prompt is scored computes
all of it, for the prefix cache keeps no such thing; what is computed again after a preemption is
not scored again. Knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.scheduler.output import ScheduledSequence, ScoredPrompt


def score_prompts(scheduled: Iterable[ScheduledSequence]) -> tuple[ScoredPrompt, ...]:
    """Return what the rows of a planned step score, in their order.

    row       c   …   u-1   …   c+count-1        c: first that is computed
    scores            u     …   c+count          u: first token that is not scored yet
    """
    scored, step_row = [], 0
    for sequence, count, _ in scheduled:
        if sequence.num_unscored_tokens:
            start, num_prompt_tokens = sequence.num_computed_tokens, sequence.num_prompt_tokens
            first = num_prompt_tokens - sequence.num_unscored_tokens
            token_ids = sequence.token_ids[first : min(start + count + 1, num_prompt_tokens)]
            if token_ids:
                row = step_row + first - 1 - start
                scored.append(ScoredPrompt(sequence, row, tuple(token_ids)))
        step_row += count
    return tuple(scored)
