"""The first of several ranks, beside the scheduler: tells the others of steps, and does its part.

It is the first of the last pipeline stage, so logits stay here. Knows nothing of queues, text or
finish reasons.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass

import torch

from octavo.adapter import AdapterArrival
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineError
from octavo.executor.copy_rate import measure_costs
from octavo.executor.kv_storage import peak_bytes
from octavo.executor.model_runner import widest_window
from octavo.executor.parallel.adapter_reports import AdapterReports
from octavo.executor.parallel.fingerprint import fingerprint
from octavo.executor.parallel.launchers import make_launcher
from octavo.executor.parallel.part import Blocks, Part
from octavo.executor.parallel.rank_messages import Assignment, Found, Loaded, Ready
from octavo.executor.parallel.rendezvous import count_ranks_here, open_rendezvous
from octavo.executor.parallel.step_message import StepTeller
from octavo.executor.parallel.step_watch import make_step_watch
from octavo.executor.parallel.workers import Workers
from octavo.executor.prompt_scores import PromptScores
from octavo.executor.warm_up import WarmUpSteps
from octavo.host_resources import usable_cores
from octavo.model.devices import rank_devices, use_device
from octavo.model.loader import read_spec
from octavo.model.location import configured_checkpoint
from octavo.model.lora_list import adapter_directories
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import ModelPart, Shard
from octavo.model.tiers import choose_tier
from octavo.scheduler.output import SchedulerOutput, ScoredPrompt

#: Share of the time that an engine may be silent which a rank waits for another: the engine shall
#: say which rank hangs before it is ended for it.
_SHARE_OF_SILENCE = 0.75

#: How long another rank may say nothing while it loads, beyond what rank zero itself has taken.
_LOAD_TIMEOUT_S = 120.0

#: Sequences that all ranks remember, for each that may be in a step.
_KNOWN_PER_SEQ = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Started:
    """A step that the other ranks have been told of; empty if there is nothing to tell."""

    message: bytes
    scored: tuple[ScoredPrompt, ...]
    logits: torch.Tensor


class RankZero:
    """A `Runner` over all ranks. Steps are told of when they start, and done here when they finish.

        execute   ─ step 1 ─ step 2 ───────────────── step 3 ────
        stage 0      step 1 ── step 2 ──────────────────── step 3
        finish                         step 1 ──────────────────── step 2

    Raises:
        ConfigError: the checkpoint, the machine or the options cannot be served.
        EngineError: another rank does not load.
    """

    def __init__(self, config: EngineConfig) -> None:
        started_s = time.monotonic()
        self.num_stages, self.steps_ahead = config.pipeline_parallel_size, 0
        self._scores: PromptScores | None = None
        self._started: deque[_Started] = deque()
        self._timeout_s = _SHARE_OF_SILENCE * config.step_timeout_s
        num_threads = max(1, (config.cpu_threads or usable_cores()) // config.num_ranks)
        torch.set_num_threads(num_threads)
        # Before devices are listed: only a model's heads and layers bound how many ranks there are.
        shard, own_fingerprint = _look_at(config)
        device, *others = rank_devices(config)
        self.computes_on_host = device.type == "cpu"
        self._workers = Workers(make_launcher(config))
        self._opened = ExitStack()
        self.close = weakref.finalize(self, _end, self._workers, self._opened)
        """Ends the other ranks; happens by itself when nobody has this runner any more."""
        try:
            rendezvous = self._start_others(config, others, num_threads)
            device = torch.device(self._workers.own_device or device)
            use_device(device)
            for name, found in self._workers.hear(Found, _LOAD_TIMEOUT_S):
                if found.fingerprint != own_fingerprint:
                    raise ConfigError(
                        f"{name} and rank 0 see different checkpoints: {config.model}"
                        + (f", or adapters: {config.multi_lora}" if config.enable_lora else "")
                    )
            self._load(config, shard, rendezvous, device)
        except BaseException:
            self.close()
            raise
        if device.type == "cuda":
            logger.warning("several GPUs: no step runs as a CUDA graph, and none is planned ahead")
        logger.info("model ready in %.1f s: %s", time.monotonic() - started_s, self._describe())

    def _start_others(
        self, config: EngineConfig, devices: list[torch.device], num_threads: int
    ) -> Rendezvous:
        """Start the other ranks, each on its device; return where they find each other."""
        rendezvous, port = open_rendezvous(self._workers.host, self._timeout_s)
        place = (rendezvous.host, port, num_threads, self._timeout_s)
        self._workers.start(
            [
                Assignment(config, rank, str(device), *place)
                for rank, device in enumerate(devices, start=1)
            ]
        )
        self.connections = self._workers.connections
        return rendezvous

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Ids of the processes of the other ranks, in order."""
        return self._workers.pids

    @property
    def worker_names(self) -> tuple[str, ...]:
        """What messages call the other ranks, in order."""
        return self._workers.names

    @property
    def sent_bytes(self) -> int:
        """What rank zero has sent to other ranks since the start, of tensors."""
        return self._groups.sent_bytes

    def execute(self, output: SchedulerOutput, drawn: torch.Tensor | None) -> torch.Tensor:
        """Tell all ranks of a step; see Runner. No token of it may be pending."""
        message = b""
        if output.scheduled or output.copies or output.loads:
            message = self._teller.tell(output)
            with self._explained():
                self._workers.tell_step(message, self._timeout_s)
        logits = self._next_logits(len(output.sampling))
        self._started.append(_Started(message, output.scored, logits))
        return logits

    def finish(self) -> None:
        """Do this rank's part of the oldest step that is started; see Runner.

        Raises:
            EngineError: another rank is gone or does not answer; the message names it.
        """
        with self._explained():
            self._finish()
        self._watch.mark()

    def wait(self) -> None:
        """Wait for the device, and look after the other ranks meanwhile; see Runner."""
        self._watch.wait()

    def pop_scores(self) -> PromptScores:
        """Return what the last finished step found out of its `output.scored`."""
        scores, self._scores = self._scores, None
        assert scores is not None, "the last step scored nothing"
        return scores

    def arrived(self) -> tuple[int, ...]:
        """Return the ids of swap-ins that are done, each once."""
        return self._part.transfers.arrived()

    def arrived_adapters(self, timeout_s: float) -> tuple[AdapterArrival, ...]:
        """Return what has become of adapters that all ranks were to read; see Runner."""
        if timeout_s > 0.0:  # nothing else would tell meanwhile that a rank is gone
            self._workers.check()
        return self._reports.pop(timeout_s)

    def check_processes(self) -> None:
        """Raise EngineError, which names it, if another rank is gone."""
        self._workers.check()

    def _finish(self) -> None:
        started = self._started.popleft()
        computed = self._part.compute(started.message) if started.message else None
        if computed is None:
            self._part.transfers.wait()
            return
        states, decoder = computed.states, self._part.model.decoder
        if started.scored:
            project = functools.partial(decoder.project, states)
            self._scores = PromptScores(started.scored, project, self._part.model.device)
        decoder.project(states, computed.logits_rows, started.logits)

    def _load(
        self, config: EngineConfig, shard: Shard, rendezvous: Rendezvous, device: torch.device
    ) -> None:
        with self._explained():
            self._groups = ProcessGroups(shard, device, rendezvous)
        self._opened.callback(self._groups.abort)
        self._watch = make_step_watch(device, self._workers, self._timeout_s)
        started_s = time.monotonic()
        self._reports = AdapterReports(rendezvous.store, config.num_ranks)
        self._part = Part(config, shard, self._groups, device, self._reports.own.put)
        model = self._part.model
        self.adapters, self.num_adapter_slots = model.adapters.named, model.adapters.num_slots
        steps = WarmUpSteps(self._part.sizes)
        self.vocab_size, self.eos_token_ids = model.spec.vocab_size, model.spec.eos_token_ids
        self.max_model_len = model.max_model_len
        self.window = widest_window(model.spec.windows)
        no_logits = torch.empty((0, self.vocab_size), device=model.device)
        # Kept between steps: to get as much memory from the system anew takes part of a step.
        self._logits = deque([no_logits] * self.num_stages)
        self._teller = StepTeller(config.block_size, _KNOWN_PER_SEQ * config.max_num_seqs)
        self._workers.hear(Loaded, _LOAD_TIMEOUT_S + time.monotonic() - started_s)
        needed_bytes = peak_bytes(model.device, lambda: steps.run_all(self._run))
        prefill_tokens_per_s = steps.measure_prefill(self._run)
        with self._explained():
            self._workers.tell_step(b"", self._timeout_s)
        num_ranks_here = count_ranks_here(rendezvous, config.num_ranks)
        own = self._part.choose_blocks(needed_bytes, num_ranks_here)
        self.num_blocks, self.num_host_blocks = astuple(self._agree(own))
        self.costs = measure_costs(
            self._part.transfers,
            min(self.num_blocks, self.num_host_blocks),
            model.attention.shape.bytes_per_block,
            prefill_tokens_per_s,
        )

    def _agree(self, own: Blocks) -> Blocks:
        """Let all ranks have as many blocks as the one with the least room."""
        all_blocks = [own, *(blocks for _, blocks in self._workers.hear(Blocks, _LOAD_TIMEOUT_S))]
        least = Blocks(
            min(blocks.num_device for blocks in all_blocks),
            min(blocks.num_host for blocks in all_blocks),
        )
        self._workers.tell(least)
        self._part.allocate(least)
        self._workers.hear(Ready, _LOAD_TIMEOUT_S)
        return least

    def _run(self, output: SchedulerOutput) -> torch.Tensor:
        logits = self.execute(output, None)
        self.finish()
        self.wait()
        return logits

    def _next_logits(self, num_rows: int) -> torch.Tensor:
        """Return memory [rows, vocab_size] that no step holds any more."""
        self._logits.rotate(1)
        if num_rows > len(self._logits[0]):
            device = self._part.model.device
            self._logits[0] = torch.empty((num_rows, self.vocab_size), device=device)
        return self._logits[0][:num_rows]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Let an error of another rank name the one that failed."""
        try:
            yield
        except EngineError as error:
            raise self._workers.explain(str(error)) from error

    def _describe(self) -> str:
        """Say what was chosen, for the log."""
        model = self._part.model
        return (
            f"{model.spec.architecture} on {len(self._workers.pids) + 1} ranks, rank 0 on "
            f"{model.device}, attention {model.decoder.attention.name}, "
            f"{self.num_blocks:,} KV blocks"
        )


def _look_at(config: EngineConfig) -> tuple[Shard, str]:
    """Return rank zero's place and what its files look like, before others are started."""
    directory = configured_checkpoint(config)
    choose_tier(directory, config)  # or it says what several ranks take
    spec = read_spec(directory, trust_remote_code=config.trust_remote_code)
    shard = Shard.of(0, config.tensor_parallel_size, config.pipeline_parallel_size)
    ModelPart.of(spec, shard)
    return shard, fingerprint(directory, adapter_directories(config))


def _end(workers: Workers, opened: ExitStack) -> None:
    workers.end()
    opened.close()
