"""What the engine's process is told about the pages of its memory."""

from __future__ import annotations

import pytest

from octavo.engine_host import with_huge_pages

HUGE, OTHER = "glibc.malloc.hugetlb=1", "glibc.malloc.check=3"


@pytest.mark.parametrize(
    ("set_already", "then"),
    [
        ({}, HUGE),
        ({"GLIBC_TUNABLES": ""}, HUGE),
        ({"GLIBC_TUNABLES": OTHER}, f"{OTHER}:{HUGE}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_engine_asks_for_huge_pages_unless_the_user_has_chosen(
    set_already: dict[str, str], then: str
) -> None:
    environment = {"HOME": "/home/somebody", **set_already}
    before = dict(environment)
    assert with_huge_pages(environment) == {**before, "GLIBC_TUNABLES": then}
    assert environment == before
