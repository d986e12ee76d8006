"""The files behind this process's shared memory are found, and left to their owner."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import pytest

from octavo.triton_model.shared_memory import keep_private, mapped_files


def test_files_are_found_in_what_the_kernel_says_of_a_process(tmp_path: Path) -> None:
    mapped, other = tmp_path / "of two words", tmp_path / "other"
    for path in (mapped, other):
        path.write_bytes(b"x" * 4096)
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        maps = Path("/proc/self/maps").read_text().splitlines(keepends=True)
    assert mapped_files(maps, f"{tmp_path}/") == [mapped]
    gone = f"7f00-7f01 rw-s 00000000 00:19 5 {tmp_path}/gone (deleted)\n"
    assert mapped_files([gone, "7f00-7f01 rw-p 00000000 00:00 0\n"], f"{tmp_path}/") == []


def test_they_are_left_to_their_owner_and_what_cannot_be_changed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "region"
    path.touch(0o644)
    with caplog.at_level(logging.WARNING):
        keep_private([tmp_path / "gone", path])
    assert path.stat().st_mode & 0o777 == 0o600
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"shared memory {tmp_path / 'gone'} stays readable for other users"
    ]
