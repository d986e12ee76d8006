"""Ranks know how many of them share a machine, and Ray's are of the same versions."""

from __future__ import annotations

import re

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.parallel.rank_messages import Assignment
from octavo.executor.parallel.ray_messages import Hello, versions
from octavo.executor.parallel.rendezvous import (
    count_ranks_here,
    join_rendezvous,
    open_rendezvous,
)


def test_ranks_of_a_machine_are_counted():
    config = EngineConfig("model", pipeline_parallel_size=4)
    own, port = open_rendezvous("127.0.0.1", 5.0)
    others = [
        join_rendezvous(Assignment(config, rank, "cpu", "127.0.0.1", port, 1, 5.0), host)
        for rank, host in ((1, "10.0.0.2"), (2, "127.0.0.1"), (3, "10.0.0.2"))
    ]
    assert [count_ranks_here(each, 4) for each in (own, *others)] == [2, 2, 2, 2]


def test_a_rank_of_other_versions_is_refused():
    Hello(1, is_log=False).check_versions("rank 1 on 10.0.0.2")
    other = Hello(1, is_log=False, versions="octavo 0.0.9, torch 2.6.0, Python 3.11.7")
    message = rf"^rank 1 on 10.0.0.2 has octavo 0.0.9, .* but rank 0 has {re.escape(versions())};"
    with pytest.raises(ConfigError, match=message):
        other.check_versions("rank 1 on 10.0.0.2")
