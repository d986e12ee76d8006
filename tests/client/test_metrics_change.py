"""What is made of the text of a metrics endpoint: figures, growth, rates, quantiles, curves."""

import math
from itertools import pairwise
from statistics import fmean

import pytest

from octavo_client.metrics_change import change_between, increase, quantile, total
from octavo_client.metrics_page import Histogram, ModelSample, Sample, parse
from octavo_client.top.history import Curve, History

KEY = ("octavo", "1")
LABELS = 'model="octavo",version="1"'
INF = math.inf

#: As Triton 2.51 prints them: its own families beside ours, series in no order.
PAGE = """\
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="octavo",version="1"} 4
# HELP octavo_engine_up 1 while the engine runs, 0 while it is dead or starting
# TYPE octavo_engine_up gauge
octavo_engine_up{model="octavo",version="1"} 1
# HELP octavo_requests_total Requests that have ended
# TYPE octavo_requests_total counter
octavo_requests_total{finish_reason="error",model="octavo",version="1"} 0
octavo_requests_total{finish_reason="stop",model="octavo",version="1"} 4
octavo_requests_total{finish_reason="stop",model="other",version="2"} 7
# HELP octavo_generation_tokens_total Tokens generated
# TYPE octavo_generation_tokens_total counter
octavo_generation_tokens_total{model="octavo",version="1"} 64
# HELP octavo_time_to_first_token_seconds Time to the first token
# TYPE octavo_time_to_first_token_seconds histogram
octavo_time_to_first_token_seconds_count{model="octavo",version="1"} 4
octavo_time_to_first_token_seconds_sum{model="octavo",version="1"} 0.9
octavo_time_to_first_token_seconds_bucket{model="octavo",version="1",le="0.1"} 1
octavo_time_to_first_token_seconds_bucket{model="octavo",version="1",le="0.5"} 3
octavo_time_to_first_token_seconds_bucket{model="octavo",version="1",le="+Inf"} 4
"""


def model_with(histograms=None, gauges=None, **counters):
    series = {(name, ""): value for name, value in counters.items()}
    return ModelSample(KEY, gauges or {}, series, histograms or {})


def look(time_s, gauges=None, **counters):
    return Sample(time_s, {KEY: model_with(gauges=gauges, **counters)})


def test_a_page_is_read_by_model_and_version_and_what_is_not_ours_is_passed_over():
    sample = parse(PAGE, 3.0)
    assert (sample.time_s, list(sample.models)) == (3.0, [KEY, ("other", "2")])
    assert sample.models[KEY] == ModelSample(
        KEY,
        gauges={"engine_up": 1.0},
        counters={
            ("requests_total", "error"): 0.0,
            ("requests_total", "stop"): 4.0,
            ("generation_tokens_total", ""): 64.0,
        },
        histograms={"time_to_first_token_seconds": Histogram((0.1, 0.5, INF), (1, 3, 4))},
    )
    assert sample.models["other", "2"].counters == {("requests_total", "stop"): 7.0}


def test_a_page_without_octavo_has_no_models():
    assert parse("# TYPE nv_gpu_utilization gauge\nnv_gpu_utilization 0.5\n", 0.0).models == {}


@pytest.mark.parametrize("text", ["<html>\n<body>no</body>", "a b c", '{"error": 1}'])
def test_what_is_no_metrics_page_is_an_error(text):
    with pytest.raises(ValueError, match=r".+"):
        parse(text, 0.0)


def test_a_histogram_without_an_end_is_an_error():
    kind = "# TYPE octavo_x histogram\n"
    with pytest.raises(ValueError, match="ends with the bound 2 instead of"):
        parse(f'{kind}octavo_x_bucket{{{LABELS},le="2"}} 1\n', 0.0)


def test_a_counter_that_is_less_than_before_has_begun_anew():
    assert increase(10.0, 14.0) == 4.0
    assert increase(10.0, 10.0) == 0.0
    assert increase(10.0, 3.0) == 3.0


def test_rates_are_growth_by_time_and_sum_over_labels():
    before = ModelSample(KEY, {}, {("requests_total", "stop"): 4.0}, {})
    after = ModelSample(
        KEY, {}, {("requests_total", "stop"): 7.0, ("requests_total", "length"): 2.0}, {}
    )
    change = change_between(before, after, 2.0)
    assert change.of("requests_total") == {"stop": 3.0, "length": 2.0}
    assert change.rate("requests_total") == 2.5
    assert change.rate("engine_steps_total") is None, "what a server does not have is unknown"


def test_buckets_are_subtracted_and_begin_anew_with_their_counter():
    bounds = (0.1, INF)
    first, second, third = (
        model_with({"x": Histogram(bounds, counts)}) for counts in ((2, 5), (3, 9), (1, 1))
    )
    assert change_between(first, second, 1.0).histograms["x"].counts == (1, 4)
    assert change_between(second, third, 1.0).histograms["x"].counts == (1, 1)
    other = model_with({"x": Histogram((0.2, INF), (9, 12))})
    assert change_between(second, other, 1.0).histograms["x"].counts == (9, 12)


def test_changes_add_up_over_a_restart_of_the_server():
    models = [
        model_with({"x": Histogram((1.0, INF), (n, n))}, tokens=float(n)) for n in (10, 30, 5, 6)
    ]
    steps = pairwise(models)
    window = total(change_between(before, after, 1.0) for before, after in steps)
    assert window.seconds == 3.0
    assert window.of("tokens") == {"": 20.0 + 5.0 + 1.0}
    assert window.histograms["x"].counts == (26, 26)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.1, 0.05),  # 1 of 10, of the 2 below 0.1
        (0.2, 0.1),
        (0.5, 0.25),  # 3 of the 8 between 0.1 and 0.5
        (0.9, 0.45),  # 7 of those 8
        (1.0, 0.5),
    ],
)
def test_quantiles_lie_evenly_between_the_bounds(share, expected):
    histogram = Histogram((0.1, 0.5, 1.0, INF), (2, 10, 10, 10))
    assert quantile(histogram, share) == pytest.approx(expected, abs=1e-12)


def test_a_quantile_skips_buckets_without_values():
    assert quantile(Histogram((1.0, 2.0, 4.0, INF), (0, 0, 4, 4)), 0.5) == 3.0


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    assert quantile(Histogram((1.0, 2.0, INF), (1, 2, 10)), 0.99) == 2.0
    assert quantile(Histogram((INF,), (10,)), 0.5) == 0.0


def test_there_is_no_quantile_of_nothing():
    assert quantile(Histogram((1.0, INF), (0, 0)), 0.5) is None


def test_the_window_holds_the_last_seconds_and_the_curve_all():
    history = History(interval_s=1.0, window_s=2.0)
    for place in range(5):
        history.add(look(place, {"num_requests_waiting": place}, generation_tokens_total=place**2))
    trend = history.trend(KEY)
    assert trend.last is not None
    assert trend.last.rate("generation_tokens_total") == 7.0
    assert (trend.window.seconds, trend.window.rate("generation_tokens_total")) == (2.0, 6.0)
    assert trend.generation_rate.values == (None, 1.0, 3.0, 5.0, 7.0)
    assert trend.waiting.values == (0, 1, 2, 3, 4)


def test_a_look_that_failed_leaves_a_gap_and_what_comes_after_is_not_compared_across_it():
    history = History(interval_s=1.0, window_s=10.0)
    history.add(look(0.0, generation_tokens_total=100))
    history.add(look(1.0, generation_tokens_total=110))
    history.miss()
    assert history.trend(KEY).now.counters["generation_tokens_total", ""] == 110
    assert history.trend(KEY).last is None
    history.add(look(60.0, generation_tokens_total=1000))
    history.add(look(61.0, generation_tokens_total=1020))
    assert history.trend(KEY).generation_rate.values == (None, 10.0, None, None, 20.0)
    assert history.trend(KEY).window.seconds == 2.0


def test_a_model_that_was_loaded_in_between_is_not_compared_with_nothing():
    history = History(interval_s=1.0, window_s=10.0)
    history.add(Sample(0.0, {}))
    history.add(look(1.0, generation_tokens_total=50))
    assert history.trend(KEY).last is None
    history.add(Sample(2.0, {}))
    with pytest.raises(KeyError):
        history.trend(KEY)


def test_only_the_last_three_minutes_are_kept():
    history = History(interval_s=10.0, window_s=20.0)
    for place in range(100):
        history.add(look(10.0 * place, generation_tokens_total=10 * place))
    assert history.trend(KEY).generation_rate.values == (1.0,) * 18
    assert history.trend(KEY).generation_rate.first == 82


def test_cells_merge_values_and_stay_the_same_while_the_curve_moves_on():
    values = tuple(float(value) for value in range(12))
    curve = Curve(values, first=6, capacity=12)
    assert curve.cells(5, fmean) == [1.0, 4.0, 7.0, 10.0]
    moved = Curve((*values[1:], None), first=7, capacity=12)
    assert moved.cells(5, fmean) == [1.5, 4.0, 7.0, 10.0, None]
    assert curve.cells(5, max) == [2.0, 5.0, 8.0, 11.0]
    assert curve.cells(100, fmean) == list(values)
