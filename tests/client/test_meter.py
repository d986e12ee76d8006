from octavo_client.meter import Meter


def test_the_rate_leaves_out_the_wait_for_the_first_tokens():
    times = iter([10.0, 12.0, 12.5, 13.0])
    meter = Meter(lambda: next(times))
    for num_tokens in (1, 2, 3):
        meter.add(num_tokens)
    assert meter.tokens_per_s == 5.0
    assert meter.summary() == "6 tokens in 3.00 s, first after 2.00 s, 5.0 tokens/s"


def test_what_comes_at_once_is_rated_over_the_whole_time():
    times = iter([10.0, 12.0])
    meter = Meter(lambda: next(times))
    meter.add(8)
    assert meter.tokens_per_s == 4.0


def test_nothing_received_is_no_rate():
    assert Meter(lambda: 1.0).tokens_per_s == 0.0
