"""Tiny models to run, makers of steps that name their blocks, and a device's parts without one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.cache.block_copies import BlockCopies
from octavo.config import EngineConfig
from octavo.executor.device_inputs import StagedInputs
from octavo.executor.device_tools import DeviceTools
from octavo.executor.graphs import DecodeGraphs
from octavo.executor.model_runner import ModelRunner
from octavo.scheduler.output import ScheduledSequence, SchedulerOutput
from octavo.sequence import Sequence


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny random checkpoints: every layer of `mistral` sees 20 tokens."""
    made = {}
    for family, extra in {"llama": {}, "mistral": {"sliding_window": 20}}.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(
            family,
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=7,
            **extra,
        )
        made[family] = tmp_path_factory.mktemp(family)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(std=0.2)
        model.save_pretrained(made[family])
    return made


@pytest.fixture(scope="session")
def make_runner(checkpoints) -> Callable[..., ModelRunner]:
    """Load a tiny model with 8 blocks of 8 tokens, and as many on the host."""

    def make(
        family: str = "llama", make_transfers: Any = None, make_tools: Any = None, **options: Any
    ) -> ModelRunner:
        values = {"block_size": 8, "num_kv_blocks": 8, "swap_space_bytes": 8 * BYTES_PER_BLOCK}
        values |= {"max_num_seqs": 4, "cpu_threads": 1, **options}
        config = EngineConfig(str(checkpoints[family]), **values)
        made = {"make_transfers": make_transfers, "make_tools": make_tools}
        return ModelRunner(config, **{name: maker for name, maker in made.items() if maker})

    return make


#: 2 layers, keys and values, 2 heads of 8 floats, 8 tokens.
BYTES_PER_BLOCK = 2 * 2 * 2 * 8 * 4 * 8


@pytest.fixture(scope="session")
def bytes_per_block() -> int:
    return BYTES_PER_BLOCK


@pytest.fixture(scope="session")
def make_step() -> Callable[..., SchedulerOutput]:
    """Make a step in which these sequences compute all they know and draw."""

    def make(*sequences: Sequence, **copies: Any) -> SchedulerOutput:
        shares = [ScheduledSequence(s, s.num_uncomputed_tokens, (s,)) for s in sequences]
        return SchedulerOutput(tuple(shares), copies=BlockCopies(**copies))

    return make


class LazyStream:
    """A stream whose copies happen only when somebody waits for a mark behind them."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.num_waits = 0
        self.after_copy: Callable[[], object] = lambda: None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queue.append(lambda: (target.copy_(source), self.after_copy()))

    def record_event(self) -> LazyEvent:
        event = LazyEvent(self)
        self.queue.append(event.set)
        return event

    def wait_event(self, event: LazyEvent) -> None:
        event.synchronize()


class LazyEvent:
    """A mark that work has reached when all before it is done."""

    def __init__(self, stream: LazyStream) -> None:
        self._stream = stream
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def query(self) -> bool:
        return self._is_set

    def synchronize(self) -> None:
        self._stream.num_waits += not self._is_set
        while not self._is_set:
            self._stream.queue.popleft()()


class PromptStream(LazyStream):
    """A stream that makes each copy when it is asked to."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


@pytest.fixture
def lazy_stream() -> LazyStream:
    return LazyStream()


@pytest.fixture(scope="session")
def staged_inputs() -> Callable[..., StagedInputs]:
    """Make inputs that are copied at once, or when the given stream is waited for."""

    def make(sizes: Any, stream: LazyStream | None = None) -> StagedInputs:
        stream = stream or PromptStream()
        return StagedInputs(sizes, torch.device("cpu"), stream=stream, copy=stream.copy)

    return make


class Watch(TorchDispatchMode):
    """Write down what a recorder would freeze of each torch operation: numbers and addresses.

    Tensors that the operations make themselves have no lasting address, and are told by shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen: list[Any] = []
        self._made: dict[int, torch.Tensor] = {}
        self._lasting: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values = tree_flatten((args, kwargs))[0]
        self.frozen.append((str(function), [self._describe(value) for value in values]))
        output = function(*args, **kwargs)
        for tensor in filter(torch.is_tensor, tree_flatten(output)[0]):
            if _address(tensor) not in self._lasting:
                # Kept, or its address might be another's later on.
                self._made[_address(tensor)] = tensor
        return output

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kind = (value.dtype, tuple(value.shape))
        if value.is_mkldnn:
            return (id(value), *kind)
        if _address(value) in self._made:
            return ("made", *kind, value.stride(), value.storage_offset())
        self._lasting.add(_address(value))
        return (_address(value), *kind, value.stride(), value.storage_offset())


def _address(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class FakeCapture:
    """Work that is done anew at each replay, if it is what was recorded.

    Args:
        work: returns the tensor that receives its result.
    """

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._result, self._recorded = self._run()
        self.num_replays = 0

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return len(self._result)

    def replay(self) -> None:
        self._result.fill_(float("nan"))
        _, replayed = self._run()
        for now, then in zip(replayed.frozen, self._recorded.frozen, strict=True):
            assert now == then, "a graph would do what was recorded"
        self.num_replays += 1

    def _run(self) -> tuple[torch.Tensor, Watch]:
        with Watch() as watch:
            result = self._work()
        return result, watch


class FakeRecorder:
    """A recorder of work on the CPU, which fails where a graph would do something else."""

    def __init__(self) -> None:
        self.captures: list[FakeCapture] = []

    def record(self, work: Callable[[], torch.Tensor]) -> FakeCapture:
        work()
        self.captures.append(FakeCapture(work))
        return self.captures[-1]

    @property
    def num_replays(self) -> int:
        return sum(capture.num_replays for capture in self.captures)


@pytest.fixture
def fake_recorder() -> FakeRecorder:
    return FakeRecorder()


@pytest.fixture
def graph_tools(fake_recorder, staged_inputs) -> Callable[..., DeviceTools]:
    """Make a CPU look like a device that computes behind the host's back and records graphs."""

    def make(device: torch.device, attention: Any, sizes: Any) -> DeviceTools:
        inputs = staged_inputs(sizes)
        return DeviceTools(
            steps_ahead=1,
            inputs=inputs,
            make_graphs=lambda *cached: DecodeGraphs(*cached, inputs, fake_recorder),
        )

    return make
