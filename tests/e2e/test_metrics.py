"""What a real server's metrics endpoint says is exactly what its clients got."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest, OctavoClientError, RequestCancelled

pytestmark = pytest.mark.e2e

Figures = dict[str, float]
Metrics = Callable[[TritonServer], Figures]
Become = Callable[..., bool]
Watch = Callable[[TritonServer], Callable[[int], Figures]]

ENDS = ("stop", "length", "abort", "deadline", "error")
LONG = {"max_tokens": 30_000, "ignore_eos": True, "seed": 1}
EXACTLY = {"ignore_eos": True, "temperature": 0}
PROMPTS = ([5, 6, 7, 8, 9], [15, 16, 17, 18, 19, 20], [25, 26, 27, 28, 29, 30, 31])
NUM_PROMPT_TOKENS = sum(map(len, PROMPTS))


def _num_finals(figures: Figures) -> float:
    return sum(figures[f"requests_total {reason}"] for reason in ENDS)


def _ends(figures: Figures) -> dict[str, float]:
    counts = {reason: figures[f"requests_total {reason}"] for reason in ENDS}
    return {reason: count for reason, count in counts.items() if count}


def _rejections(figures: Figures) -> dict[str, float]:
    name = "admission_rejections_total "
    return {
        key.removeprefix(name): count
        for key, count in figures.items()
        if key.startswith(name) and count
    }


@pytest.fixture
def watch(metrics: Metrics, become: Become) -> Watch:
    """Return a function that, for an idle server, gives one that says what has grown since.

    That one waits until a number of final answers is counted and nothing changes any more.
    """

    def settled(server: TritonServer) -> Figures:
        last: list[Figures] = [{}, metrics(server)]

        def is_settled() -> bool:
            time.sleep(0.15)
            last[:] = last[1], metrics(server)
            return last[0] == last[1]

        assert become(is_settled)
        return last[1]

    def begin(server: TritonServer) -> Callable[[int], Figures]:
        before = settled(server)

        def growth(num_finals: int) -> Figures:
            expected = _num_finals(before) + num_finals
            assert become(lambda: _num_finals(metrics(server)) == expected)
            return {name: value - before[name] for name, value in settled(server).items()}

        return growth

    return begin


def test_three_prompts_of_sixteen_tokens_are_counted_to_the_token(
    tiny_server: TritonServer, watch: Watch
) -> None:
    growth_until = watch(tiny_server)
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        started = time.monotonic()
        for prompt in PROMPTS:
            client.generate(input_ids=prompt, max_tokens=16, **EXACTLY)
        elapsed_s = time.monotonic() - started
    growth = growth_until(3)
    assert _ends(growth) == {"length": 3}
    assert growth["prompt_tokens_total"] == NUM_PROMPT_TOKENS == 18
    assert growth["generation_tokens_total"] == 48
    for name, count in {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 45,
        "e2e_request_latency_seconds": 3,
        "request_queue_time_seconds": 3,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
        "iteration_tokens": 48,
        "step_duration_seconds": 48,
    }.items():
        assert (name, growth[f"{name}_count"]) == (name, count)
        assert growth[f"{name}_bucket +Inf"] == count
    assert growth["engine_steps_total"] == 48
    assert growth["request_prompt_tokens_sum"] == 18
    assert growth["request_prompt_tokens_bucket 5"] == 1
    assert growth["request_generation_tokens_sum"] == 48
    assert growth["request_generation_tokens_bucket 10"] == 0
    assert growth["request_generation_tokens_bucket 20"] == 3
    assert growth["iteration_tokens_sum"] == 18 + 45, "the last token of each is never computed"
    assert growth["iteration_tokens_bucket 1"] == 45
    to_first_s, between_s = (
        growth[f"{name}_seconds_sum"] for name in ("time_to_first_token", "inter_token_latency")
    )
    whole_s = growth["e2e_request_latency_seconds_sum"]
    assert 0 < growth["request_queue_time_seconds_sum"] < to_first_s
    assert to_first_s + between_s < whole_s < elapsed_s
    assert 0 < growth["step_duration_seconds_sum"] < elapsed_s


def test_an_answer_that_a_stop_string_ends_counts_up_to_it(
    tiny_server: TritonServer, watch: Watch
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        whole = client.generate(input_ids=PROMPTS[0], max_tokens=40, **EXACTLY).text
        growth_until = watch(tiny_server)
        stop = whole[len(whole) // 2 :][:2]
        stopped = client.generate(input_ids=PROMPTS[0], max_tokens=40, stop=stop, **EXACTLY)
    growth = growth_until(1)
    assert _ends(growth) == {"stop": 1}
    num_tokens = stopped.num_output_tokens
    assert 1 < num_tokens < 40
    assert growth["generation_tokens_total"] == num_tokens
    assert growth["request_generation_tokens_sum"] == num_tokens
    assert growth["inter_token_latency_seconds_count"] == num_tokens - 1
    assert growth["request_queue_time_seconds_count"] == 1


def test_a_request_of_three_answers_counts_once_and_its_tokens_all(
    tiny_server: TritonServer, watch: Watch
) -> None:
    growth_until = watch(tiny_server)
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        client.generate(input_ids=PROMPTS[1], n=3, max_tokens=10, ignore_eos=True, seed=1)
    growth = growth_until(1)
    assert _ends(growth) == {"length": 1}
    assert growth["prompt_tokens_total"] == growth["request_prompt_tokens_sum"] == 6
    assert growth["generation_tokens_total"] == growth["request_generation_tokens_sum"] == 30
    assert growth["time_to_first_token_seconds_count"] == 1
    assert growth["inter_token_latency_seconds_count"] == 27


def test_a_cancelled_request_counts_by_the_tokens_that_came(
    tiny_server: TritonServer, watch: Watch
) -> None:
    growth_until = watch(tiny_server)
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        stream = client.stream(input_ids=PROMPTS[2], **LONG)
        for _ in range(3):
            next(stream)
        stream.close()
        growth = growth_until(1)
    assert _ends(growth) == {"abort": 1}
    assert growth["prompt_tokens_total"] == 7
    assert growth["generation_tokens_total"] >= 3
    assert growth["time_to_first_token_seconds_count"] == 1
    num_intervals = growth["inter_token_latency_seconds_count"]
    assert num_intervals == growth["generation_tokens_total"] - 1
    for name in (
        "e2e_request_latency_seconds",
        "request_generation_tokens",
        "request_prompt_tokens",
    ):
        assert growth[f"{name}_count"] == 0


def test_refused_requests_count_by_reason_and_bring_no_samples(
    tiny_server: TritonServer, watch: Watch
) -> None:
    growth_until = watch(tiny_server)
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        with pytest.raises(InvalidRequest, match="temperature is -1"):
            client.generate("x", temperature=-1)
        with pytest.raises(InvalidRequest, match="prompt has 40,000 tokens"):
            client.generate(input_ids=[1] * 40_000)
    growth = growth_until(2)
    assert _ends(growth) == {"error": 2}
    assert _rejections(growth) == {"invalid_request": 1, "prompt_too_long": 1}
    assert {growth[name] for name in growth if name.endswith(("_count", "_sum"))} == {0}


def test_a_deadline_counts_with_its_tokens_if_it_had_any(
    tiny_server: TritonServer, watch: Watch
) -> None:
    growth_until = watch(tiny_server)
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        late = client.generate(input_ids=PROMPTS[0], **LONG, deadline_ms=300)
    growth = growth_until(1)
    assert _ends(growth) == {"deadline": 1}
    assert growth["generation_tokens_total"] == late.num_output_tokens
    assert growth["request_generation_tokens_sum"] == late.num_output_tokens
    assert growth["e2e_request_latency_seconds_count"] == 1


def test_a_deadline_met_in_the_queue_counts_as_time_in_the_queue(
    narrow_server: TritonServer, metrics: Metrics, become: Become
) -> None:
    with Client(narrow_server.grpc_url, timeout_s=60) as client:
        streams = [client.stream("x", **LONG) for _ in range(2)]
        for stream in streams:
            next(stream)
        with pytest.raises(RequestCancelled):
            client.generate("x", n=2, deadline_ms=300)
        assert become(lambda: _ends(metrics(narrow_server)) == {"deadline": 1})
        for stream in streams:
            stream.close()
    assert become(lambda: _ends(metrics(narrow_server)) == {"deadline": 1, "abort": 2})
    assert become(lambda: metrics(narrow_server)["time_to_first_token_seconds_count"] == 2)
    figures = metrics(narrow_server)
    assert figures["request_queue_time_seconds_count"] == 1
    assert 0.3 <= figures["request_queue_time_seconds_sum"] < 5.0


def test_as_many_requests_are_counted_as_clients_saw_finals(
    tiny_server: TritonServer, watch: Watch
) -> None:
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 20, **EXACTLY},
        {"max_tokens": 9, "n": 3, "ignore_eos": True},
        {"temperature": -1},
        {**LONG, "deadline_ms": 200},
        {**LONG, "deadline_ms": 0.001},
        {"max_tokens": 5, "beam_width": 2, "n": 2},
    ]

    def ask(number: int) -> str:
        with Client(tiny_server.grpc_url, timeout_s=60) as client:
            try:
                completion = client.generate(f"request {number}", **kinds[number % len(kinds)])
            except OctavoClientError as error:
                return "deadline" if isinstance(error, RequestCancelled) else "error"
        return str(completion.answers[0].finish_reason)

    growth_until = watch(tiny_server)
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(ask, range(4 * len(kinds))))
    growth = growth_until(len(seen))
    assert _ends(growth) == {reason: seen.count(reason) for reason in set(seen)}
