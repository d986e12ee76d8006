"""What the engine's process is told about the pages of its memory."""

from __future__ import annotations

import pytest

from octavo.engine_host import with_huge_pages

HUGE, OTHER = "glibc.malloc.hugetlb=1", "glibc.malloc.check=3"
LONGER_NAME = "glibc.malloc.hugetlb_other=1"
ON_HEAP = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"


@pytest.mark.parametrize(
    ("set_already", "then"),
    [
        ({}, f"{HUGE}:{ON_HEAP}"),
        ({"GLIBC_TUNABLES": ""}, f"{HUGE}:{ON_HEAP}"),
        ({"GLIBC_TUNABLES": OTHER}, f"{OTHER}:{HUGE}:{ON_HEAP}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, f"glibc.malloc.hugetlb=0:{ON_HEAP}"),
        ({"GLIBC_TUNABLES": f"{HUGE}:{ON_HEAP}"}, f"{HUGE}:{ON_HEAP}"),
        ({"GLIBC_TUNABLES": LONGER_NAME}, f"{LONGER_NAME}:{HUGE}:{ON_HEAP}"),
    ],
)
def test_the_engine_asks_for_huge_pages_unless_the_user_has_chosen(
    set_already: dict[str, str], then: str
) -> None:
    environment = {"HOME": "/home/somebody", **set_already}
    before = dict(environment)
    assert with_huge_pages(environment) == {**before, "GLIBC_TUNABLES": then}
    assert environment == before
