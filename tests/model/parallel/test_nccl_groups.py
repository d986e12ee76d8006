"""What NCCL is asked, and in which order: a fake of it moves the bytes through gloo.

NCCL itself, streams and devices are not here: see docs/parallelism.md for what has never run.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from octavo.errors import EngineError
from octavo.model.process_groups import ProcessGroups, Rendezvous
from octavo.model.shard import Shard

TIMEOUT_S = 5.0


class FakeNccl:
    """A group that writes down its calls; gloo's own groups take the same ones."""

    Options = SimpleNamespace
    made: list["FakeNccl"]

    def __init__(self, store, rank, size, options):
        self.place, self.timeout = (rank, size), options._timeout
        self.calls = []
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, gloo)
        self.made.append(self)

    def eager_connect_single_device(self, device):
        self.calls.append(("connect", str(device)))

    def _allgather_base(self, out, part, options):
        self.calls.append(("all-gather", tuple(out.shape), options.asyncOp))
        return self._gloo._allgather_base(out, part)

    def send(self, tensors, rank, tag):
        self.calls.append(("send", rank))
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        self.calls.append(("receive", rank))
        return self._gloo.recv(tensors, rank, tag)

    def abort(self):
        self.calls.append(("abort",))


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    """Put the fake in the place of NCCL, which this torch may not have."""
    fake = type("Nccl", (FakeNccl,), {"made": []})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    return fake


@pytest.fixture
def on_all_ranks():
    """Return a function: open all groups as on GPUs, and do work with each; return the results."""

    def do(tp_size, pp_size, work):
        store, size = dist.HashStore(), tp_size * pp_size

        def on_one(rank):
            rendezvous = Rendezvous(store, "127.0.0.1", TIMEOUT_S)
            shard = Shard.of(rank, tp_size, pp_size)
            groups = ProcessGroups(shard, torch.device("cuda", rank), rendezvous)
            return work(groups, rank)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(on_one, range(size)))

    return do


def test_a_sum_is_one_gathering_on_the_current_stream_and_adds_in_the_order_of_ranks(
    nccl, on_all_ranks
):
    values = (2048.0, 0.25, -2048.0)

    def work(groups, rank):
        partial = torch.full((2, 3), values[rank]).half()
        groups.sum_(partial)
        return partial, groups.sent_bytes

    ordered = ((torch.tensor(values[0]) + values[1]) + values[2]).half()
    for summed, sent_bytes in on_all_ranks(3, 1, work):
        assert torch.equal(summed, torch.full((2, 3), ordered.item()).half())
        assert sent_bytes == 2 * 2 * 3 * 2
    assert {group.place for group in nccl.made} == {(0, 3), (1, 3), (2, 3)}
    for group in nccl.made:
        assert group.calls == [
            ("connect", f"cuda:{group.place[0]}"),
            ("all-gather", (6, 3), False),
        ]


def test_each_pair_of_stages_has_a_group_of_its_own(nccl, on_all_ranks):
    def work(groups, rank):
        stage, state = 2 - rank, torch.full((2, 2), float(rank))
        if stage:
            groups.receive(state)
        if stage < 2:
            groups.send(state)
        return state[0, 0].item(), groups

    values = [value for value, _ in on_all_ranks(1, 3, work)]
    assert values == [2.0, 2.0, 2.0]
    calls = sorted((group.place, group.calls[1:]) for group in nccl.made)
    assert calls == [((0, 2), [("send", 1)])] * 2 + [((1, 2), [("receive", 0)])] * 2
    connected = sorted(group.calls[0] for group in nccl.made)
    assert connected == [("connect", f"cuda:{rank}") for rank in (0, 1, 1, 2)]


def test_logits_are_gathered_by_the_first_rank(on_all_ranks):
    first, *others = on_all_ranks(
        3, 1, lambda groups, rank: groups.gather(torch.full((1, 2), float(rank)))
    )
    assert torch.equal(torch.cat(first), torch.tensor([[0.0] * 2, [1.0] * 2, [2.0] * 2]))
    assert others == [[], []]


def test_torch_ends_a_process_only_after_rank_zero_could_say_why(nccl, on_all_ranks):
    on_all_ranks(2, 1, lambda groups, rank: None)
    assert [group.timeout for group in nccl.made] == [timedelta(seconds=2 * TIMEOUT_S)] * 2


def test_nccl_is_asked_only_when_all_are_there(nccl):
    rendezvous = Rendezvous(dist.HashStore(), "127.0.0.1", 0.2)
    message = r"^rank 1 \(.*\) did not reach the other ranks of its tensor group and its pipeline"
    with pytest.raises(EngineError, match=message):
        ProcessGroups(Shard.of(1, 2, 1), torch.device("cuda", 1), rendezvous)
    assert nccl.made == []


def test_what_is_under_way_can_be_given_up(nccl, on_all_ranks):
    def work(groups, rank):
        groups.abort()

    on_all_ranks(2, 2, work)
    assert [group.calls[-1] for group in nccl.made] == [("abort",)] * 8


def test_groups_that_were_opened_before_one_failed_are_given_up(nccl, on_all_ranks, monkeypatch):
    class Failing(nccl):
        def eager_connect_single_device(self, device):
            super().eager_connect_single_device(device)
            if self.place[1] == 2:  # a pair of stages
                raise RuntimeError("NCCL error: unhandled. Last error: none")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Failing)
    with pytest.raises(EngineError, match=r" within 5 s: NCCL error: unhandled$"):
        on_all_ranks(3, 2, lambda groups, rank: None)
    ends = [group.calls[-1] for group in nccl.made if group.place[1] == 3]
    assert ends == [("abort",)] * 6
