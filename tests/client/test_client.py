import _thread
import collections
import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo_client import (
    Answer,
    Client,
    InvalidRequest,
    ModelNotFound,
    OctavoClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    Timing,
    Unavailable,
)
from octavo_client.codec import encode_probe


def test_deltas_come_in_order_and_end_after_the_final_flag(server, client):
    server.plays(server.delta("He", 1), server.delta("llo", 2, 3), server.last("!", 4))
    deltas = list(client.stream("hi", max_tokens=4))
    assert [delta.text for delta in deltas] == ["He", "llo", "!"]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert server.requests[0]["sampling_parameters"] == b'{"max_tokens": 4}'


def test_a_delta_is_yielded_before_the_next_one_exists(server, client):
    proceed = threading.Event()

    def script(_):
        yield server.delta("first")
        assert proceed.wait(5)
        yield server.last("second")

    server.script = script
    deltas = client.stream("hi")
    assert next(deltas).text == "first"
    proceed.set()
    assert [delta.text for delta in deltas] == ["second"]


def test_generate_asks_for_one_response_and_returns_the_whole(server, client):
    server.plays(server.last("Hello!", 1, 2, 3, finish_reason="length"))
    completion = client.generate("hi")
    assert completion.answers == (Answer("Hello!", (1, 2, 3), "length", 3),)
    assert completion.num_input_tokens == 7
    assert completion.timing == Timing(1.5, 2.0, 3.0, 0.0, 0, 0)
    assert server.requests[0]["stream"] is False


def test_generate_joins_several_responses(server, client):
    server.plays(server.delta("a", 1), server.last("b", 2))
    assert client.generate(input_ids=[5, 6]).answers == (Answer("ab", (1, 2), "stop", 2),)
    assert server.requests[0]["input_ids"] == [5, 6]


def test_several_answers_come_as_deltas_of_one_each_and_as_answers_of_one_completion(
    server, client
):
    server.plays(
        server.answers(("a", "", (1,)), ("x", "", (5, 6)), final=False),
        server.answers(("b", "stop", (2,)), ("", "length", ()), final=True),
    )
    deltas = list(client.stream("hi", n=2))
    assert [(delta.index, delta.text) for delta in deltas] == [
        (0, "a"),
        (1, "x"),
        (0, "b"),
        (1, ""),
    ]
    completion = client.generate("hi", n=2)
    assert [answer.text for answer in completion.answers] == ["ab", "x"]
    assert [answer.token_ids for answer in completion.answers] == [(1, 2), (5, 6)]
    assert [answer.finish_reason for answer in completion.answers] == ["stop", "length"]
    assert server.requests[0]["sampling_parameters"] == b'{"n": 2}'


def test_a_stream_that_is_closed_gives_no_more_of_what_had_come(server, client):
    server.plays(server.answers(("a", "", (1,)), ("x", "", (5,)), final=False), server.HANG)
    deltas = client.stream("closed", n=2)
    assert next(deltas).text == "a"
    deltas.close()
    assert list(deltas) == []


def test_messages_are_sent_as_they_are(server, client):
    client.generate(messages=[{"role": "user", "content": "hi"}])
    assert server.requests[0]["messages"] == b'[{"role": "user", "content": "hi"}]'


def test_the_header_that_crashes_the_server_is_not_sent(server, client):
    client.generate("hi")
    assert "triton_grpc_error" not in server.metadata


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("UNAVAILABLE", Unavailable),
        ("CANCELLED", RequestCancelled),
        ("INTERNAL", ServerError),
    ],
)
def test_an_error_in_mid_stream_follows_the_deltas_before_it(server, client, status, kind):
    server.plays(server.delta("a"), server.fail(status, "the engine says no"))
    deltas = client.stream("hi")
    assert next(deltas).text == "a"
    with pytest.raises(kind, match="the engine says no"):
        next(deltas)
    assert list(deltas) == []


def test_an_error_message_with_a_code_follows_the_deltas_before_it(server, client):
    server.plays(server.delta("a"), server.refuse("UNAVAILABLE: the engine died"))
    deltas = client.stream("hi")
    assert next(deltas).text == "a"
    with pytest.raises(Unavailable, match=r"^the engine died$"):
        next(deltas)
    assert list(deltas) == []


def test_an_error_without_a_status_is_raised(server, client):
    server.plays(server.refuse("Request for unknown model: 'octavo' is not found"))
    with pytest.raises(ModelNotFound, match="unknown model"):
        client.generate("hi")


def test_a_stream_that_stops_without_the_final_flag_is_an_error(server, client):
    server.plays(server.delta("a"))
    with pytest.raises(Unavailable, match="ended the stream before its last response"):
        list(client.stream("hi"))


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_request_that_has_its_last_response_is_not_cancelled(server, client, ends_well):
    ended = []

    def last_response_and_later_the_end(_):
        yield server.last("a") if ends_well else server.refuse("UNAVAILABLE: full")
        time.sleep(0.1)
        ended.append(True)

    server.script = last_response_and_later_the_end
    with client.stream("hi") as deltas, contextlib.suppress(Unavailable):
        assert next(deltas).text == "a"
    assert ended == [True]


def test_closing_cancels_on_the_server_and_ends_the_iteration(server, client):
    server.plays(server.delta("a"), server.HANG)
    deltas = client.stream("closed")
    next(deltas)
    deltas.close()
    deltas.close()
    assert server.wait_cancelled()["text_input"] == b"closed"
    assert list(deltas) == []


def test_leaving_the_with_block_cancels_on_the_server(server, client):
    server.plays(server.delta("a"), server.HANG)
    with client.stream("left") as deltas:
        next(deltas)
    assert server.wait_cancelled()["text_input"] == b"left"


def test_dropping_the_iterator_cancels_on_the_server(server, client):
    server.plays(server.delta("a"), server.HANG)
    for _ in client.stream("dropped"):
        break
    gc.collect()
    assert server.wait_cancelled()["text_input"] == b"dropped"


def test_an_exception_in_the_loop_cancels_on_the_server(server, client):
    server.plays(server.delta("a"), server.HANG)
    with pytest.raises(ZeroDivisionError), client.stream("failed") as deltas:
        [1 // 0 for _ in deltas]
    assert server.wait_cancelled()["text_input"] == b"failed"


def test_cancelling_one_stream_leaves_the_others(server, client):
    server.script = lambda request: (
        (server.delta("a"), server.HANG)
        if request["text_input"] == b"one"
        else (server.delta("a"), server.last("b"))
    )
    one, other = client.stream("one"), client.stream("other")
    next(one), next(other)
    one.close()
    server.wait_cancelled()
    assert [delta.text for delta in other] == ["b"]


@pytest.mark.parametrize("closed", ["stream", "client"])
def test_closing_from_another_thread_wakes_the_reader(server, client, closed):
    server.plays(server.delta("a"), server.HANG)
    deltas = client.stream("hi")
    next(deltas)
    threading.Timer(0.05, (deltas if closed == "stream" else client).close).start()
    with pytest.raises(RequestCancelled):
        next(deltas)
    server.wait_cancelled()


def test_ctrl_c_anywhere_inside_a_stream_leaves_the_client_usable(server, client):
    def script(request):
        while request["text_input"] == b"endless":
            yield server.delta("a")
        yield server.last("done")

    server.script = script
    for _ in range(40):
        deltas = client.stream("endless")
        threading.Timer(0.005, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            collections.deque(deltas, maxlen=0)
        assert client.generate("hi", timeout_s=5).text == "done"


def test_a_stream_keeps_its_client_alive(server):
    server.plays(server.delta("a"), server.delta("b"), server.last("c"))
    deltas = Client(server.url).stream("hi")
    gc.collect()
    assert [delta.text for delta in deltas] == ["a", "b", "c"]


def test_64_threads_stream_over_one_connection_at_once(server, client):
    together = threading.Barrier(64, timeout=10)

    def script(request):
        together.wait()
        for word in request["text_input"].decode().split():
            yield server.delta(word)
        yield server.last(".")

    server.script = script
    prompts = [f"{index} {index + 1} {index + 2}" for index in range(64)]

    def read(prompt):
        return " ".join(delta.text for delta in client.stream(prompt))

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(read, prompts))
    assert answers == [f"{prompt} ." for prompt in prompts]
    assert len(server.peers) == 1


def test_two_clients_use_two_connections(server, client):
    client.generate("hi")
    with Client(server.url) as other:
        other.generate("hi")
    assert len(server.peers) == 2


def test_a_request_past_its_time_limit_raises_and_is_cancelled(server, client):
    server.plays(server.delta("a"), server.HANG)
    started = time.monotonic()
    deltas = client.stream("slow", timeout_s=0.2)
    with pytest.raises(RequestTimeout, match=r"not finished within 0\.2 s"):
        list(deltas)
    assert time.monotonic() - started < 2
    assert server.wait_cancelled()["text_input"] == b"slow"


def test_the_time_limit_of_the_client_holds_for_each_request(server):
    server.plays(server.HANG)
    with Client(server.url, timeout_s=0.2) as client, pytest.raises(RequestTimeout):
        client.generate("slow")
    server.wait_cancelled()


def test_a_request_may_lift_the_time_limit_of_the_client(server):
    def script(_):
        time.sleep(0.3)
        yield server.last("late")

    server.script = script
    with Client(server.url, timeout_s=0.1) as client:
        assert client.generate("slow", timeout_s=float("inf")).text == "late"


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_time_limit_must_be_positive(client, limit):
    with pytest.raises(InvalidRequest, match=r"timeout_s is .* but must be a positive number"):
        client.stream("hi", timeout_s=limit)


def test_ready_means_that_the_model_is_loaded(server, client, free_url):
    assert client.is_ready()
    server.ready = False
    assert not client.is_ready()
    with Client(free_url) as nobody:
        assert not nobody.is_ready()


def test_health_generates_one_token(server, client):
    assert 0 < client.health(timeout_s=5) < 5
    assert server.requests[0]["sampling_parameters"] == b'{"max_tokens": 1, "temperature": 0.0}'
    assert encode_probe("octavo").id == "octavo-health", "by which the log tells it from others"


def test_health_fails_when_the_token_does_not_come(server, client):
    server.plays(server.HANG)
    with pytest.raises(RequestTimeout):
        client.health(timeout_s=0.1)
    server.wait_cancelled()


def test_a_closed_client_refuses_requests(server):
    with Client(server.url) as client:
        pass
    for use in (lambda: client.stream("hi"), lambda: client.generate("hi"), client.is_ready):
        with pytest.raises(OctavoClientError, match=f"the client for {server.url} is closed"):
            use()


def test_a_keepalive_must_be_positive():
    with pytest.raises(InvalidRequest, match="keepalive_s is 0 but must be a positive number"):
        Client(keepalive_s=0)
