"""One request's life inside the engine; private to the engine thread.

State is few numbers: the known tokens, how many of them have their KV computed, and the blocks that
hold it. Knows nothing of queues, tensors or text.
"""

from __future__ import annotations

import enum

from octavo.request import FinishReason, Request


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens of one request and the KV blocks that hold them.

    `num_computed_tokens` catches up with `num_tokens`; whatever lies between is scheduled next,
    be it a prompt, a chunk of one, a single decoded token or a recomputation after preemption.
    """

    __slots__ = (
        "block_table",
        "finish_reason",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "request_id",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.params = request.params
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    def append_token(self, token_id: int) -> None:
        """Add a sampled token; its KV is computed in a later step."""
        self.token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={self.block_table})"
        )
