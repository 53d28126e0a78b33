"""A schedule in memory, and threads that run when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from qmq.delay.interfaces import INDEX_ROW, BucketInfo, Places, SchedulePlace

_T = TypeVar("_T")


class Kept:
    """One bucket."""

    def __init__(self) -> None:
        self.due_times_ms: list[int] = []
        self.settled: list[bool] = []
        self.is_closed = False


class Reader:
    """A reader that fails if its bucket is closed before it reads, as with a deleted file."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.count = len(kept.due_times_ms)

    def read(self, first: int, end: int) -> npt.NDArray[np.void]:
        assert end <= self.count
        if self._kept.is_closed:
            raise FileNotFoundError("the bucket is closed")
        rows = np.zeros(end - first, INDEX_ROW)
        rows["due"] = self._kept.due_times_ms[first:end]
        return rows


class FakeSchedule:
    """See qmq.delay.interfaces.Source. `readings` has the buckets that were read."""

    def __init__(self, bucket_ms: int) -> None:
        self.bucket_ms = bucket_ms
        self.closed_before = 0
        self.kept: dict[int, Kept] = {}
        self.readings: list[int] = []
        self.on_pending: Callable[[Places], None] = lambda _: None

    def store(self, due_times_ms: list[int]) -> list[SchedulePlace]:
        found = []
        for due in due_times_ms:
            bucket = max(due // self.bucket_ms, self.closed_before)
            kept = self.kept.setdefault(bucket, Kept())
            found.append(SchedulePlace(bucket, len(kept.due_times_ms)))
            kept.due_times_ms.append(due)
            kept.settled.append(False)
        buckets, ordinals = zip(*found, strict=True)
        self.on_pending(Places(np.array(due_times_ms, np.int64), np.array(buckets, np.int32), np.array(ordinals, np.uint32)))
        return found

    def settle(self, place: SchedulePlace) -> None:
        self.kept[place.bucket].settled[place.ordinal] = True

    def close(self, before: int) -> None:
        left = [bucket for bucket, kept in self.kept.items() if not all(kept.settled)]
        self.closed_before = max(self.closed_before, min([before, *left]))
        for bucket in [each for each in self.kept if each < self.closed_before]:
            self.kept.pop(bucket).is_closed = True

    def buckets(self) -> list[BucketInfo]:
        return [BucketInfo(each, len(kept.due_times_ms), kept.settled.count(False), 0) for each, kept in sorted(self.kept.items())]

    def count(self, bucket: int) -> int:
        return len(self.kept[bucket].due_times_ms) if bucket in self.kept else 0

    def reader(self, bucket: int) -> Reader:
        self.readings.append(bucket)
        return Reader(self.kept[bucket])

    def rows(self, bucket: int, first: int, end: int) -> npt.NDArray[np.void]:
        return Reader(self.kept[bucket]).read(first, end)

    def settled(self, bucket: int) -> npt.NDArray[np.bool_]:
        return np.array(self.kept[bucket].settled, np.bool_)


class Later(Generic[_T]):
    """A call that runs at a chosen moment, and its result at another."""

    def __init__(self, run: Callable[[], _T]) -> None:
        self._run = run
        self._result: _T
        self._failure: BaseException | None = None
        self.is_run = False

    def run(self) -> None:
        if not self.is_run:
            self.is_run = True
            try:
                self._result = self._run()
            except OSError as failure:
                self._failure = failure

    def __await__(self) -> Generator[Later[_T], None, _T]:
        yield self
        assert self.is_run, "resumed before the thread was through"
        if self._failure is not None:
            raise self._failure
        return self._result


class Step:
    """A coroutine of the loader, gone through by hand: `begin` up to the thread, `read` in it, `finish`."""

    def __init__(self) -> None:
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._later: Later[Any]
        self.result: Any = None

    @property
    def is_under_way(self) -> bool:
        return self._coroutine is not None

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        assert self._coroutine is None
        self._coroutine = coroutine
        self._go_on()

    def read(self) -> None:
        if self._coroutine is not None:
            self._later.run()

    def finish(self) -> None:
        if self._coroutine is not None:
            self._later.run()
            self._go_on()

    def _go_on(self) -> None:
        assert self._coroutine is not None
        try:
            self._later = self._coroutine.send(None)
        except StopIteration as end:
            self._coroutine, self.result = None, end.value
        except BaseException:
            self._coroutine = None
            raise
