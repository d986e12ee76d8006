"""What a container allows is what counts, under cgroup v2 and v1, however it is shown."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from octavo.host_resources import THIS_MACHINE, Limit, host_memory, usable_cores, within_quota

MIB = 2**20
V2 = "30 23 0:26 {top} /sys/fs/cgroup ro,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 31 0:35 {top} /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "35 31 0:36 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V1_GROUPS = "5:pids:{0}\n4:memory:{0}\n1:cpu,cpuacct:{0}\n0::/\n"
#: What cgroup v1 says where there is no limit.
NO_LIMIT = 9223372036854771712

MakeRoot = Callable[[str, str, dict[str, object]], Path]


@pytest.fixture
def make_root(tmp_path: Path) -> MakeRoot:
    """Lay out the files that tell of control groups; those of groups below /sys/fs/cgroup."""

    def make(mounts: str, groups: str, files: dict[str, object]) -> Path:
        texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        texts |= {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path

    return make


def memory_v2(folder: str, limit: object, used: int, stat: str = "") -> dict[str, object]:
    names = ("memory.max", "memory.current", "memory.stat")
    return {f"{folder}{name}": text for name, text in zip(names, (limit, used, stat), strict=True)}


def memory_v1(folder: str, limit: object, used: int, stat: str = "") -> dict[str, object]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    texts = zip(names, (limit, used, stat), strict=True)
    return {f"memory/{folder}{name}": text for name, text in texts}


def test_without_control_groups_the_machine_is_what_there_is(tmp_path):
    memory = host_memory(tmp_path)
    assert memory.total == Limit(psutil.virtual_memory().total, THIS_MACHINE)
    assert memory.free.source == THIS_MACHINE
    assert 0 < memory.free.amount < memory.total.amount
    assert within_quota(64, tmp_path) == 64
    assert 1 <= usable_cores(tmp_path) <= len(os.sched_getaffinity(0))


def test_a_container_of_its_own_namespace_is_bound_by_its_limit(make_root, caplog):
    caplog.set_level(logging.INFO)
    files = memory_v2("", 64 * MIB, 40 * MIB) | {"cpu.max": "250000 100000"}
    root = make_root(V2.format(top="/"), "0::/\n", files)
    group = "this control group (/sys/fs/cgroup/memory.max)"
    memory = host_memory(root)
    assert (memory.total, memory.free) == (Limit(64 * MIB, group), Limit(24 * MIB, group))
    assert within_quota(64, root) == 2
    assert caplog.messages == [
        f"{group} has 24 MiB of free memory",
        "this control group (/sys/fs/cgroup/cpu.max) has time of 2 CPUs, 64 could be used",
    ]


def test_a_container_of_cgroup_v1_is_bound_by_its_limit(make_root):
    # Mounted is the container's own group, at the path that it has on the machine.
    pod = "/kubepods/pod1/abc"
    files = memory_v1("", 64 * MIB, 40 * MIB)
    files |= {"cpu,cpuacct/cpu.cfs_quota_us": 399_999, "cpu,cpuacct/cpu.cfs_period_us": 100_000}
    root = make_root(V1.format(top=pod), V1_GROUPS.format(pod), files)
    group = "this control group (/sys/fs/cgroup/memory/memory.limit_in_bytes)"
    memory = host_memory(root)
    assert (memory.total, memory.free) == (Limit(64 * MIB, group), Limit(24 * MIB, group))
    assert within_quota(64, root) == 3


def test_a_group_that_leads_out_of_what_is_mounted_is_read_where_the_mount_is(make_root):
    files = memory_v2("", 64 * MIB, 40 * MIB)
    root = make_root(V2.format(top="/"), "0::/../../pod1/abc\n", files)
    assert host_memory(root).free.amount == 24 * MIB


def test_limits_of_all_groups_above_count(make_root):
    files = memory_v2("", 90 * MIB, 80 * MIB)
    files |= memory_v2("slice/", 64 * MIB, 30 * MIB)
    files |= memory_v2("slice/unit/", "max", 20 * MIB)
    files |= {"slice/cpu.max": "300000 100000", "slice/unit/cpu.max": "max 100000"}
    memory = host_memory(make_root(V2.format(top="/"), "0::/slice/unit\n", files))
    total, free = "slice/memory.max", "memory.max"
    assert memory.total == Limit(64 * MIB, f"this control group (/sys/fs/cgroup/{total})")
    assert memory.free == Limit(10 * MIB, f"this control group (/sys/fs/cgroup/{free})")


def test_the_smallest_quota_of_all_groups_above_counts(make_root):
    files = {"cpu.max": "800000 100000", "a/cpu.max": "150000 50000", "a/b/cpu.max": "max 100000"}
    assert within_quota(64, make_root(V2.format(top="/"), "0::/a/b\n", files)) == 3


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_count_as_free(make_root, version):
    stat = "anon 5\nfile 9\ninactive_file {0}\nactive_file {1}\n"
    numbers = (20 * MIB, 10 * MIB)
    if version == 2:
        files = memory_v2("", 64 * MIB, 60 * MIB, stat.format(*numbers))
        root = make_root(V2.format(top="/"), "0::/\n", files)
    else:
        # The first two are of the group alone, and those below it use memory too.
        total = stat.format(1, 2) + f"total_inactive_file {numbers[0]}\n"
        total += f"total_active_file {numbers[1]}\n"
        files = memory_v1("", 64 * MIB, 60 * MIB, total)
        root = make_root(V1.format(top="/"), V1_GROUPS.format("/"), files)
    assert host_memory(root).free.amount == 34 * MIB


def test_a_group_over_its_limit_has_nothing_free(make_root):
    root = make_root(V2.format(top="/"), "0::/\n", memory_v2("", 64 * MIB, 65 * MIB))
    assert host_memory(root).free.amount == 0


@pytest.mark.parametrize(("mounts", "groups"), [(V2, "0::/\n"), (V1, V1_GROUPS.format("/"))])
def test_groups_without_limits_bind_nothing(make_root, caplog, mounts, groups):
    caplog.set_level(logging.INFO)
    files = memory_v2("", "max", 40 * MIB) | memory_v1("", NO_LIMIT, 40 * MIB)
    files |= {"cpu.max": "max 100000", "cpu,cpuacct/cpu.cfs_quota_us": -1}
    files |= {"cpu,cpuacct/cpu.cfs_period_us": 100_000}
    root = make_root(mounts.format(top="/"), groups, files)
    memory = host_memory(root)
    assert (memory.total.source, memory.free.source) == (THIS_MACHINE, THIS_MACHINE)
    assert within_quota(64, root) == 64
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("quota", "num_threads"), [("5000 100000", 1), ("199999 100000", 1), ("6400000 100000", 64)]
)
def test_a_quota_is_rounded_down_and_leaves_at_least_one_thread(make_root, quota, num_threads):
    root = make_root(V2.format(top="/"), "0::/\n", {"cpu.max": quota})
    assert within_quota(64, root) == num_threads


def test_cores_beyond_a_quota_are_not_used(make_root):
    root = make_root(V2.format(top="/"), "0::/\n", {"cpu.max": "100000 100000"})
    assert usable_cores(root) == 1
