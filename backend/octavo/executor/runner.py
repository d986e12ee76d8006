"""What the engine needs of whoever runs its steps, on one device or on several.

Knows nothing of how that is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from octavo.adapter import Adapter, AdapterArrival
from octavo.executor.prompt_scores import PromptScores
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.preemption import PreemptionCosts


class Runner(Protocol):
    """What the engine needs of a model on its devices."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    window: int | None
    """Positions that the model sees at most, if no layer sees more."""
    adapters: Mapping[str, Adapter]
    """By the names that requests give them."""
    num_adapter_slots: int
    """How many of them are in memory at once; at first the first ones."""
    costs: PreemptionCosts
    num_stages: int
    """Steps that compute at once: 1, or the stages of a pipeline. A sequence is in several of them
    only with chunks of its prompt."""
    steps_ahead: int
    """Finished steps that may be under way while the next one is planned: 0, or 1 on a device that
    computes behind the host's back."""
    computes_on_host: bool
    """Whether steps take cores of the host from all else that runs there."""
    connections: tuple[Connection, ...]
    """To processes that take part. One that can be read says that its process cannot go on."""

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        """Start a step: make its block copies, then run the model; may return before it is done.

        Adapters that are to be read are read meanwhile.

        What becomes of its sequences afterwards does not matter. With nothing scheduled it waits
        until some blocks have come back from the host.

        Args:
            output: the step.
            drawn: [rows] int64 on the device, what the step before drew: ids of pending tokens.

        Returns:
            logits [num_samples, vocab_size] float32, in the order of `output.sampling`, which hold
            from `finish` on.
        """

    def finish(self) -> None:
        """Do, or queue on the device, what is left of the oldest step that is not finished."""

    def wait(self) -> None:
        """Wait for the step that was finished last, if another process may keep it from ending.

        Called before the host reads what was drawn from it.

        Raises:
            EngineError: that process is gone, or takes too long; the message names it.
        """

    def pop_scores(self) -> PromptScores:
        """Return what the last finished step found out of its `output.scored`, if not empty."""

    def arrived(self) -> tuple[int, ...]:
        """Return the ids of swap-ins that are done, each once."""

    def arrived_adapters(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        """Return what has become of adapters that were to be read, each once.

        Waits for one up to `timeout_s` if there is none yet.
        """

    def check_processes(self) -> None:
        """Raise EngineError if a process that takes part is gone."""
