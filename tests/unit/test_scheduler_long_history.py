"""One long, busy history for each policy: what leaks slowly, or starves, shows at its end."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.errors import QueueFull
from octavo.request import FinishReason
from octavo.sequence import SequenceStatus

NUM_REQUESTS = 1000
#: Three system prompts, one of them with the same beginning as another.
SYSTEM_PROMPTS = ([*range(100, 124)], [*range(100, 112), *range(200, 212)], [*range(300, 330)])


class Crowd:
    """Clients that send, lose patience and go away, all drawn from one seed."""

    def __init__(self, driver, seed: int) -> None:
        self.driver = driver
        self.random = random.Random(seed)
        self.num_sent = 0
        self.num_refused = 0
        self.num_expected: dict[str, int] = {}
        self.num_ended: Counter[str] = Counter()

    def send(self) -> None:
        draw, name = self.random, str(self.num_sent)
        self.num_sent += 1
        n = draw.choice((1, 1, 1, 1, 2, 4))
        own = [draw.randrange(1, 90) for _ in range(draw.randrange(1, 20))]
        try:
            self.driver.add(
                name,
                draw.choice(SYSTEM_PROMPTS) + own,
                n=n,
                max_tokens=draw.randrange(1, 40),
                priority=draw.choice((0, 0, 1, 5)),
                tenant=draw.choice("aaaab"),
                cache_salt=draw.choice(("", "", "", "x")),
                deadline_s=self.driver.now_s + draw.choice((30.0, 300.0, 3000.0)),
            )
        except QueueFull:
            self.num_refused += 1
        else:
            self.num_expected[name] = n

    def act(self) -> None:
        """Do what clients and a hard life do between two steps."""
        draw, scheduler = self.random, self.driver.scheduler
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            if self.num_sent < NUM_REQUESTS:
                self.send()
        if draw.random() < 0.05:
            for each in scheduler.finish(
                str(draw.randrange(self.num_sent + 1)), FinishReason.ABORT
            ):
                self.num_ended[each.request_id] += each.num_seats
        if draw.random() < 0.1 and scheduler.running:
            scheduler.preempt(draw.choice(scheduler.running), self.driver.now_s)
        if draw.random() < 0.3 and scheduler.restoring:
            self.driver.arrive(draw.choice(list(scheduler.restoring)))

    def step(self) -> None:
        self.driver.now_s += 1.0
        output = self.driver.plan()
        if not output.scheduled:
            self.driver.arrive()
        drawn = [self.random.randrange(12) for _ in output.sampling]
        self.driver.run(output, *drawn)
        for each in self.driver.outputs:
            self.num_ended[each.request_id] += each.finish_reason is not None


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_long_busy_history_answers_everybody_once_and_leaves_nothing_behind(
    make_scheduler, policy
):
    driver = make_scheduler(
        90,
        policy,
        num_host_blocks=60,
        prefix_caching=True,
        swap_pays=lambda num_blocks, num_tokens: num_blocks > 9,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        max_num_queued_requests=20,
    )
    crowd = Crowd(driver, seed=7)
    num_steps = 0
    while crowd.num_sent < NUM_REQUESTS or driver.scheduler.has_unfinished:
        crowd.act()
        crowd.step()
        num_steps += 1
        assert num_steps < 20 * NUM_REQUESTS
    scheduler, cache = driver.scheduler, driver.cache
    assert dict(crowd.num_ended) == crowd.num_expected
    assert scheduler.admission.num_requests_refused == crowd.num_refused
    assert (cache.num_free_blocks, cache.num_used_host_blocks) == (90, 0)
    assert (
        len(scheduler.waiting),
        scheduler.waiting.num_new_tokens,
        len(scheduler.waiting.swapped_request_ids),
    ) == (
        0,
        0,
        0,
    )
    assert (scheduler.running, scheduler.restoring) == ([], {})
    counted = (
        scheduler.num_swap_preemptions,
        scheduler.num_recompute_preemptions,
        cache.num_hit_tokens,
        crowd.num_refused,
    )
    assert min(counted) > 10, counted
    after = driver.add("after", 5, max_tokens=1)
    driver.step()
    assert after.status is SequenceStatus.FINISHED
