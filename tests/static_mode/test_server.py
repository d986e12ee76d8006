"""Models that cannot be paged, through a real Triton server that loads them on demand."""

from __future__ import annotations

import random
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import psutil
import pytest

from octavo.local.bundle import write_repository
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer
from octavo_client import Client, Delta, InvalidRequest, Unavailable

pytestmark = pytest.mark.e2e

MODELS = ("mamba", "jamba", "bloom", "deepseek_v3", "t5", "bart")
FIRST, *OTHERS = MODELS
PROMPTS = [
    [random.Random(place).randrange(8, 257) for place in range(length)]
    for length in (5, 19, 12, 5, 30)
]
GREEDY = {"temperature": 0, "max_tokens": 12}
LONG = {"temperature": 0, "max_tokens": 3_000, "ignore_eos": True}
ENGINE = "octavo.engine_process"

GenerateAlone = Callable[..., list[int]]
Load = Callable[[str, bool], None]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]
) -> Iterator[TritonServer]:
    """Return a server that has loaded the first model, and loads the others when it is told."""
    repository = tmp_path_factory.mktemp("repository")
    for name in MODELS:
        options = {"model": str(checkpoint(name)), "max_num_seqs": 4, "device": "cpu"}
        options["allow_inspect"] = True
        write_repository(repository, options)
        (repository / "octavo").rename(repository / name)
    options = ServerOptions(
        repository=repository,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment={"OCTAVO_CPU_THREADS": "1"},
        flags=("--model-control-mode=explicit", f"--load-model={FIRST}"),
    )
    server = TritonServer(options)
    server.start()
    try:
        server.wait_ready(120.0)
        yield server
    finally:
        server.kill()


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, model=FIRST, timeout_s=60) as client:
        yield client


@pytest.fixture
def load(server: TritonServer) -> Load:
    """Return a function that loads a model, or unloads it."""

    def tell(name: str, stays: bool) -> None:
        url = f"{server.http_url}/v2/repository/models/{name}/{'load' if stays else 'unload'}"
        with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=120) as answer:
            assert answer.status == 200

    return tell


def become(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (came := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return came


def engine_of(server: TritonServer) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    (engine,) = [child for child in children if ENGINE in child.cmdline()]
    return engine


def metric(server: TritonServer, name: str) -> float:
    """Return a metric of the first model."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f'octavo_{name}{{model="{FIRST}"')]
    return float(line.split()[-1])


def token_ids_of(deltas: Iterable[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_a_stream_has_the_tokens_that_transformers_generates(
    client: Client, generate_alone: GenerateAlone
) -> None:
    deltas = list(client.stream(input_ids=PROMPTS[0], **GREEDY))
    assert token_ids_of(deltas) == generate_alone(FIRST, PROMPTS[0], 12)
    assert len(deltas) > 1
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].timing is not None


def test_a_stream_that_is_closed_lets_the_next_request_in(
    client: Client, generate_alone: GenerateAlone
) -> None:
    with client.stream(input_ids=PROMPTS[0], **LONG) as stream:
        first = token_ids_of(islice(stream, 3))
    answer = client.generate(input_ids=PROMPTS[1], **GREEDY)
    assert list(answer.token_ids) == generate_alone(FIRST, PROMPTS[1], 12)
    assert first == list(client.generate(input_ids=PROMPTS[0], **GREEDY).token_ids)[: len(first)]


def test_a_deadline_ends_a_request_with_what_it_has(client: Client) -> None:
    answer = client.generate(input_ids=PROMPTS[0], deadline_ms=1000, **LONG)
    assert answer.finish_reason == "deadline"
    assert 0 < answer.num_output_tokens < LONG["max_tokens"]


def test_metrics_and_inspect_tell_of_a_batch(server: TritonServer, client: Client) -> None:
    with client.stream(input_ids=PROMPTS[0], n=2, **LONG) as stream:
        next(stream)
        view = client.inspect()
        assert [each["status"] for each in view["sequences"]] == ["running", "running"]
        assert view["sequences"][0]["num_prompt_tokens"] == len(PROMPTS[0])
        assert become(lambda: metric(server, "num_requests_running") == 1)
        assert become(lambda: metric(server, "kv_blocks_used") > 0)
    assert become(lambda: metric(server, "kv_blocks_used") == 0)
    assert metric(server, "prefix_cache_queries_total") == 0


def test_a_stop_string_ends_a_text_before_it(client: Client) -> None:
    whole = client.generate(input_ids=PROMPTS[0], temperature=0, max_tokens=60).text
    place = next(place for place, letter in enumerate(whole) if place and letter.isascii())
    answer = client.generate(input_ids=PROMPTS[0], **LONG, stop=whole[place])
    assert answer.text == whole[: whole.index(whole[place])]
    assert answer.finish_reason == "stop"


def test_bad_requests_do_no_harm_to_those_in_the_same_batches(
    client: Client, generate_alone: GenerateAlone
) -> None:
    bad = {
        "beam_width is 2 but must be 1 in the traditional mode": {"beam_width": 2},
        "n is 5 but max_num_seqs is 4": {"n": 5},
        "must have a character": {"stop": ""},
        r"prompt has 4,096 tokens but max_model_len is 4,096": {"input_ids": [9] * 4096},
        "structured_outputs": {"structured_outputs": {"regex": "(("}},
    }

    def ask(prompt: list[int]) -> list[int]:
        return list(client.generate(input_ids=prompt, **GREEDY).token_ids)

    def ask_badly(message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            client.generate(**{"input_ids": PROMPTS[0], **GREEDY, **bad[message]})

    with ThreadPoolExecutor(16) as threads:
        good = [threads.submit(ask, prompt) for prompt in PROMPTS]
        list(threads.map(ask_badly, bad))
        answers = [each.result() for each in good]
    assert answers == [generate_alone(FIRST, prompt, 12) for prompt in PROMPTS]


def test_a_killed_engine_fails_its_requests_and_comes_back_by_itself(
    server: TritonServer, client: Client
) -> None:
    before = client.generate(input_ids=PROMPTS[0], **GREEDY)
    stream = client.stream(input_ids=PROMPTS[1], **LONG)
    next(stream)
    engine_of(server).kill()
    with pytest.raises(Unavailable, match=r"engine process died \(signal 9, SIGKILL\)"):
        list(stream)
    assert become(lambda: client.engine_health().engine == "ready")
    assert client.generate(input_ids=PROMPTS[0], **GREEDY) == before


@pytest.mark.parametrize("name", OTHERS)
def test_the_mode_serves(
    name: str, server: TritonServer, load: Load, generate_alone: GenerateAlone
) -> None:
    load(name, True)
    with Client(server.grpc_url, model=name, timeout_s=60) as client:

        def ask(prompt: list[int]) -> list[int]:
            return token_ids_of(client.stream(input_ids=prompt, **GREEDY))

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, PROMPTS))
    assert answers == [generate_alone(name, prompt, 12) for prompt in PROMPTS]
    load(name, False)
