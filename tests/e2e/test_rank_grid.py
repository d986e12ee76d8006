"""A model on two stages of two ranks does all that one rank does, and fails in good order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.local.bundle import write_repository
from octavo.local.triton_server import TritonServer
from octavo.model.shard import Shard
from octavo_client import Client, Completion, Unavailable

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
Post = Callable[..., tuple[int, str]]

MODELS = "repository/models"
#: The second rank of two.
OTHER = Shard.of(1, 2, 1)
PAIR = {"device": "cpu", "cpu_threads": 1, "tensor_parallel_size": 2, "num_kv_blocks": 40}
#: 40 blocks hold three of the longest sequences below at once.
GRID = {
    **PAIR,
    "pipeline_parallel_size": 2,
    "swap_space_bytes": 1 << 20,
    "preemption_mode": "swap",
    "step_timeout_s": 4,
}
PREFIX = list(range(1000, 1064))
GREEDY = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
SEEDED = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "ignore_eos": True}
LONG = {"max_tokens": 30_000, "ignore_eos": True, "input_ids": [5]}


@pytest.fixture(scope="module")
def repository(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of the tiny model on a grid, and of a copy of it on two ranks."""
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder, {**GRID, "model": str(tiny_checkpoint)})
    shutil.copytree(folder / "octavo", folder / "copy")
    checkpoint = shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    options = {**PAIR, "model": str(checkpoint)}
    (folder / "copy" / "1" / "engine.json").write_text(json.dumps(options))
    return folder


@pytest.fixture(scope="module")
def grid_server(
    repository: Path, serving_cleanly: Callable[..., AbstractContextManager[TritonServer]]
) -> Iterator[TritonServer]:
    """Return a server that has loaded the first of the two; nothing of it is left at the end."""
    with serving_cleanly(
        repository=repository,
        flags=("--model-control-mode=explicit", "--load-model=octavo"),
    ) as server:
        yield server


@pytest.fixture
def client(grid_server: TritonServer) -> Iterator[Client]:
    with Client(grid_server.grpc_url, timeout_s=60) as client:
        yield client


@pytest.fixture
def workers(
    grid_server: TritonServer, find_workers: Callable[[TritonServer], list[psutil.Process]]
) -> Callable[[], list[psutil.Process]]:
    """Return a function that finds the ranks of the server but the first, in their order."""
    return lambda: find_workers(grid_server)


def requests() -> list[dict[str, Any]]:
    """Return requests that between them use all that a request may ask for."""
    greedy = [{**GREEDY, "input_ids": [*PREFIX, 20 + index]} for index in range(4)]
    return [
        *greedy,
        {**GREEDY, "input_ids": list(range(2000, 2150)), "logprobs": 2, "prompt_logprobs": 1},
        {**SEEDED, "input_ids": [*PREFIX, 9], "n": 3, "logprobs": 0},
        {**SEEDED, "input_ids": [7, 8], "repetition_penalty": 1.2, "logit_bias": {"9": 3.0}},
        {"input_ids": [*PREFIX, 3], "beam_width": 3, "n": 2, "max_tokens": 12},
        {"prompt": "a", "structured_outputs": {"choice": ["yes", "no, sir"]}, "seed": 1},
        {"prompt": "the sea", "stop": ["e", "i"], "max_tokens": 50, "seed": 2},
    ]


def answered(client: Client) -> list[Completion]:
    """Return what is answered to all requests at once, while another is cancelled."""
    cancelled = client.stream(**LONG)
    next(cancelled)
    asks = requests()
    with ThreadPoolExecutor(len(asks)) as threads:
        answers = threads.map(lambda ask: client.generate(**ask), asks)
        cancelled.close()
        return list(answers)


def places(completion: Completion) -> list[Any]:
    """Return all log-probabilities of a completion, of its prompt too."""
    prompt = [each for each in completion.prompt_logprobs or () if each is not None]
    return [*prompt, *(each for answer in completion.answers for each in answer.logprobs)]


def test_all_that_requests_may_ask_for_is_answered_as_by_one_rank(
    tiny_server: TritonServer,
    grid_server: TritonServer,
    client: Client,
    workers: Callable[[], list[psutil.Process]],
    metrics: Metrics,
    become: Become,
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as alone:
        expected = answered(alone)
    found = answered(client)
    for ours, theirs in zip(found, expected, strict=True):
        assert [each.token_ids for each in ours.answers] == [
            each.token_ids for each in theirs.answers
        ]
        assert [each.text for each in ours.answers] == [each.text for each in theirs.answers]
        for mine, other in zip(places(ours), places(theirs), strict=True):
            assert [each.token_id for each in mine] == [each.token_id for each in other]
            assert [each.logprob for each in mine] == pytest.approx(
                [each.logprob for each in other], abs=1e-4
            )
    assert len(workers()) == 3
    assert become(lambda: metrics(grid_server)["kv_blocks_used"] == 0)
    figures = metrics(grid_server)
    assert figures["preemptions_total swap"] > 0
    assert figures["prefix_cache_hits_total"] >= len(PREFIX)
    assert figures["cpu_kv_blocks_used"] == 0


def test_a_rank_that_hangs_is_named_to_every_live_request_and_the_engine_comes_back(
    grid_server: TritonServer,
    client: Client,
    workers: Callable[[], list[psutil.Process]],
    metrics: Metrics,
    become: Become,
) -> None:
    right = client.generate("a", **GREEDY)
    streams = [client.stream(**LONG) for _ in range(3)]
    for stream in streams:
        next(stream)
    processes = workers()
    processes[-1].suspend()
    name = Shard.of(3, 2, 2)
    for stream in streams:
        with pytest.raises(Unavailable) as error:
            list(stream)
        assert str(error.value).startswith(f"no answer from {name}: ")
    assert become(lambda: not any(process.is_running() for process in processes))
    assert become(lambda: metrics(grid_server)["engine_up"] == 1, 60.0)
    assert client.generate("a", **GREEDY) == right
    assert become(lambda: metrics(grid_server)["kv_blocks_used"] == 0)


@pytest.fixture
def failed_load(
    grid_server: TritonServer,
    post: Post,
    workers: Callable[[], list[psutil.Process]],
    become: Become,
) -> Callable[[Callable[[], object]], str]:
    """Return a function: load the copy, do something as soon as its other rank is started, and
    return why the load failed. Nothing of the load is left then."""

    def load(meanwhile: Callable[[], object]) -> str:
        others = workers()
        with ThreadPoolExecutor(1) as thread:
            loading = thread.submit(post, grid_server, f"{MODELS}/copy/load", {})
            assert become(lambda: len(workers()) == len(others) + 1)
            meanwhile()
            status, answer = loading.result(timeout=60)
        assert status == 400
        assert become(lambda: workers() == others)
        return str(json.loads(answer)["error"])

    return load


def test_a_load_in_which_ranks_see_different_checkpoints_fails_and_names_one(
    repository: Path, failed_load: Callable[[Callable[[], object]], str]
) -> None:
    """As when it is still being copied: rank 0 looks before the others are started."""
    more = repository / "checkpoint" / "more.safetensors"
    reason = failed_load(lambda: more.write_bytes(b"more"))
    more.unlink()
    assert f"{OTHER} and rank 0 see different checkpoints: {repository}/checkpoint" in reason


def test_a_rank_that_cannot_load_is_named_and_another_load_succeeds(
    grid_server: TritonServer,
    repository: Path,
    client: Client,
    post: Post,
    workers: Callable[[], list[psutil.Process]],
    failed_load: Callable[[Callable[[], object]], str],
) -> None:
    checkpoint, away = repository / "checkpoint", repository / "away"
    reason = failed_load(lambda: checkpoint.rename(away))
    away.rename(checkpoint)
    assert f"{OTHER} failed to load: model '{checkpoint}' does not exist" in reason
    assert post(grid_server, f"{MODELS}/copy/load", {}) == (200, "")
    with Client(grid_server.grpc_url, "copy", timeout_s=60) as copy:
        assert copy.generate("a", **GREEDY) == client.generate("a", **GREEDY)
    assert len(workers()) == 4, "both models have their ranks side by side"
