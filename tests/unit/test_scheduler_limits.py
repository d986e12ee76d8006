"""Deadlines, and how much may wait.

A plan reads (name, tokens, how many draw a token), and a block holds 4 tokens.
"""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest, PromptTooLong, QueueFull
from octavo.request import FinishReason, TokenOutput
from octavo.sequence import SequenceStatus

DEADLINE = FinishReason.DEADLINE


def overdue(name: str, index: int = 0) -> TokenOutput:
    return TokenOutput(name, (), (), DEADLINE, index=index)


def test_a_deadline_ends_one_that_waits_before_it_is_ever_scheduled(make_scheduler):
    driver = make_scheduler(max_num_seqs=1)
    driver.add("a")
    sequence = driver.add("b", deadline_s=10.0)
    driver.step()
    driver.now_s = 9.9
    driver.step()
    assert driver.outputs == [TokenOutput("a", (9,))]
    driver.now_s = 10.0
    assert driver.step() == [("a", 1, 1)]
    assert driver.outputs == [overdue("b"), TokenOutput("a", (9,))]
    assert sequence.finish_reason is DEADLINE
    assert driver.timings["b"].queue_s == 10.0
    assert driver.waiting == []


@pytest.mark.parametrize("num_steps", [1, 2, 6], ids="prefilling drawn old".split())
def test_a_deadline_ends_one_that_runs_and_frees_its_blocks(make_scheduler, num_steps):
    driver = make_scheduler(max_num_batched_tokens=8)
    sequence = driver.add("a", 12, deadline_s=5.0)
    driver.steps(num_steps)
    driver.now_s = 5.0
    assert driver.step() == []
    assert driver.outputs == [overdue("a")]
    assert (sequence.status, sequence.finish_reason) == (SequenceStatus.FINISHED, DEADLINE)
    assert driver.cache.num_free_blocks == 100
    assert not driver.scheduler.has_unfinished


def test_a_deadline_makes_room_in_the_same_step(make_scheduler):
    driver = make_scheduler(max_num_seqs=1)
    driver.add("a", deadline_s=5.0)
    driver.add("b")
    driver.step()
    driver.now_s = 5.0
    assert driver.step() == [("b", 5, 1)]


@pytest.fixture
def swapped(make_scheduler):
    """`b` is swapped out to 3 host blocks; of 8 device blocks `a` has 2."""
    driver = make_scheduler(num_blocks=8, num_host_blocks=4)
    driver.add("a", 6)
    b = driver.add("b", 9, deadline_s=5.0)
    driver.step()
    driver.scheduler.preempt(b, driver.now_s)
    assert (b.status, driver.cache.num_used_host_blocks) == (SequenceStatus.SWAPPED, 3)
    return driver, b


def test_a_deadline_ends_one_that_is_swapped_out(swapped):
    driver, _ = swapped
    driver.now_s = 5.0
    assert driver.step() == [("a", 1, 1)]
    assert driver.outputs == [overdue("b"), TokenOutput("a", (9,))]
    assert driver.cache.num_used_host_blocks == 0
    assert len(driver.scheduler.waiting.swapped_request_ids) == 0


def test_a_deadline_ends_one_on_its_way_back_but_its_blocks_stay_until_it_arrives(swapped):
    driver, b = swapped
    driver.step()
    assert b.status is SequenceStatus.RESTORING
    num_free = driver.cache.num_free_blocks
    driver.now_s = 5.0
    assert driver.step() == [("a", 1, 1)]
    assert driver.outputs == [overdue("b"), TokenOutput("a", (9,))]
    assert driver.cache.num_free_blocks == num_free
    driver.arrive()
    assert driver.cache.num_free_blocks == num_free + 3
    assert driver.cache.num_used_host_blocks == 0
    assert driver.running == ["a"]


def test_a_deadline_ends_all_answers_of_a_request_that_are_live(make_scheduler):
    driver = make_scheduler(max_num_batched_tokens=8)
    driver.add("a", 12, n=3, deadline_s=5.0)
    driver.add("b", 12, n=3, deadline_s=7.0)
    driver.step()
    driver.now_s = 5.0
    driver.step()
    assert driver.outputs == [overdue("a"), overdue("a", 1), overdue("a", 2)]
    driver.step(9, 0, 9)
    driver.now_s = 7.0
    assert driver.step() == []
    assert driver.outputs == [overdue("b"), overdue("b", 2)]
    assert driver.cache.num_free_blocks == 100


def test_more_requests_than_may_wait_are_refused(make_scheduler):
    driver = make_scheduler(max_num_seqs=1, max_num_queued_requests=2)
    for name in "abc":
        driver.add(name)
    message = r"^2 requests wait and max_num_queued_requests is 2; send the request again later$"
    with pytest.raises(QueueFull, match=message):
        driver.add("d")
    assert driver.scheduler.admission.num_requests_refused == 1
    assert driver.scheduler.admission.num_tokens_refused == 0
    driver.step()
    with pytest.raises(QueueFull):
        driver.add("d")
    driver.scheduler.finish("b", FinishReason.ABORT)
    driver.add("d")
    assert driver.waiting == ["c", "d"]


def test_requests_that_find_a_place_do_not_wait(make_scheduler):
    driver = make_scheduler(max_num_seqs=8, max_num_batched_tokens=40, max_num_queued_requests=1)
    for name in "abcdefghi":
        driver.add(name)
    with pytest.raises(QueueFull):
        driver.add("j")


def test_a_queue_of_none_takes_in_only_what_the_next_step_can_start(make_scheduler):
    driver = make_scheduler(max_num_seqs=2, max_num_queued_requests=0)
    driver.add("a")
    driver.add("b")
    message = r"^0 requests wait and max_num_queued_requests is 0; send the request again later$"
    with pytest.raises(QueueFull, match=message):
        driver.add("c")
    driver.step()
    with pytest.raises(QueueFull):
        driver.add("c")
    driver.scheduler.finish("a", FinishReason.ABORT)
    driver.add("c")
    driver.step()
    assert (driver.running, driver.waiting) == (["b", "c"], [])


def test_a_queue_of_none_refuses_what_finds_no_blocks_or_no_tokens(make_scheduler):
    driver = make_scheduler(num_blocks=8, max_num_queued_requests=0)
    driver.add("a", 20)
    with pytest.raises(QueueFull):
        driver.add("b", 20)
    driver.step()
    driver = make_scheduler(max_num_queued_requests=0)
    driver.add("a", 100)
    with pytest.raises(QueueFull):
        driver.add("b", 1)
    driver.step()
    with pytest.raises(QueueFull):
        driver.add("b", 1)


def test_answers_that_had_to_make_room_close_the_queue_to_nobody(make_scheduler):
    driver = make_scheduler(max_num_seqs=3, max_num_queued_requests=1, max_num_queued_tokens=5)
    driver.add("a", n=3)
    driver.step()
    for sequence in driver.scheduler.running[::-1]:
        driver.scheduler.preempt(sequence, driver.now_s)
    driver.add("b")
    assert driver.waiting == ["a", "a.1", "a.2", "b"]
    assert driver.scheduler.waiting.num_requests == 2
    with pytest.raises(QueueFull, match=r"^1 request waits and max_num_queued_requests is 1;"):
        driver.add("c")


def test_a_full_queue_lets_in_who_goes_before_all_of_it_and_before_who_runs(make_scheduler):
    driver = make_scheduler(policy="priority", max_num_seqs=1, max_num_queued_requests=1)
    driver.add("runs", priority=5)
    driver.step()
    driver.add("waits", priority=5)
    with pytest.raises(QueueFull):
        driver.add("equal", priority=5)
    driver.add("urgent", priority=1)
    with pytest.raises(QueueFull):
        driver.add("as urgent", priority=1)
    driver.step()
    assert (driver.running, driver.waiting) == (["urgent"], ["runs", "waits"])


def add_as_many_as_are_let_in(driver, priorities, prompt=5) -> int:
    """Add a request of each priority, and return how many are not refused."""
    num_let_in = 0
    for priority in priorities:
        try:
            driver.add(f"at {priority}", prompt, priority=priority)
        except QueueFull:
            continue
        num_let_in += 1
    return num_let_in


@pytest.fixture
def full(make_scheduler):
    """4 sequences of 6 tokens run at priority 0, and 2 of 5 tokens wait, which is the limit."""

    def make(**limits):
        driver = make_scheduler(policy="priority", max_num_seqs=4, **limits)
        for name in "abcd":
            driver.add(name)
        driver.step()
        for name in "ef":
            driver.add(name)
        with pytest.raises(QueueFull):
            driver.add("g")
        assert (driver.running, driver.waiting) == (list("abcd"), list("ef"))
        return driver

    return make


def test_ever_more_urgent_requests_pass_a_full_queue_by_no_more_than_run(full):
    driver = full(max_num_queued_requests=2)
    assert add_as_many_as_are_let_in(driver, range(-1, -501, -1)) == 4
    with pytest.raises(QueueFull, match=r"^6 requests wait and max_num_queued_requests is 2;"):
        driver.add("g", priority=-501)
    driver.step()
    assert driver.running == ["at -4", "at -3", "at -2", "at -1"]
    assert driver.waiting == list("abcdef")


def test_those_who_made_room_and_wait_again_are_as_many_as_run_and_no_more(full):
    driver = full(max_num_queued_requests=2)
    lengths = []
    for priority in range(-1, -51, -1):
        add_as_many_as_are_let_in(driver, [priority])
        driver.step()
        lengths.append(len(driver.waiting))
    assert lengths == [3, 4, 5, *[6] * 47]
    assert driver.running == ["at -4", "at -3", "at -2", "at -1"]


def test_without_a_full_queue_too_those_who_made_room_are_bounded(make_scheduler):
    driver = make_scheduler(policy="priority", max_num_seqs=4, max_num_queued_requests=2)
    lengths = []
    for priority in range(50, 0, -1):
        add_as_many_as_are_let_in(driver, [priority])
        driver.step()
        lengths.append(len(driver.waiting))
    assert lengths == [0, 0, 0, 0, 1, 2, 3, 4, *[5] * 42]


def test_equally_urgent_requests_pass_a_full_queue_while_there_are_places_to_take(full):
    driver = full(max_num_queued_requests=2)
    for name in "ghij":
        driver.add(name, priority=-1)
    with pytest.raises(QueueFull):
        driver.add("k", priority=-1)
    driver.step()
    assert (driver.running, driver.waiting) == (list("ghij"), list("abcdef"))


def test_places_are_only_those_of_the_less_urgent(make_scheduler):
    driver = make_scheduler(policy="priority", max_num_seqs=4, max_num_queued_requests=0)
    for name, priority in (("a", -9), ("b", -9), ("c", -9), ("d", 0)):
        driver.add(name, priority=priority)
    driver.step()
    assert add_as_many_as_are_let_in(driver, [-1, -2, -3]) == 1
    driver.step()
    assert driver.running == ["a", "b", "c", "at -1"]


def test_ever_more_urgent_requests_pass_a_limit_of_tokens_by_no_more_than_run(full):
    driver = full(max_num_queued_tokens=10)
    assert add_as_many_as_are_let_in(driver, range(-1, -501, -1)) == 4
    with pytest.raises(QueueFull, match=r"^30 tokens wait, the prompt has 5 and max_num_queued_"):
        driver.add("g", priority=-501)


def test_tokens_of_those_who_made_room_and_wait_again_are_bounded(full):
    driver = full(max_num_queued_tokens=10)
    lengths = []
    for priority in range(-1, -51, -1):
        add_as_many_as_are_let_in(driver, [priority])
        driver.step()
        lengths.append(len(driver.waiting))
    assert lengths == [3, 4, 5, *[6] * 47]


def test_one_token_waits_in_the_singular(make_scheduler):
    driver = make_scheduler(max_num_seqs=1, max_num_queued_tokens=1)
    driver.add("a")
    driver.step()
    driver.add("b", 1)
    with pytest.raises(QueueFull, match=r"^1 token waits, the prompt has 1 and max_num_queued_"):
        driver.add("c", 1)


def test_requests_for_which_a_step_has_no_tokens_left_wait(make_scheduler):
    driver = make_scheduler(max_num_seqs=8, max_num_queued_requests=1)
    driver.add("a", 20)
    driver.add("b", 20)
    driver.add("c", 20)
    with pytest.raises(QueueFull, match=r"^1 request waits and max_num_queued_requests is 1;"):
        driver.add("d", 20)
    assert driver.step() == [("a", 20, 1), ("b", 12, 0)]
    assert driver.waiting == ["c"]


def test_forks_find_a_place_only_with_blocks_of_their_own(make_scheduler):
    driver = make_scheduler(num_blocks=8, max_num_seqs=6, max_num_queued_requests=1)
    driver.add("a", 5, n=3)
    driver.add("b", 5, n=3)
    driver.add("c", 1)
    with pytest.raises(QueueFull):
        driver.add("d", 1)
    driver.step()
    assert driver.running == ["a", "a.1", "a.2"]


def test_more_tokens_than_may_wait_are_refused_but_never_of_one_alone(make_scheduler):
    driver = make_scheduler(max_num_seqs=1, max_num_queued_tokens=10)
    driver.add("a", 5)
    driver.step()
    driver.add("b", 30)
    message = (
        r"^30 tokens wait, the prompt has 1 and max_num_queued_tokens is 10; "
        r"send the request again later$"
    )
    with pytest.raises(QueueFull, match=message):
        driver.add("c", 1)
    assert driver.scheduler.admission.num_tokens_refused == 1
    assert driver.scheduler.admission.num_requests_refused == 0
    driver.scheduler.finish("b", FinishReason.ABORT)
    driver.add("c", 5)
    driver.add("d", 5)
    with pytest.raises(QueueFull):
        driver.add("e", 1)


def test_what_is_refused_leaves_nothing_behind(make_scheduler):
    driver = make_scheduler(num_blocks=4, max_num_seqs=2)
    for error, options in (
        (InvalidRequest, {"prompt": 0}),
        (InvalidRequest, {"n": 3}),
        (PromptTooLong, {"prompt": 16}),
        (PromptTooLong, {"prompt": 12, "n": 2}),
    ):
        with pytest.raises(error):
            driver.add("a", **options)
    assert not driver.scheduler.has_unfinished
    driver.add("a", 11, n=2)
    assert driver.step() == [("a", 11, 2)]


def test_more_answers_than_seats_are_refused(make_scheduler):
    driver = make_scheduler(max_num_seqs=2)
    message = r"^n is 3 but max_num_seqs is 2; lower it or raise max_num_seqs$"
    with pytest.raises(InvalidRequest, match=message):
        driver.add("a", n=3)
