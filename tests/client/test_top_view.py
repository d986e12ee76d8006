"""The picture of `octavo top` at several widths and heights, drawn from figures that are given."""

import math

import pytest
from rich.console import Console

from octavo_client.metrics_page import Histogram, ModelSample, Sample
from octavo_client.top.figures import duration
from octavo_client.top.history import History
from octavo_client.top.view import TopView, apportion

KEY = ("octavo", "1")
TITLE = "octavo top  http://127.0.0.1:8002/metrics  14:03:22"
GAUGES = {
    "engine_up": 1,
    "num_requests_running": 12,
    "num_requests_waiting": 3,
    "num_requests_swapped": 1,
    "kv_blocks_total": 1024,
    "kv_blocks_used": 256,
    "kv_blocks_cached": 128,
    "cpu_kv_blocks_total": 16,
    "cpu_kv_blocks_used": 1,
    "cpu_kv_blocks_cached": 8,
}
#: By how much each counter grows in a second.
GROWTH = {
    ("generation_tokens_total", ""): 1500,
    ("prompt_tokens_total", ""): 40,
    ("prefix_cache_queries_total", ""): 40,
    ("prefix_cache_hits_total", ""): 30,
    ("requests_total", "stop"): 3,
    ("requests_total", "length"): 1,
    ("requests_total", "abort"): 0,
    ("preemptions_total", "swap"): 2,
    ("preemptions_total", "recompute"): 0,
    ("admission_rejections_total", "max_num_queued_requests"): 0,
    ("engine_steps_total", ""): 98.5,
}
#: Of four values a second, three are below 0.1 s.
SLOW = Histogram((0.1, 0.5, math.inf), (3, 4, 4))
NAMES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "step_duration")


def model_at(second):
    counters = {series: 100 + second * growth for series, growth in GROWTH.items()}
    counters |= {("engine_restarts_total", ""): 2, ("requests_total", "abort"): 0}
    counts = Histogram(SLOW.bounds, tuple(second * count for count in SLOW.counts))
    return ModelSample(KEY, dict(GAUGES), counters, {f"{name}_seconds": counts for name in NAMES})


@pytest.fixture
def trend():
    history = History(interval_s=1.0, window_s=2.0)
    for second in range(4):
        history.add(Sample(float(second), {KEY: model_at(second)}))
    return history.trend(KEY)


def drawn(trends, width, height=None, trouble=""):
    """Draw on paper, or on a terminal if it has a height."""
    console = Console(width=width, height=height, highlight=False)
    with console.capture() as capture:
        console.print(TopView(TITLE, trends, trouble, is_live=height is not None))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_whole_picture_at_80_columns(trend):
    assert drawn([trend], 80) == [
        "octavo top  http://127.0.0.1:8002/metrics  14:03:22",
        "",
        "octavo, version 1: engine up, 2 restarts",
        "requests        12 running  3 waiting  1 swapped",
        "tokens/s        1,500.0 generated  40.0 of prompts",
        "generated/s     █  up to 1,500.0",
        "waiting         █  up to 3",
        "KV blocks       " + "▓" * 32 + "░" * 16 + "·" * 16,
        "                " + "·" * 64,
        "                256 used  128 cached  640 free  of 1,024",
        "host blocks     ▓░░░░░░░░·······",
        "                1 used  8 cached  7 free  of 16",
        "last 2.0 s               p50           p99",
        "first token          66.7 ms        484 ms",
        "between tokens       66.7 ms        484 ms",
        "whole request        66.7 ms        484 ms",
        "in the queue               -             -",
        "step                 66.7 ms        484 ms",
        "last 2.0 s (in all)",
        "prefix hits     75.0 % (86.4 %)",
        "finished        2 length (103)  6 stop (109)",
        "preempted       0 recompute (100)  4 swap (106)",
        "rejected        0 max_num_queued_requests (100)",
        "steps/s         98.5",
    ]


def test_what_does_not_fit_into_60_columns_goes_to_another_line(trend):
    trend.now.counters["requests_total", "timeout"] = 1000.0
    lines = drawn([trend], 60)
    assert max(map(len, lines)) <= 60
    place = lines.index("finished        2 length (103)  6 stop (109)")
    assert lines[place + 1] == "                0 timeout (1,000)"
    assert "                256 used  128 cached  640 free  of 1,024" in lines


def test_200_columns_hold_what_is_now_and_what_was_beside_each_other(trend):
    lines = drawn([trend], 200)
    assert max(map(len, lines)) <= 200
    left = "requests        12 running  3 waiting  1 swapped"
    assert lines[3] == f"{left:<102}last 2.0 s               p50           p99"
    left = "tokens/s        1,500.0 generated  40.0 of prompts"
    assert lines[4] == f"{left:<102}first token          66.7 ms        484 ms"
    assert len(lines) == 15


@pytest.mark.parametrize(("width", "height"), [(60, 12), (80, 24), (80, 50), (200, 50)])
def test_a_watched_picture_fits_the_terminal_and_says_how_to_leave(trend, width, height):
    lines = drawn([trend], width, height)
    assert len(lines) <= height
    assert lines[0] == f"{TITLE}  q ends"
    assert lines[2] == "octavo, version 1: engine up, 2 restarts"


def test_spare_lines_make_the_map_of_blocks_larger(trend):
    rows = {
        height: sum(set(line[16:]) <= set("▓░·") and len(line) > 17 for line in lines)
        for height in (24, 27, 60)
        for lines in [drawn([trend], 80, height)]
    }
    assert rows == {24: 3, 27: 6, 60: 9}, "rows of both pools; that of the host's needs one"


def test_a_low_terminal_says_how_much_is_missing(trend):
    lines = drawn([trend], 80, 10)
    assert len(lines) == 10
    assert lines[-1] == "14 more lines in a taller terminal"


def test_models_share_the_lines_of_a_terminal(trend):
    lines = drawn([trend, trend], 80, 24)
    assert len(lines) <= 24
    names = [place for place, line in enumerate(lines) if line.startswith("octavo, version 1")]
    assert names == [2, 13]


def test_trouble_stands_above_what_was_seen_last(trend):
    lines = drawn([trend], 80, 24, "no metrics: connection refused; trying again")
    assert lines[1] == "no metrics: connection refused; trying again"
    assert lines[3] == "octavo, version 1: engine up, 2 restarts"
    assert len(lines) <= 24


def test_a_server_without_models_says_so():
    assert drawn([], 80) == [TITLE, "no model of Octavo is loaded"]


def test_what_a_server_does_not_tell_is_a_dash():
    history = History(interval_s=1.0, window_s=2.0)
    history.add(Sample(0.0, {KEY: ModelSample(KEY, {}, {}, {})}))
    lines = drawn([history.trend(KEY)], 80)
    assert lines[2:7] == [
        "octavo, version 1: engine unknown",
        "requests        - running  - waiting  - swapped",
        "tokens/s        - generated  - of prompts",
        "generated/s        up to -",
        "waiting            up to -",
    ]
    assert "nothing yet              p50           p99" in lines
    assert lines[-5:] == [
        "prefix hits     - (-)",
        "finished        -",
        "preempted       -",
        "rejected        -",
        "steps/s         -",
    ]


def test_an_engine_that_is_dead_is_seen(trend):
    trend.now.gauges["engine_up"] = 0
    assert "octavo, version 1: engine down, 2 restarts" in drawn([trend], 80)


def test_a_percentile_above_the_last_bound_is_at_least_that():
    history = History(interval_s=1.0, window_s=2.0)
    for count in (0, 10):
        beyond = {"step_duration_seconds": Histogram((1.0, 10.0, math.inf), (0, 0, count))}
        history.add(Sample(float(count), {KEY: ModelSample(KEY, {}, {}, beyond)}))
    lines = drawn([history.trend(KEY)], 80)
    assert "step             over 10.0 s   over 10.0 s" in lines


def test_names_from_the_server_reach_the_terminal_as_text():
    key = ("gold\x1b[2J", "1")
    history = History(interval_s=1.0, window_s=2.0)
    counters = {("requests_total", "\x1b[31m"): 1.0}
    history.add(Sample(0.0, {key: ModelSample(key, {}, counters, {})}))
    text = "\n".join(drawn([history.trend(key)], 80))
    assert "gold\ufffd[2J" in text
    assert "\x1b" not in text


def test_a_terminal_without_unicode_gets_ascii(trend):
    class Latin(Console):
        encoding = "iso-8859-1"

    console = Latin(width=80, highlight=False)
    with console.capture() as capture:
        console.print(TopView(TITLE, [trend]))
    assert capture.get().isascii()
    assert "host blocks     =--------......." in capture.get()


@pytest.mark.parametrize(
    ("amounts", "cells"),
    [
        ({"u": 1, "c": 0, ".": 8191}, {"u": 1, "c": 0, ".": 63}),
        ({"u": 8190, "c": 1, ".": 1}, {"u": 62, "c": 1, ".": 1}),
        ({"u": 512, "c": 256, ".": 256}, {"u": 32, "c": 16, ".": 16}),
    ],
)
def test_no_block_in_use_is_overlooked(amounts, cells):
    assert apportion(64, amounts) == cells


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0.00 ms"),
        (0.00052, "0.52 ms"),
        (0.0123, "12.3 ms"),
        (0.4567, "457 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit_that_suits_them(seconds, text):
    assert duration(seconds) == text
