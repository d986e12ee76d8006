from dataclasses import replace

import pytest
from rich.console import Console

from octavo_client.bench.plot import cumulative, in_flight, tokens_over_time
from octavo_client.bench.report import Distribution, make_report, token_gaps_s
from octavo_client.bench.server_metrics import counted_between
from octavo_client.bench.table import ReportView
from octavo_client.bench.trace import Arrival, Run, Trace
from octavo_client.metrics_page import parse

#: Due at 1, sent a little late, three tokens at 1.5, 2 and 3; then two together at 4.
WHOLE = Trace(
    due_s=1.0,
    sent_s=1.25,
    end_s=4.0,
    num_input_tokens=10,
    arrivals=(Arrival(1.5, 1), Arrival(2.0, 1), Arrival(3.0, 1), Arrival(4.0, 2)),
    outcome="ok",
    cached_tokens=6,
)
CANCELLED = Trace(2.0, 2.0, 3.5, 20, (Arrival(3.0, 1), Arrival(3.25, 1)), "cancelled")
FAILED = Trace(2.0, 2.0, 2.5, 40, (), "UNAVAILABLE", error="8 requests wait already")
BROKEN = Trace(2.0, 2.0, 5.0, 40, (Arrival(2.5, 1), Arrival(4.0, 1)), "INTERNAL")
INTERRUPTED = Trace(4.0, 4.0, 5.0, 80, (), "interrupted")
RUN = Run(
    (WHOLE, CANCELLED, FAILED, BROKEN, INTERRUPTED),
    duration_s=5.0,
    cpu_s=0.5,
    lags_s=(0.001, 0.003),
    was_interrupted=True,
)


def test_percentiles_are_interpolated_between_the_nearest_values():
    assert Distribution.of(range(101)) == Distribution(101, 50.0, 50.0, 90.0, 95.0, 99.0, 100.0)
    assert Distribution.of([4.0, 2.0]) == Distribution(
        2, 3.0, 3.0, *map(pytest.approx, (3.8, 3.9, 3.98)), 4.0
    )


def test_one_value_is_all_of_its_percentiles():
    assert Distribution.of([7.0]) == Distribution(1, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0)


def test_no_values_have_no_distribution():
    assert Distribution.of([]) is None


def test_tokens_that_come_together_share_the_time_before_them():
    assert list(token_gaps_s(WHOLE)) == [0.5, 1.0, 0.5, 0.5]


def test_tokens_of_the_first_response_have_no_time_before_them():
    together = replace(WHOLE, arrivals=(Arrival(1.5, 4), Arrival(2.0, 1)))
    assert list(token_gaps_s(together)) == [0.5]
    assert list(token_gaps_s(replace(WHOLE, arrivals=()))) == []


def test_each_figure_is_what_its_definition_says():
    report = make_report(RUN)
    assert report.num_ok == report.num_cancelled == report.num_interrupted == 1
    assert report.failures == {"INTERNAL": 1, "UNAVAILABLE": 1}
    assert report.first_errors == {"UNAVAILABLE": "8 requests wait already"}
    assert report.time_to_first_token_s == Distribution.of([0.5, 1.0])
    assert report.inter_token_s == Distribution.of([0.5, 1.0, 0.5, 0.5, 0.25])
    assert report.end_to_end_s == Distribution.of([3.0])
    assert (report.num_input_tokens, report.input_tokens_per_s) == (30, 6.0)
    assert (report.num_output_tokens, report.output_tokens_per_s) == (9, 1.8)
    assert report.requests_per_s == 0.2
    assert report.concurrency == (2.75 + 1.5 + 0.5 + 3.0 + 1.0) / 5.0
    assert report.tokens_per_response == 9 / 8
    assert report.cached_share == 0.6
    assert report.generator_cpu_us_per_token == pytest.approx(0.5e6 / 9)
    assert report.generator_cpu_share == 0.1
    assert report.generator_lag_s == Distribution.of([0.001, 0.003])


def test_of_each_kind_of_failure_the_first_is_told_in_full():
    later = replace(FAILED, error="9 requests wait already")
    report = make_report(replace(RUN, traces=(FAILED, later, replace(later, outcome="INTERNAL"))))
    assert report.failures == {"INTERNAL": 1, "UNAVAILABLE": 2}
    assert report.first_errors == {
        "INTERNAL": "9 requests wait already",
        "UNAVAILABLE": "8 requests wait already",
    }


def test_a_run_in_which_nothing_came_has_a_report():
    report = make_report(replace(RUN, traces=(FAILED,), lags_s=()))
    assert report.failures == {"UNAVAILABLE": 1}
    assert report.time_to_first_token_s is report.inter_token_s is report.end_to_end_s is None
    assert report.output_tokens_per_s == report.tokens_per_response == 0.0
    assert report.cached_share is report.generator_lag_s is None


def shown(run, **counted):
    console = Console(width=100)
    with console.capture() as printed:
        console.print(ReportView(make_report(run), counted))
    return [line.rstrip() for line in printed.get().splitlines()]


def test_the_table_says_all_figures():
    assert shown(RUN, prefix_cache_hits_total=1234) == [
        "ms                      mean      p50      p90      p95      p99      max  count",
        "time to first token    750.0    750.0    950.0    975.0    995.0  1,000.0      2",
        "inter-token            550.0    500.0    800.0    900.0    980.0  1,000.0      5",
        "end to end           3,000.0  3,000.0  3,000.0  3,000.0  3,000.0  3,000.0      1",
        "",
        "requests           1 ok, 1 cancelled, 2 failed (1 INTERNAL, 1 UNAVAILABLE), 1 interrupted",
        "first UNAVAILABLE  8 requests wait already",
        "duration           5.00 s",
        "requests/s         0.20",
        "output             1.8 tokens/s, 9",
        "input              6.0 tokens/s, 30",
        "in flight          1.75 on average",
        "response           1.12 tokens on average",
        "prefix cache       60.0% of the prompt tokens",
        "generator          55556 µs of CPU a token, 10.0% of a core, 3.0 ms late at p99",
        "server counted     1,234 prefix cache hits",
    ]


def test_a_table_of_nothing_is_one_of_dashes():
    lines = shown(replace(RUN, traces=(FAILED,)))
    assert lines[1].split() == [*"time to first token".split(), *"------", "0"]


@pytest.mark.parametrize("change", [{"cpu_s": 2.6}, {"lags_s": (0.02,)}])
def test_a_generator_that_is_short_of_cpu_says_so(change):
    assert not any(line.startswith("warning") for line in shown(RUN))
    warning = "warning            the generator was short of CPU, which blurs the latencies"
    assert warning in shown(replace(RUN, **change))


def test_a_cumulative_curve_rises_to_one():
    assert cumulative([0.003, 0.001, 0.002, 0.002]) == ([1.0, 2.0, 2.0, 3.0], [0.25, 0.5, 0.75, 1])
    assert cumulative([]) == ([], [])


def test_tokens_over_time_are_those_that_came_within_each_span():
    assert tokens_over_time([WHOLE, CANCELLED], [0.0, 2.0, 3.25, 4.25]) == [0.5, 2.4, 3.0]


def test_requests_are_in_flight_from_their_sending_to_their_end():
    times, counts = in_flight([WHOLE, CANCELLED, FAILED])
    assert times == [1.25, 2.0, 2.0, 2.5, 3.5, 4.0]
    assert counts == [1, 2, 3, 2, 1, 0]


def server_counted(before, after):
    """Return what a page of metrics tells that was read after another, of a run of `octavo`."""
    return counted_between(parse(before, 0.0), parse(after, 10.0), "octavo")


HITS = "# TYPE octavo_prefix_cache_hits_total counter\n"
PREEMPTIONS = "# TYPE octavo_preemptions_total counter\n"


def counter(name, value, model="octavo", version="1", labels=""):
    return f'octavo_{name}{{{labels}model="{model}",version="{version}"}} {value}\n'


def test_what_the_server_counted_is_the_growth_of_the_model_over_all_labels_and_versions():
    def page(hits, of_other, hits_2, swaps, recomputes):
        return (
            HITS
            + counter("prefix_cache_hits_total", hits)
            + counter("prefix_cache_hits_total", hits_2, version="2")
            + counter("prefix_cache_hits_total", of_other, model="other")
            + PREEMPTIONS
            + counter("preemptions_total", swaps, labels='kind="swap",')
            + counter("preemptions_total", recomputes, labels='kind="recompute",')
            + "# TYPE octavo_engine_steps_total counter\n"
            + counter("engine_steps_total", hits)
        )

    assert server_counted(page(40, 7, 0, 2, 3), page(48, 90, 1, 4, 4)) == {
        "prefix_cache_hits_total": 9,
        "preemptions_total": 3,
    }


def test_a_counter_that_began_anew_has_gone_as_far_as_it_says():
    before = HITS + counter("prefix_cache_hits_total", 40)
    after = HITS + counter("prefix_cache_hits_total", 8)
    assert server_counted(before, after) == {"prefix_cache_hits_total": 8}


def test_a_model_that_was_not_there_before_has_nothing_to_compare_with():
    assert server_counted("", HITS + counter("prefix_cache_hits_total", 8)) == {}
