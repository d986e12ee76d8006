import asyncio
import contextlib
import gc
import threading
import time
from functools import wraps

import pytest

from octavo_client import (
    Answer,
    AsyncClient,
    InvalidRequest,
    OctavoClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    Unavailable,
)


def in_event_loop(test):
    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


async def cancelled_request(server):
    request = await asyncio.to_thread(server.wait_cancelled)
    return request["text_input"]


@in_event_loop
async def test_deltas_come_in_order_and_end_after_the_final_flag(server):
    server.plays(server.delta("He", 1), server.delta("llo", 2, 3), server.last("!", 4))
    async with AsyncClient(server.url) as client:
        deltas = [delta async for delta in client.stream("hi", max_tokens=4)]
    assert [delta.text for delta in deltas] == ["He", "llo", "!"]
    assert deltas[-1].finish_reason == "stop"
    assert server.requests[0]["sampling_parameters"] == b'{"max_tokens": 4}'
    assert "triton_grpc_error" not in server.metadata


@in_event_loop
async def test_generate_returns_the_whole(server):
    server.plays(server.last("Hello!", 1, 2, 3, finish_reason="length"))
    async with AsyncClient(server.url) as client:
        messages = [{"role": "user", "content": "hi"}]
        completion = await client.generate(messages=messages)
    assert completion.answers == (Answer("Hello!", (1, 2, 3), "length", 3),)
    assert completion.num_input_tokens == 7
    assert server.requests[0]["stream"] is False


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("UNAVAILABLE", Unavailable),
        ("CANCELLED", RequestCancelled),
        ("INTERNAL", ServerError),
    ],
)
@in_event_loop
async def test_an_error_in_mid_stream_follows_the_deltas_before_it(server, status, kind):
    server.plays(server.delta("a"), server.fail(status, "the engine says no"))
    async with AsyncClient(server.url) as client:
        deltas = client.stream("hi")
        assert (await anext(deltas)).text == "a"
        with pytest.raises(kind, match="the engine says no"):
            await anext(deltas)
        assert [delta async for delta in deltas] == []


@in_event_loop
async def test_a_stream_that_stops_without_the_final_flag_is_an_error(server):
    server.plays(server.delta("a"))
    async with AsyncClient(server.url) as client:
        with pytest.raises(Unavailable, match="ended the stream before its last response"):
            await client.generate("hi")


@in_event_loop
async def test_closing_cancels_on_the_server_and_ends_the_iteration(server):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(server.url) as client:
        deltas = client.stream("closed")
        await anext(deltas)
        await deltas.close()
        assert await cancelled_request(server) == b"closed"
        assert [delta async for delta in deltas] == []


@in_event_loop
async def test_leaving_the_with_block_cancels_on_the_server(server):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(server.url) as client:
        async with client.stream("left") as deltas:
            await anext(deltas)
        assert await cancelled_request(server) == b"left"


@in_event_loop
async def test_dropping_the_iterator_cancels_on_the_server(server):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(server.url) as client:
        async for _ in client.stream("dropped"):
            break
        gc.collect()
        assert await cancelled_request(server) == b"dropped"


@in_event_loop
async def test_cancelling_the_reading_task_cancels_on_the_server(server):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(server.url) as client:
        deltas = client.stream("task")
        await anext(deltas)
        task = asyncio.create_task(anext(deltas))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await cancelled_request(server) == b"task"


@pytest.mark.parametrize("closed", ["stream", "client"])
@in_event_loop
async def test_closing_from_another_task_wakes_the_reader(server, closed):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(server.url) as client:
        deltas = client.stream("hi")
        await anext(deltas)
        task = asyncio.create_task(anext(deltas))
        await asyncio.sleep(0.05)
        await (deltas if closed == "stream" else client).close()
        with pytest.raises(RequestCancelled):
            await task
        await cancelled_request(server)


@in_event_loop
async def test_64_tasks_stream_over_one_connection_at_once(server):
    together = threading.Barrier(64, timeout=10)

    def script(request):
        together.wait()
        for word in request["text_input"].decode().split():
            yield server.delta(word)
        yield server.last(".")

    server.script = script
    prompts = [f"{index} {index + 1} {index + 2}" for index in range(64)]
    async with AsyncClient(server.url) as client:

        async def read(prompt):
            return " ".join([delta.text async for delta in client.stream(prompt)])

        answers = await asyncio.gather(*map(read, prompts))
    assert answers == [f"{prompt} ." for prompt in prompts]
    assert len(server.peers) == 1


@in_event_loop
async def test_a_request_past_its_time_limit_raises_and_is_cancelled(server):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(server.url, timeout_s=0.2) as client:
        deltas = client.stream("slow")
        await anext(deltas)
        with pytest.raises(RequestTimeout, match=r"not finished within 0\.2 s"):
            await anext(deltas)
        assert await cancelled_request(server) == b"slow"


@in_event_loop
async def test_no_server_is_an_error_that_names_the_address(free_url):
    async with AsyncClient(free_url) as client:
        with pytest.raises(Unavailable, match=f"no gRPC server answers at {free_url}"):
            await client.generate("hi")
        assert not await client.is_ready()


@in_event_loop
async def test_a_killed_server_ends_all_streams_at_once(server, relay):
    server.plays(server.delta("a"), server.HANG)
    async with AsyncClient(relay.url) as client:
        streams = [client.stream("hi") for _ in range(8)]
        assert [(await anext(deltas)).text for deltas in streams] == ["a"] * 8
        started = time.monotonic()
        relay.cut()
        for deltas in streams:
            with pytest.raises(Unavailable, match=f"server {relay.url} is unavailable"):
                await anext(deltas)
        assert time.monotonic() - started < 1


@in_event_loop
async def test_ready_and_health_ask_the_server(server):
    async with AsyncClient(server.url) as client:
        assert await client.is_ready()
        server.ready = False
        assert not await client.is_ready()
        assert 0 < await client.health(timeout_s=5) < 5
    assert server.requests[0]["sampling_parameters"] == b'{"max_tokens": 1, "temperature": 0.0}'


@pytest.mark.parametrize("ends_well", [True, False])
@in_event_loop
async def test_a_request_that_has_its_last_response_is_not_cancelled(server, ends_well):
    ended = []

    def last_response_and_later_the_end(_):
        yield server.last("a") if ends_well else server.refuse("UNAVAILABLE: full")
        time.sleep(0.1)
        ended.append(True)

    server.script = last_response_and_later_the_end
    async with AsyncClient(server.url) as client:
        with contextlib.suppress(Unavailable):
            async with client.stream("hi") as deltas:
                assert (await anext(deltas)).text == "a"
    assert ended == [True]


@in_event_loop
async def test_a_closed_client_refuses_requests(server):
    async with AsyncClient(server.url) as client:
        pass
    with pytest.raises(OctavoClientError, match=f"the client for {server.url} is closed"):
        client.stream("hi")
    with pytest.raises(OctavoClientError, match=f"the client for {server.url} is closed"):
        await client.is_ready()


@in_event_loop
async def test_several_answers_come_as_deltas_of_one_each(server):
    server.plays(
        server.answers(("a", "", (1,)), ("x", "", (5, 6)), final=False),
        server.answers(("b", "stop", (2,)), ("", "length", ()), final=True),
    )
    async with AsyncClient(server.url) as client:
        deltas = [delta async for delta in client.stream("hi", n=2)]
        completion = await client.generate("hi", n=2)
    parts = [(delta.index, delta.text) for delta in deltas]
    assert parts == [(0, "a"), (1, "x"), (0, "b"), (1, "")]
    assert [answer.text for answer in completion.answers] == ["ab", "x"]
