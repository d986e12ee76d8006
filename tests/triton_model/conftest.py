"""Stand-ins for the server's side of the Python backend and for the engine."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.config import EngineConfig
from octavo.engine_client import EngineClient
from octavo.engine_host import EngineProcess, EngineThread
from octavo.restart_policy import RestartPolicy
from octavo.text.tokenizer import Tokenizer
from octavo.triton_model.metrics import EngineMetrics
from octavo.triton_model.request_record import Reporter
from octavo.triton_model.service import Service

FINAL = 1
_FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
_DTYPES = {str: np.object_, bytes: np.object_, bool: np.bool_, int: np.int32}


@dataclass
class FakeTensor:
    """A tensor of either direction."""

    tensor_name: str
    array: np.ndarray

    def name(self) -> str:
        return self.tensor_name

    def as_numpy(self) -> np.ndarray:
        return self.array


@dataclass
class FakeResponse:
    """What a model builds to answer."""

    output_tensors: list[FakeTensor] = field(default_factory=list)
    error: Any = None

    def output(self, name: str) -> Any:
        """Return the only element of an output, strings decoded; a list if there are more."""
        values = {t.name(): t.as_numpy() for t in self.output_tensors}[name].tolist()
        values = [v.decode() if isinstance(v, bytes) else v for v in values]
        return values[0] if len(values) == 1 else values


@dataclass
class FakeTritonError(Exception):
    message: str
    code: str

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"

    @property
    def reason(self) -> str:
        """The message without the code that every message opens with."""
        code, _, reason = self.message.partition(": ")
        assert code == self.code
        return reason


@dataclass
class FakeMetric:
    """Values that a series has had; a counter begins with 0, as in the server.

    Of a histogram these are its samples.
    """

    kind: str
    values: list[float] = field(default_factory=list)

    def set(self, value: float) -> None:
        assert self.kind == "gauge"
        self.values.append(value)

    def observe(self, value: float) -> None:
        assert self.kind == "histogram"
        self.values.append(value)

    def increment(self, value: float) -> None:
        assert self.kind == "counter"
        assert value > 0
        self.values.append((self.values or [0])[-1] + value)


class FakeMetricFamily:
    """Series by name, and behind it the value of the label that is not of every series."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    series: dict[str, FakeMetric]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name
        self._kind = kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:
        assert (buckets is not None) == (self._kind == "histogram")
        own = dict(labels)
        assert (own.pop("model"), own.pop("version")) == ("octavo", "1")
        name = " ".join([self._name, *own.values()])
        assert name not in self.series
        return self.series.setdefault(name, FakeMetric(self._kind))

    @classmethod
    def value(cls, name: str) -> float:
        """Return what a gauge or counter says."""
        return (cls.series[name].values or [0])[-1]

    @classmethod
    def samples(cls, name: str) -> list[float]:
        """Return what a histogram was given."""
        return list(cls.series[name].values)

    @classmethod
    def latest(cls) -> dict[str, float]:
        """Return the last value of every series that was written, but for histograms."""
        return {
            name: metric.values[-1]
            for name, metric in cls.series.items()
            if metric.values and metric.kind != "histogram"
        }


class RecordingSender:
    """Keeps responses and holds the model to the rules of a real sender."""

    def __init__(self) -> None:
        self.responses: list[FakeResponse] = []
        self.num_finals = 0
        self.cancelled = False
        self.broken = False
        self.violations: list[str] = []
        self._changed = threading.Condition()

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        with self._changed:
            if self.num_finals:
                self.violations.append("sent after the final flag")
            if response is None:
                self.violations.append("sent nothing but flags")
            if self.broken and response is not None and response.error is None:
                raise RuntimeError("no shared memory")
            assert response is not None
            self.responses.append(response)
            self.num_finals += flags & FINAL
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        if self.num_finals:
            self.violations.append("asked for cancellation after the final flag")
        return self.cancelled

    def wait_for(self, condition: Callable[[RecordingSender], bool]) -> None:
        with self._changed:
            met = self._changed.wait_for(lambda: condition(self), timeout=10.0)
            assert met, f"only these came: {self.responses}"

    def wait_final(self) -> RecordingSender:
        self.wait_for(lambda sender: sender.num_finals > 0)
        return self

    @property
    def text(self) -> str:
        return "".join(response.output("text_output") for response in self.responses)

    @property
    def error(self) -> FakeTritonError:
        """The error of the only response."""
        (response,) = self.responses
        assert isinstance(response.error, FakeTritonError), f"{response} is no error"
        return response.error


class FakeRequest:
    """A client's request; tensors are given by name, as Python values or arrays."""

    def __init__(
        self,
        parameters: Any = None,
        timeout_us: int = 0,
        request_id: str = "",
        trace_context: str | None = None,
        **tensors: Any,
    ) -> None:
        self._parameters = json.dumps(parameters or {})
        self._timeout_us = timeout_us
        self._request_id = request_id
        self._trace_context = trace_context
        self._tensors = [FakeTensor(name, _as_array(value)) for name, value in tensors.items()]
        self.sender = RecordingSender()

    def inputs(self) -> list[FakeTensor]:
        return self._tensors

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self._timeout_us

    def request_id(self) -> str:
        return self._request_id

    def trace(self) -> Any:
        return SimpleNamespace(get_context=lambda: self._trace_context)

    def get_response_sender(self) -> RecordingSender:
        return self.sender


def _as_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    values = value if isinstance(value, list) else [value]
    values = [item.encode() if isinstance(item, str) else item for item in values]
    return np.array(values, _DTYPES[type(values[0])])


def sampling(**keys: Any) -> str:
    return json.dumps({"temperature": 0, **keys})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer with one token a byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend)
    hf.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return Tokenizer(hf)


@pytest.fixture(scope="session")
def fake_engine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_engine", _FAKE_ENGINE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_engine"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pb_utils() -> Any:
    """Return a fresh stand-in for the module that exists only inside a Triton stub."""
    return SimpleNamespace(
        Tensor=FakeTensor,
        InferenceResponse=FakeResponse,
        TritonError=FakeTritonError,
        MetricFamily=type("MetricFamily", (FakeMetricFamily,), {"series": {}}),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )


@pytest.fixture
def make_request() -> Callable[..., FakeRequest]:
    return FakeRequest


@pytest.fixture
def make_client(fake_engine: ModuleType) -> Iterator[Callable[..., EngineClient]]:
    """Make clients of a fake engine, in a thread unless a process is asked for.

    Restarts begin after `first_delay_s`.
    """
    clients: list[EngineClient] = []

    def make(
        process: bool = False, model: str = "fake", first_delay_s: float = 0.5, **options: Any
    ) -> EngineClient:
        config = EngineConfig(model=model, **options)

        def start() -> EngineProcess | EngineThread:
            if process:
                return EngineProcess(config, [sys.executable, str(_FAKE_ENGINE)])
            return EngineThread(config, fake_engine.FakeEngine)

        restarts = RestartPolicy(first_delay_s=first_delay_s)
        clients.append(EngineClient(start, config.step_timeout_s, restarts))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def make_service(
    make_client: Callable[..., EngineClient], tokenizer: Tokenizer, pb_utils: Any
) -> Iterator[Callable[..., Service]]:
    """Make services on a fake engine; they are stopped, and their answers checked, afterwards."""
    services: list[Service] = []

    def make(
        drain_timeout_s: float = 0.0,
        allow_inspect: bool = False,
        reporters: tuple[Reporter, ...] = (),
        **options: Any,
    ) -> Service:
        client = make_client(**options)
        client.wait_ready()
        metrics = EngineMetrics(pb_utils, "octavo", "1")
        config = EngineConfig("fake", drain_timeout_s=drain_timeout_s, allow_inspect=allow_inspect)
        told = (metrics.report, *reporters)
        services.append(Service(client, tokenizer, pb_utils, metrics, told, config))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
def ask(make_request: Callable[..., FakeRequest]) -> Iterator[Callable[..., RecordingSender]]:
    """Send a request to a service; afterwards every sender must have one final, and no sins."""
    senders: list[RecordingSender] = []

    def send(service: Service, prompt: Any = None, **options: Any) -> RecordingSender:
        tensors = {
            name: options.pop(name)
            for name in list(options)
            if name.startswith(("return_", "exclude_", "input_ids", "messages", "stream"))
        }
        if prompt is not None:
            tensors["text_input"] = prompt
        request = make_request(sampling_parameters=sampling(**options), **tensors)
        senders.append(request.sender)
        service.accept(request)
        return request.sender

    yield send
    for sender in senders:
        sender.wait_final()
        assert sender.num_finals == 1
        assert sender.violations == []


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until something becomes true."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10.0
        while not condition():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.005)

    return wait
