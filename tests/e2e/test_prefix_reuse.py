"""Prompts that begin alike: what a request says of its cached tokens, and what the counters say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.local.triton_server import TritonServer
from octavo_client import Client, Completion

pytestmark = pytest.mark.e2e

Metrics = Callable[[TritonServer], dict[str, float]]
Become = Callable[..., bool]
Post = Callable[..., tuple[int, str]]
OpenExchange = Callable[[TritonServer], Any]
StartServer = Callable[..., TritonServer]

BLOCK_SIZE = 16
#: 100 tokens are 6 full blocks and 4 tokens more.
PROMPT = list(range(1000, 1100))
CACHED = 6 * BLOCK_SIZE


def _cached_tokens(completion: Completion) -> int:
    assert completion.timing is not None
    return completion.timing.cached_tokens


def test_repeated_prompt_is_cached_for_its_own_salt_only(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        first, other, again = (
            client.generate(input_ids=PROMPT, max_tokens=4, seed=1, cache_salt=salt)
            for salt in ("mine", "other", "mine")
        )
    assert [_cached_tokens(each) for each in (first, other, again)] == [0, 0, CACHED]
    assert first.token_ids == other.token_ids == again.token_ids


def test_tokens_of_an_answer_are_cached_for_the_next_turn(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url, timeout_s=60) as client:
        options = {"max_tokens": 40, "ignore_eos": True, "seed": 2, "cache_salt": "turns"}
        first = client.generate(input_ids=PROMPT, **options)
        second = client.generate(input_ids=[*PROMPT, *first.token_ids, 7, 8, 9], **options)
    # Of its 140 tokens the last was never computed, so 8 blocks of 16 are full.
    assert _cached_tokens(second) == 8 * BLOCK_SIZE


def test_timing_is_sent_when_it_is_asked_for(
    tiny_server: TritonServer, post: Post, exchange: OpenExchange
) -> None:
    body = {"text_input": "a b c", "return_timing": True, "parameters": {"max_tokens": 20}}
    status, answer = post(tiny_server, "models/octavo/generate", body)
    assert status == 200
    over_http = json.loads(json.loads(answer)["timing"])
    with exchange(tiny_server) as stream:
        sampling = '{"max_tokens": 20, "ignore_eos": true}'
        tensors = {"text_input": "a b c", "stream": True, "return_timing": True}
        stream.send({**tensors, "sampling_parameters": sampling})
        *others, last = stream.receive_all()
    assert not any("timing" in response.outputs for response in others)
    over_grpc = json.loads(last.outputs["timing"][0])
    for timing in (over_http, over_grpc):
        times = ("queue_ms", "prefill_ms", "decode_ms", "preempted_ms")
        assert [*timing] == [*times, "cached_tokens", "preemptions"]
        assert all(timing[name] >= 0 for name in times)
        assert timing["preempted_ms"] == timing["cached_tokens"] == timing["preemptions"] == 0
    assert over_grpc["decode_ms"] > 0


def test_counters_are_exact(start_server: StartServer, metrics: Metrics, become: Become) -> None:
    server = start_server()
    with Client(server.grpc_url, timeout_s=60) as client:
        for salt in ("a", "b", "a", "a"):
            client.generate(input_ids=PROMPT, max_tokens=2, cache_salt=salt)
    assert become(lambda: metrics(server)["prefix_cache_queries_total"] == 400)
    found = metrics(server)
    assert found["prefix_cache_hits_total"] == 2 * CACHED
    assert found["kv_blocks_cached"] == 2 * 6
    assert found["kv_blocks_used"] == found["num_requests_swapped"] == 0
    assert found["cpu_kv_blocks_used"] == 0
    assert found["preemptions_total swap"] == found["preemptions_total recompute"] == 0
