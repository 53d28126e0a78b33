"""A part of a file is brought into the page cache by few system calls (qmq/log/disk.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from qmq.limits import MIB
from qmq.log import disk

SIZE = 4 * MIB + 5


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    found = os.open(path, os.O_RDWR)
    yield found
    os.close(found)


def forget(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def kernel_tells(fd: int) -> bool:
    """A file that was just written is in the page cache, so a kernel that says no does not tell."""
    return disk.is_cached(fd, SIZE, 0)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read, sizes = os.preadv, list[int]()

    def counted(fd: int, views: Sequence[memoryview], at: int) -> int:
        sizes.append(read(fd, views, at))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, MIB + 77])
def test_a_part_that_was_loaded_is_in_the_page_cache(fd: int, kernel_tells: bool, at: int) -> None:
    forget(fd)
    disk.load(fd, 2 * MIB, at)
    assert disk.is_cached(fd, 2 * MIB, at) is kernel_tells


def test_what_is_in_the_page_cache_is_not_read_again(
    fd: int, kernel_tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = count_reads(monkeypatch)
    disk.load(fd, SIZE, 0)
    assert sum(sizes) == (0 if kernel_tells else SIZE)


def untold(_fd: int, _size: int, _at: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("size", "at"), [(SIZE, 0), (1, 0), (1, SIZE - 1), (3 * MIB + 1, 7), (64 * 1024, 12)]
)
def test_each_byte_is_read_once_by_few_calls(
    fd: int, monkeypatch: pytest.MonkeyPatch, size: int, at: int
) -> None:
    monkeypatch.setattr(disk, "is_cached", untold)
    sizes = count_reads(monkeypatch)
    disk.load(fd, size, at)
    assert sum(sizes) == size
    assert len(sizes) <= 3, "each call takes the interpreter lock from the event loop once more"


@pytest.mark.parametrize("tells", [disk.is_cached, untold])
def test_loading_ends_where_the_file_ends(
    fd: int, monkeypatch: pytest.MonkeyPatch, tells: Callable[[int, int, int], bool]
) -> None:
    monkeypatch.setattr(disk, "is_cached", tells)
    disk.load(fd, 9 * MIB, MIB)
    assert not disk.is_cached(fd, 9 * MIB, MIB), "there are no pages behind the end"
