"""Batches that nobody joins later: who makes one up, and who waits for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import PromptTooLong, QueueFull
from octavo.request import Request
from octavo.scheduler.whole_batches import BatchRule

SEATS = st.integers(1, 4)
MakeRequest = Callable[..., Request]
MakeBatches = Callable[..., Engine]


@pytest.fixture(scope="session")
def make_batches(fake_runner: Any) -> MakeBatches:
    """Make an engine of whole batches over the fake runner: 12 blocks of 8 tokens."""

    def make(*, equal_lengths: bool = False, **options: Any) -> Engine:
        config = EngineConfig("fake", block_size=8, max_num_batched_tokens=512, **options)
        return Engine(config, fake_runner(), lambda: 0.0, BatchRule(equal_lengths))

    return make


def running(engine: Engine) -> list[str]:
    """Return who runs, after one more step."""
    engine.step()
    engine.check_integrity()
    return [sequence.request_id for sequence in engine.scheduler.running]


def test_nobody_joins_a_batch_and_all_who_wait_make_up_the_next(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches()
    engine.add(make_request("a", max_tokens=3))
    assert running(engine) == ["a"]
    for name in ("b", "c"):
        engine.add(make_request(name, max_tokens=3))
    assert running(engine) == ["a"]
    assert running(engine) == []
    assert running(engine) == ["b", "c"]


def test_a_batch_goes_on_until_its_last_row_ends(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches()
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        engine.add(make_request(name, max_tokens=max_tokens))
    engine.step()
    engine.add(make_request("d", max_tokens=1))
    assert running(engine) == ["b"]
    assert running(engine) == []
    assert [output.request_id for output in engine.step().outputs] == ["d"]


def test_every_row_reserves_the_longest_prompt_and_the_longest_answer(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    """Three rows of 10 + 16 tokens take 4 blocks each, which are 12; a fourth would take more."""
    engine = make_batches()
    for name, prompt, max_tokens in (("a", 10, 2), ("b", 2, 16), ("c", 1, 1), ("d", 1, 1)):
        engine.add(make_request(name, prompt, max_tokens=max_tokens))
    assert set(running(engine)) == {"a", "b"}
    assert engine.stats().num_waiting == 1


def test_prompts_of_one_length_run_together_where_padding_does_harm(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    """Whoever is of another length is passed by all of the first one's, and is the next first."""
    engine = make_batches(equal_lengths=True)
    for name, prompt in (("a", 4), ("b", 5), ("c", 4), ("d", 6), ("e", 5)):
        engine.add(make_request(name, prompt, max_tokens=2))
    assert [running(engine) for _ in range(5)] == [["a", "c"], [], ["b", "e"], [], ["d"]]


def test_a_prompt_that_is_scored_is_in_no_batch_of_others_and_holds_up_none(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches()
    for name, prompt_logprobs in (("a", None), ("b", 0), ("c", None)):
        engine.add(make_request(name, max_tokens=2, prompt_logprobs=prompt_logprobs))
    assert running(engine) == ["a", "c"]


@pytest.mark.parametrize(
    ("policy", "batches"),
    [
        ("fcfs", [["a", "c", "d", "f"], ["b"], ["e"]]),
        ("priority", [["c", "f"], ["e"], ["a", "d"], ["b"]]),
        ("fair", [["a", "c", "d", "f"], ["b"], ["e"]]),
    ],
)
def test_only_who_is_as_urgent_passes_those_of_another_length(
    make_batches: MakeBatches,
    make_request: MakeRequest,
    policy: str,
    batches: list[list[str]],
) -> None:
    engine = make_batches(equal_lengths=True, scheduling_policy=policy)
    for name, prompt, priority in (
        *(("a", 4, 1), ("b", 5, 1), ("c", 4, 0)),
        *(("d", 4, 1), ("e", 6, 0), ("f", 4, 0)),
    ):
        engine.add(make_request(name, prompt, max_tokens=2, priority=priority))
    begun = []
    while engine.has_unfinished:
        if batch := running(engine):
            begun.append(sorted(batch))
    assert begun == batches


@given(jobs=st.lists(st.tuples(st.integers(1, 3), st.integers(2, 4)), max_size=12), seats=SEATS)
def test_the_oldest_decides_of_what_length_a_batch_is_and_as_many_as_can_join_it(
    make_batches: MakeBatches,
    make_request: MakeRequest,
    jobs: list[tuple[int, int]],
    seats: int,
) -> None:
    engine = make_batches(equal_lengths=True, max_num_seqs=seats)
    waiting = {str(place): job for place, job in enumerate(jobs)}
    for name, (length, max_tokens) in waiting.items():
        engine.add(make_request(name, length, max_tokens=max_tokens))
    while waiting:
        length = next(iter(waiting.values()))[0]
        batch = [name for name, job in waiting.items() if job[0] == length][:seats]
        assert running(engine) == batch
        for _ in range(max(waiting.pop(name)[1] for name in batch) - 1):
            assert set(running(engine)) <= set(batch)
    assert not engine.has_unfinished


def test_an_urgent_request_waits_for_the_batch_and_goes_before_the_others(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches(scheduling_policy="priority", max_num_seqs=1)
    engine.add(make_request("a", max_tokens=2))
    engine.step()
    for name, priority in (("b", 0), ("c", -1)):
        engine.add(make_request(name, max_tokens=2, priority=priority))
    assert [running(engine) for _ in range(5)] == [[], ["c"], [], ["b"], []]
    assert engine.stats().num_preemptions_total == 0


def test_who_waits_for_a_batch_counts_in_the_queue_though_seats_are_free(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches(max_num_queued_requests=1)
    for name in ("a", "b"):  # the next step can start both
        engine.add(make_request(name, max_tokens=2))
    engine.step()
    engine.add(make_request("c"))
    with pytest.raises(QueueFull, match=r"^1 request waits and max_num_queued_requests is 1; "):
        engine.add(make_request("d"))


def test_who_cannot_be_in_the_batch_that_begins_counts_too(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches(equal_lengths=True, max_num_queued_requests=1)
    for name, prompt in (("a", 4), ("b", 5)):
        engine.add(make_request(name, prompt, max_tokens=2))
    with pytest.raises(QueueFull, match=r"^1 request waits "):
        engine.add(make_request("c", 5))
    engine.add(make_request("d", 4, max_tokens=2))
    assert running(engine) == ["a", "d"]


def test_answers_of_one_request_are_rows_of_one_batch(
    make_batches: MakeBatches,
    make_request: MakeRequest,
    run: Callable[..., Any],
    continue_by_hand: Callable[..., list[int]],
) -> None:
    engine = make_batches()
    engine.add(make_request("a", [10, 11], n=3, max_tokens=4, temperature=0))
    outputs = run(engine)["a"]
    for index in range(3):
        tokens = [i for output in outputs if output.index == index for i in output.token_ids]
        assert tokens == continue_by_hand([10, 11], 4)


def test_answers_share_what_a_batch_may_reserve(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches()
    with pytest.raises(
        PromptTooLong,
        match=r"^prompt has 24 tokens but each of 4 answers can hold 24 with its output; shorten "
        "it, lower n or raise num_kv_blocks$",
    ):
        engine.add(make_request("a", 24, n=4))


def test_a_deadline_in_the_queue_does_not_wait_for_the_batch(
    make_batches: MakeBatches, make_request: MakeRequest
) -> None:
    engine = make_batches()
    engine.add(make_request("a"))
    engine.step()
    engine.add(make_request("b", deadline_s=-1.0))
    (late, _) = engine.step().outputs
    assert (late.request_id, late.finish_reason) == ("b", "deadline")
