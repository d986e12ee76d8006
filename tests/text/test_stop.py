from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stop import StopStringFilter


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """Return what each push lets through, then the rest, and whether a stop was found."""
    stop_filter = StopStringFilter(tuple(stops))
    sent = []
    for piece in pieces:
        text, matched = stop_filter.push(piece)
        sent.append(text)
        if matched:
            return sent, True
    return [*sent, stop_filter.finish()], False


def first_stop(stops: list[str], text: str) -> int | None:
    """Return where the first stop begins: the one that ends first, the longest of several."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
@settings(max_examples=1000, deadline=None)
def test_text_ends_before_the_first_stop_however_it_is_cut(
    stops: list[str], pieces: list[str]
) -> None:
    text = "".join(pieces)
    start = first_stop(stops, text)
    sent, matched = run(stops, pieces)
    assert "".join(sent) == text[:start]
    assert matched == (start is not None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
@settings(max_examples=500, deadline=None)
def test_exactly_the_longest_possible_beginning_of_a_stop_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    stop_filter = StopStringFilter(tuple(stops))
    seen = sent = ""
    for piece in pieces:
        text, matched = stop_filter.push(piece)
        if matched:
            return
        seen, sent = seen + piece, sent + text
        beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
        held = max((len(part) for part in beginnings if seen.endswith(part)), default=0)
        assert sent == seen[: len(seen) - held]


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
@settings(max_examples=500, deadline=None)
def test_an_included_stop_ends_the_text_and_nothing_is_held_back_for_it(
    stops: list[str], pieces: list[str]
) -> None:
    stop_filter = StopStringFilter(tuple(stops), include=True)
    seen = ""
    for piece in pieces:
        text, matched = stop_filter.push(piece)
        ends = range(len(seen) + 1, len(seen + piece) + 1)
        end = next((e for e in ends if (seen + piece)[:e].endswith(tuple(stops))), None)
        assert (text, matched) == ((seen + piece)[len(seen) : end], end is not None)
        if matched:
            return
        seen += piece
    assert stop_filter.finish() == ""


def test_a_stop_split_over_three_deltas_is_found() -> None:
    assert run(["<END>"], ["one <", "EN", "D> two"]) == (["one ", "", ""], True)


def test_a_beginning_that_comes_to_nothing_is_sent_on() -> None:
    assert run(["<END>"], ["one <EN", "X", " <E"]) == (["one ", "<ENX", " ", "<E"], False)


def test_the_stop_that_ends_first_wins_and_the_longest_of_those() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], True)
    assert run(["bc", "abc"], ["xabc"]) == (["x"], True)


def test_a_stop_that_overlaps_its_own_beginning_is_found() -> None:
    assert run(["aab"], ["aa", "a", "b"]) == (["", "a", ""], True)


def test_without_stops_everything_passes_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


def test_a_stop_may_hold_any_character() -> None:
    assert run(["\n\n", "。😀"], ["你好。", "😀"]) == (["你好", ""], True)


def test_ignored_text_passes_whole_and_no_stop_that_touches_it_is_found() -> None:
    stop_filter = StopStringFilter(("END",))
    assert stop_filter.push("one END two E", ignore=True) == ("one END two E", False)
    assert stop_filter.push("ND") == ("ND", False)
    assert stop_filter.push(" END") == (" ", True)


def test_text_held_back_comes_out_with_ignored_text() -> None:
    stop_filter = StopStringFilter(("END",))
    assert stop_filter.push("E") == ("", False)
    assert stop_filter.push("x", ignore=True) == ("Ex", False)


def test_filters_of_the_same_stops_share_what_is_built_from_them() -> None:
    stops = tuple(f"{number:064}" for number in range(256))
    first, second = StopStringFilter(stops), StopStringFilter(stops)
    assert first.push("0" * 63) == ("", False)
    assert second.push(stops[255]) == ("", True)
    assert first.push("x") == ("0" * 63 + "x", False)


@pytest.mark.parametrize("stop", ["a" * 16_384, "a" * 16_383 + "b"])
def test_the_longest_stop_costs_constant_time_a_character(stop: str) -> None:
    stop_filter = StopStringFilter((stop,))
    pieces = ["a" * 1023 + "c"] * 200
    assert "".join(stop_filter.push(piece)[0] for piece in pieces) == "".join(pieces)
