from __future__ import annotations

import pytest

from octavo.triton_model.client_round import BATCH, INTERVAL_S, ROUND_S, ClientRound


@pytest.fixture
def live() -> dict[str, int]:
    return {str(number): number for number in range(3 * BATCH)}


def test_few_are_asked_at_a_time_and_all_in_turn(live: dict[str, int]) -> None:
    clients = ClientRound()
    times = [clients.due(live, float(second)) for second in range(4)]
    asked = [list(each) for each in times]
    assert [len(each) for each in asked] == [BATCH] * 4
    assert asked[0] + asked[1] + asked[2] == list(live.values())
    assert asked[3] == asked[0]


def test_nobody_is_asked_again_before_the_time(live: dict[str, int]) -> None:
    clients = ClientRound()
    assert list(clients.due(live, 1.0))
    assert list(clients.due(live, 1.0 + 0.9 * INTERVAL_S)) == []
    assert clients.next_s == 1.0 + INTERVAL_S


def test_who_has_ended_meanwhile_is_not_asked(live: dict[str, int]) -> None:
    clients = ClientRound()
    asked = []
    for number in clients.due(live, 0.0):
        asked.append(number)
        live.pop(str(number + 1), None)
    assert asked == list(range(0, 2 * BATCH, 2))


def test_a_round_of_many_takes_no_longer_than_it_may() -> None:
    live = {str(number): number for number in range(5000)}
    clients = ClientRound()
    num_times = round(ROUND_S / INTERVAL_S)
    asked = [number for i in range(num_times) for number in clients.due(live, float(i))]
    assert asked == list(range(5000))
