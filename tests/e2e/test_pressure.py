"""More requests at once than the KV pool holds: they are preempted, and none is harmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, InvalidRequest

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]

# Each sequence grows to 11 or 12 blocks: 40 of them hold three, not 24.
NUM_STREAMS = 24


def request(index: int) -> dict[str, Any]:
    prompt = [100 + index] * (8 + index)
    return {"input_ids": prompt, "max_tokens": 160, "seed": index, "ignore_eos": True}


def counted_preemptions(figures: dict[str, float]) -> float:
    return figures["preemptions_total swap"] + figures["preemptions_total recompute"]


def test_requests_beyond_the_pool_all_end_with_the_right_tokens(
    tiny_server: TritonServer, cramped_server: TritonServer, metrics: Metrics, become: Become
) -> None:
    with Client(tiny_server.grpc_url, timeout_s=120) as roomy:
        right = [roomy.generate(**request(i)).token_ids for i in range(NUM_STREAMS)]
    with Client(cramped_server.grpc_url, timeout_s=120) as client:
        streams = [client.stream(**request(i)) for i in range(NUM_STREAMS)]
        deltas = [list(stream) for stream in streams]
    answers = [tuple(token for delta in each for token in delta.token_ids) for each in deltas]
    assert answers == right
    assert become(lambda: metrics(cramped_server)["kv_blocks_used"] == 0)
    assert metrics(cramped_server)["kv_blocks_total"] == 40
    preemptions = sum(each[-1].timing.preemptions for each in deltas)
    assert preemptions > 0
    assert become(lambda: counted_preemptions(metrics(cramped_server)) == preemptions)
    assert any(each[-1].timing.preempted_ms > 0 for each in deltas)
    num_tokens = sum(map(len, answers))
    intervals = "inter_token_latency_seconds_count"
    assert become(lambda: metrics(cramped_server)[intervals] == num_tokens - NUM_STREAMS)
    found = metrics(cramped_server)
    assert found["generation_tokens_total"] == num_tokens, "none counts again after a preemption"
    assert found["time_to_first_token_seconds_count"] == NUM_STREAMS
    assert found["prompt_tokens_total"] == sum(
        len(request(i)["input_ids"]) for i in range(NUM_STREAMS)
    )


def test_prompt_beyond_the_whole_pool_is_refused_and_the_longest_that_fits_is_answered(
    cramped_server: TritonServer,
) -> None:
    with Client(cramped_server.grpc_url, timeout_s=60) as client:
        with pytest.raises(InvalidRequest, match="640 tokens but the 40 KV blocks hold 640"):
            client.generate(input_ids=[5] * 640)
        answer = client.generate(input_ids=[5] * 639, ignore_eos=True)
    assert (answer.num_output_tokens, answer.finish_reason) == (1, "length")
