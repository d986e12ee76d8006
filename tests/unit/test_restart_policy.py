from __future__ import annotations

from octavo.restart_policy import RestartPolicy


def test_pauses_double_and_end_after_the_last_start() -> None:
    policy = RestartPolicy(max_restarts=4, first_delay_s=0.5)
    assert [policy.next_delay_s(0.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, None, None]


def test_what_was_ready_long_enough_begins_a_new_count() -> None:
    policy = RestartPolicy(max_restarts=2, first_delay_s=1.0, sound_after_s=60.0)
    assert [policy.next_delay_s(ready) for ready in (0.0, 60.0, 60.1)] == [1.0, 2.0, 1.0]
    assert policy.num_restarts == 1


def test_no_starts_at_all_may_be_asked_for() -> None:
    assert RestartPolicy(max_restarts=0).next_delay_s(1000.0) is None
