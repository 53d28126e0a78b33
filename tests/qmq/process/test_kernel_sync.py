"""Syncs by the kernel: a failed one is reported once and as final, a refused one is left to a
thread, and nothing of either is lost.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from support import eventually, needs
from support.disks import FailingKernel, RefusingKernel

from qmq.errors import FlushFailed
from qmq.log.disk import Disk
from qmq.process.kernel_sync import NUMBERS, KernelSyncs, SystemCall

pytestmark = needs.kernel_syncs


class FirstOnly(FailingKernel):
    """A kernel that takes one request of two."""

    def kernel_call(self) -> SystemCall | None:
        call = super().kernel_call()
        if call is None:
            return None
        submit = NUMBERS[platform.machine()].submit

        def called(number: int, a: int, b: int, c: int, d: int, e: int) -> int:
            return call(number, a, 1 if number == submit else b, c, d, e)

        return called


class Ends:
    """What the event loop was told about flushes."""

    def __init__(self) -> None:
        self.told: list[Future[float]] = []

    def __call__(self, flush: Future[float]) -> None:
        self.told.append(flush)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[int]]:
    """Two files with unsynced bytes."""
    opened = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("one", "two")]
    for file in opened:
        os.write(file, b"x" * 10_000)
    yield opened
    for file in opened:
        os.close(file)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_flush_ends_once_in_the_event_loop(files: list[int], count: int) -> None:
    kernel, ends = KernelSyncs(Disk().kernel_call()), Ends()
    for number in range(3):
        flush = kernel.begin(files[:count], ends)
        assert flush is not None
        await eventually(lambda wanted=number: len(ends.told) > wanted)
        assert ends.told[number] is flush
        assert flush.result() > 0
    kernel.close()
    assert len(ends.told) == 3


async def test_a_sync_that_fails_is_flush_failed(files: list[int]) -> None:
    disk, ends = FailingKernel(), Ends()
    disk.fails = True
    kernel = KernelSyncs(disk.kernel_call())
    kernel.begin(files, ends)
    await eventually(lambda: ends.told)
    assert isinstance(ends.told[0].exception(), FlushFailed)
    kernel.close()


async def test_results_that_cannot_be_read_fail_the_flush(files: list[int]) -> None:
    kernel, ends = KernelSyncs(RefusingKernel("get_events", errno.EINVAL).kernel_call()), Ends()
    kernel.begin(files, ends)
    await eventually(lambda: ends.told)
    assert isinstance(ends.told[0].exception(), FlushFailed)
    kernel.close()


async def test_a_wait_blocks_until_the_end_and_the_event_loop_is_told_later(
    files: list[int],
) -> None:
    kernel, ends = KernelSyncs(Disk().kernel_call()), Ends()
    flush = kernel.begin(files, ends)
    assert flush is not None
    kernel.wait()
    assert flush.done()
    assert ends.told == []
    await eventually(lambda: ends.told == [flush])
    kernel.close()
    assert kernel.begin(files, ends) is None
    assert ends.told == [flush]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("setup", errno.ENOSYS),
        ("setup", errno.EAGAIN),
        ("setup", errno.EPERM),
        ("submit", errno.EINVAL),
        ("submit", errno.EAGAIN),
    ],
)
async def test_what_the_kernel_refuses_is_left_to_a_thread(
    files: list[int], call: str, error: int
) -> None:
    kernel, ends = KernelSyncs(RefusingKernel(call, error).kernel_call()), Ends()
    assert kernel.begin(files, ends) is None
    assert kernel.begin(files[:1], ends) is None
    kernel.close()
    assert ends.told == []


@pytest.mark.parametrize("fails", [False, True])
async def test_one_refused_sync_of_two_hides_no_failure_of_the_other(
    files: list[int], fails: bool
) -> None:
    disk, ends = FirstOnly(), Ends()
    disk.fails = fails
    kernel = KernelSyncs(disk.kernel_call())
    if fails:
        with pytest.raises(FlushFailed):
            kernel.begin(files, ends)
    else:
        assert kernel.begin(files, ends) is None
    assert disk.begun == 1
    assert kernel.begin(files[:1], ends) is None
    kernel.close()
    assert ends.told == []
