"""The counted figures of memory that the documentation shows are what the scheduler does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "memory.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return json.loads(path.read_text())


def test_memory_is_full_while_requests_wait_and_hardly_any_of_it_is_unused(figures):
    paged = figures["usage"][0]
    assert paged["unfilled_share"] <= 0.04
    assert paged["held_share"] >= 0.96


def test_slots_that_are_taken_hold_a_token_also_while_memory_is_full(figures):
    paged = figures["usage"][0]
    assert paged["full_filled_share"] >= 0.96 * paged["full_held_share"]
    assert figures["static"]["filled_share"] <= 0.4


@pytest.mark.parametrize("reserved", ["2,048 reserved", "8,192 reserved"])
def test_four_times_as_many_sequences_fit_as_when_the_longest_is_reserved_for_each(
    figures, reserved
):
    sequences = {usage["kind"]: usage["num_sequences"] for usage in figures["usage"]}
    assert sequences["blocks of 16"] >= 4 * sequences[reserved]


def test_a_pool_for_one_and_a_half_requests_costs_a_preemption_a_request_and_swap_computes_nothing(
    figures,
):
    for pressure in figures["pressure"]:
        assert pressure["num_preemptions"] <= 8
        assert pressure["num_recomputed_tokens"] == 0 or pressure["mode"] == "recompute"
