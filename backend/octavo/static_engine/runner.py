"""Whole batches through transformers' own generation, as an engine asks for its steps.

A batch begins with all prompts at once, and its rows stay until it ends: one whose sequence has
ended goes on, and what it says is dropped. Blocks are an account here: they say how much a batch
may reserve, and hold nothing. Knows nothing of queues, text or finish reasons.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType

import torch

from octavo.adapter import Adapter, AdapterArrival
from octavo.config import EngineConfig
from octavo.executor.prompt_scores import PromptScores
from octavo.host_resources import host_memory, usable_cores
from octavo.model.devices import use_device
from octavo.model.pretrained import load_pretrained
from octavo.scheduler.output import SchedulerOutput
from octavo.scheduler.preemption import PreemptionCosts
from octavo.sequence import Sequence
from octavo.static_engine.generation import PADDING_ID, Generation
from octavo.static_engine.memory import choose_num_blocks, measure_row
from octavo.static_engine.trial import BatchKind, find_batch_kind

logger = logging.getLogger(__name__)


class StaticRunner:
    """Load a model by transformers' own class, find out what batches it can have, and run them.

    Raises:
        ConfigError: the checkpoint, the device or the memory cannot be served.
    """

    window: int | None = None
    adapters: Mapping[str, Adapter] = MappingProxyType({})
    num_adapter_slots, num_host_blocks = 0, 0
    costs = PreemptionCosts(0, 1.0, float("inf"), 1.0)
    num_stages, steps_ahead = 1, 0
    connections: tuple[Connection, ...] = ()

    def __init__(self, config: EngineConfig) -> None:
        started_s = time.monotonic()
        torch.set_num_threads(config.cpu_threads or usable_cores())
        self._model = model = load_pretrained(config)
        use_device(model.device)
        self.computes_on_host = model.device.type == "cpu"
        self.is_encoder_decoder = model.is_encoder_decoder
        self.eos_token_ids = model.eos_token_ids
        self.vocab_size = model.module.get_input_embeddings().weight.shape[0]
        self.max_prompt_len = model.max_model_len
        """Tokens that a prompt may have; those of an answer share them, or are as many."""
        self.max_model_len = model.max_model_len * (1 + self.is_encoder_decoder)
        row = measure_row(model)
        self._generation = Generation(model)
        self.batch_kind = find_batch_kind(self._generation, self.vocab_size, model.module.dtype)
        self.num_blocks = choose_num_blocks(
            config, row, self.max_model_len, model.device, host_memory()
        )
        self._rows: dict[tuple[str, int], int] = {}
        """Of the sequences of the batch, by request and answer."""
        self._scores: PromptScores | None = None
        logger.info(
            "%s on %s in the traditional mode after %.1f s: batches of %s, at most %d at once; "
            "room for %s tokens of %s bytes and %s bytes a row",
            model.name,
            model.device,
            time.monotonic() - started_s,
            self.batch_kind.value,
            config.max_num_seqs if self.batch_kind is not BatchKind.SINGLE else 1,
            f"{self.num_blocks * config.block_size:,}",
            f"{row.per_token:,}",
            f"{row.fixed:,}",
        )

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Begin a batch with all that are scheduled, or compute a token of each.

        Args:
            output: the step; nobody joins a batch later.
            drawn: not needed, for no token is pending.

        Returns:
            logits [num_samples, vocab_size] float32, in the order of `output.sampling`.
        """
        if not output.scheduled:
            return torch.empty((0, self.vocab_size), device=self._model.device)
        sampling = output.sampling
        if output.scheduled[0].sequence.num_computed_tokens:
            logits = self._generation.step(self._last_tokens(sampling))
        else:
            logits = self._begin(output)
        rows = [self._rows[_name(sequence)] for sequence in sampling]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        return logits[:, : self.vocab_size]

    def leave(self) -> None:
        """End the batch, of which nobody is left, and free what it holds."""
        self._generation.leave()

    def arrived_adapters(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        """Return nothing: there are none."""
        return ()

    def finish(self) -> None:
        """Do nothing more: a step is done when `execute` returns."""

    def wait(self) -> None:
        """Do nothing: no other process takes part."""

    def pop_scores(self) -> PromptScores:
        """Return what the last step found out of its `output.scored`, which must not be empty."""
        scores, self._scores = self._scores, None
        assert scores is not None, "the last step scored nothing"
        return scores

    def arrived(self) -> tuple[int, ...]:
        """Return nothing: no KV is ever swapped."""
        return ()

    def check_processes(self) -> None:
        """Do nothing: no other process takes part."""

    def _begin(self, output: SchedulerOutput) -> torch.Tensor:
        sampling = output.sampling
        self._rows = {_name(sequence): row for row, sequence in enumerate(sampling)}
        if output.scored:
            logits = self._prompt_logits(output.scored[0].sequence)
            self._scores = PromptScores(output.scored, logits.__getitem__, self._model.device)
        self._generation.leave()
        most_tokens = max(sequence.max_num_tokens - sequence.num_tokens for sequence in sampling)
        return self._generation.begin([sequence.token_ids for sequence in sampling], most_tokens)

    def _last_tokens(self, sampling: tuple[Sequence, ...]) -> list[int]:
        """Return the last token of each row, padding where the sequence has ended."""
        token_ids = [PADDING_ID] * len(self._rows)
        for sequence in sampling:
            token_ids[self._rows[_name(sequence)]] = sequence.token_ids[-1]
        return token_ids

    @torch.no_grad()
    def _prompt_logits(self, sequence: Sequence) -> torch.Tensor:
        """Return logits [tokens, vocab] float32 of a prompt, which is alone in its batch."""
        token_ids = torch.tensor([sequence.token_ids], device=self._model.device)
        logits: torch.Tensor = self._model.module(input_ids=token_ids, use_cache=False).logits[0]
        return logits[:, : self.vocab_size].float()


def _name(sequence: Sequence) -> tuple[str, int]:
    return sequence.request_id, sequence.index
