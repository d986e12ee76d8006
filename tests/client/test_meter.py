import pytest

from octavo_client.answer import Delta, Timing
from octavo_client.meter import Meter


def delta(num_tokens, index=0, reason=None, decode_ms=None, cached=0, num_input_tokens=7):
    timing = None if decode_ms is None else Timing(1.0, 2.0, decode_ms, 0.0, cached, 0)
    return Delta("", (0,) * num_tokens, reason, num_input_tokens, num_tokens, index, timing)


def meter_of(times, *arrivals):
    clock = iter(times)
    meter = Meter(lambda: next(clock))
    for deltas in arrivals:
        meter.add(*deltas)
    return meter


def test_a_stream_says_when_the_first_came_and_how_fast_the_server_decoded():
    last = delta(3, reason="stop", decode_ms=500.0)
    meter = meter_of([10.0, 12.0, 12.5, 13.0], [delta(1)], [delta(2)], [last])
    assert meter.summary() == (
        "7 tokens read; 6 tokens in 3.00 s, first after 2.00 s, 10.0 tokens/s; stop"
    )


def test_what_comes_at_once_does_not_pretend_to_know_when_the_first_came():
    meter = meter_of([10.0, 12.0], [delta(6, reason="length", decode_ms=500.0)])
    assert meter.summary() == "7 tokens read; 6 tokens in 2.00 s, 10.0 tokens/s; length"


def test_a_delta_without_tokens_is_not_the_first():
    meter = meter_of([10.0, 11.0, 12.0, 13.0], [delta(0)], [delta(1)], [delta(1, reason="stop")])
    assert meter.summary() == "7 tokens read; 2 tokens in 3.00 s, first after 2.00 s; stop"


@pytest.mark.parametrize(
    "arrivals",
    [
        [[delta(6, 0), delta(6, 1, decode_ms=500.0)]],
        [[delta(1, 0)], [delta(1, 1)], [delta(5, 0)], [delta(5, 1, decode_ms=500.0)]],
    ],
    ids=["whole", "streamed"],
)
def test_the_rate_of_several_answers_is_that_of_one_for_each_of_them(arrivals):
    assert meter_of(range(9), *arrivals).tokens_per_s == 20.0


def test_one_token_has_no_rate_and_no_plural():
    one = delta(1, reason="length", decode_ms=0.0, num_input_tokens=1)
    assert meter_of([10.0, 11.88], [one]).summary() == "1 token read; 1 token in 1.88 s; length"


def test_cached_tokens_and_every_reason_are_told_once():
    ends = [delta(1, place, reason) for place, reason in enumerate(("stop", "length", "stop"))]
    last = delta(0, 2, decode_ms=0.0, cached=6)
    assert meter_of([0.0, 1.0], [*ends, last]).summary() == (
        "7 tokens read, 6 of them cached; 3 tokens in 1.00 s; stop, length"
    )


def test_a_server_that_sends_no_timing_has_no_rate():
    assert meter_of([0.0, 1.0], [delta(2)]).tokens_per_s is None
