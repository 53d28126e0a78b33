"""One client of QMQ for a task queue with threads: an event loop in a separate thread, and a
descriptor that becomes readable when messages arrive, for kombu's event loop or for `drain_events`.

Celery and others fork. A child has a copy of its parent's links without their threads. The child
must neither use nor free them, because closing a gRPC channel waits for threads that only the
parent has. Therefore `_OPEN` keeps open links, and `is_usable` says whether a link belongs to this
process.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, TypeVar

import qmq
from qmq.blocking.loop_thread import LoopThread
from qmq.errors import (
    AccessDenied,
    MessageNotFound,
    NotConnected,
    SubjectExists,
    TooLate,
    UnknownGroup,
    UnknownSubject,
)
from qmq.model import SubjectConfig

WAKES_READ: Final = 4096
DELAYED_KEPT: Final = 10_000
"""Delayed tasks that a connection sent and can cancel without looking for them."""

_R = TypeVar("_R")
_OPEN: Final[set[ClusterLink]] = set()


class ClusterLink:
    """A client with its own event loop.
    Any thread may call its methods, which raise the client's errors.
    """

    def __init__(
        self, connect: Callable[[], qmq.Client], timeout_s: float, retention_ms: int | None
    ) -> None:
        self._retention_ms = retention_ms
        self.process = os.getpid()
        """The process that opened the link: it does not work in a child."""
        _OPEN.add(self)
        self._thread = LoopThread()
        self._thread.start()
        self._subjects: set[str] = set()
        self._delayed: OrderedDict[str, str] = OrderedDict()
        self.signal, self._wake_end = os.pipe()  # eventfd exists on Linux only
        """`signal` is readable when messages may have arrived."""
        for each in (self.signal, self._wake_end):
            os.set_blocking(each, False)
        try:
            self.client = self._thread.call(connect)
            self.run(self._reach(timeout_s))
        except BaseException:
            self.close()
            raise

    async def _reach(self, timeout_s: float) -> None:
        """Send one request to the metaservers,
        so that a wrong address or token is an error of the connection.
        """
        try:
            async with asyncio.timeout(timeout_s):
                found = await self.client.metadata.metaservers()
        except TimeoutError:
            raise NotConnected(f"no metaserver answered within {timeout_s:g} s") from None
        failures = [
            each
            for each in found.values()
            if isinstance(each, qmq.QmqError) and not isinstance(each, AccessDenied)
        ]
        if len(failures) == len(found):
            raise failures[0]

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether this process made the link, and the link is open."""
        return self.signal >= 0 and self.process == os.getpid()

    def run(self, work: Coroutine[Any, Any, _R]) -> _R:
        """Run a coroutine in the loop, and wait for it."""
        return self._thread.run(work)

    def call(self, function: Callable[[], _R]) -> _R:
        """Call a function in the loop's thread, and wait for it."""
        return self._thread.call(function)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop's thread, without waiting for it."""
        self._thread.call_soon(function, *arguments)

    def wake(self) -> None:
        """Make the descriptor readable. From any thread."""
        if self.signal >= 0:
            with suppress(BlockingIOError):  # full: it is readable
                os.write(self._wake_end, b"\0")

    def calm(self) -> None:
        """Make the descriptor unreadable, until `wake`."""
        with suppress(BlockingIOError):
            while len(os.read(self.signal, WAKES_READ)) == WAKES_READ:
                pass

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the descriptor is readable. Returns whether it is."""
        poller = select.poll()
        poller.register(self.signal, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else max(0, timeout_s) * 1000))

    @property
    def now_ms(self) -> int:
        """The machine's time, in milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    # --- subjects ---------------------------------------------------------------------------------

    def ensure(self, subject: str) -> None:
        """Create a subject if it does not exist."""
        if subject in self._subjects:
            return
        if not self.exists(subject):
            with suppress(SubjectExists):
                self.run(
                    self.client.metadata.create_subject(
                        SubjectConfig(subject, retention_ms=self._retention_ms)
                    )
                )
        self._subjects.add(subject)

    def exists(self, subject: str) -> bool:
        """Whether there is such a subject."""
        return self.run(self.client.metadata.find_subject(subject)) is not None

    def waiting(self, subject: str, group: str) -> int:
        """The number of messages that wait for the group: never handed out, or given back."""
        return self._count(subject, group, is_unacked=False)

    def unfinished(self, subject: str, group: str) -> int:
        """The number of messages that wait for the group,
        or were handed out and have no verdict.
        """
        return self._count(subject, group, is_unacked=True)

    def _count(self, subject: str, group: str, *, is_unacked: bool) -> int:
        try:
            found = self.run(self.client.metadata.describe_groups(subject, group))
        except UnknownSubject:
            return 0
        except UnknownGroup:  # a new group begins at the oldest message
            stored = self.run(self.client.metadata.find_subject(subject))
            return (
                0
                if stored is None
                else sum(
                    each.next_sequence - each.start_sequence for each in stored.description.queues
                )
            )
        return sum(
            each.waiting + each.requeued + (each.unacked + each.dying if is_unacked else 0)
            for each in found
        )

    def purge(self, subject: str) -> None:
        """Delete the subject's stored messages."""
        try:
            self.run(self.client.metadata.purge_subject(subject))
        except UnknownSubject:
            return

    def delete(self, subject: str) -> None:
        """Delete the subject."""
        self._subjects.discard(subject)
        try:
            self.run(self.client.metadata.delete_subject(subject))
        except UnknownSubject:
            return

    def forget(self, subject: str, share: str) -> None:
        """Delete a group's progress."""
        try:
            self.run(self.client.metadata.delete_group(subject, share))
        except (UnknownSubject, UnknownGroup, qmq.errors.InvalidArgument):
            return

    # --- messages ---------------------------------------------------------------------------------

    def send(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        key: str | None,
        tags: Iterable[str] = (),
        at: datetime | None,
    ) -> None:
        """Send a message, and wait until it is stored."""
        receipt = self.run(
            self.client.send(subject, body, key=key, tags=tags, headers=headers, at=at)
        )
        if key is not None and receipt.delayed_id is not None:
            self._delayed[key] = str(receipt.delayed_id)
            if len(self._delayed) > DELAYED_KEPT:
                self._delayed.popitem(last=False)

    def cancel(self, keys: Iterable[str]) -> int:
        """Cancel delayed messages by their keys. Returns their number. Messages that other
        connections sent are found in the list of all pending ones.
        """
        left = set(keys)
        ids = {key: found for key in left if (found := self._delayed.pop(key, None)) is not None}
        left -= ids.keys()
        return self.run(self._cancel([*ids.values()], left))

    def cancel_all(self, subject: str) -> int:
        """Cancel all delayed messages to a subject. Returns their number."""
        return self.run(self._cancel_all(subject))

    async def _cancel(self, ids: list[str], keys: set[str]) -> int:
        if keys:
            wanted = {each.encode() for each in keys}  # other programs' keys may be any bytes
            ids += [
                each.id async for each in self.client.delayed.list() if each.key_bytes in wanted
            ]
        return await self._cancel_each(ids)

    async def _cancel_all(self, subject: str) -> int:
        return await self._cancel_each(
            [each.id async for each in self.client.delayed.list(subject)]
        )

    async def _cancel_each(self, ids: Iterable[str]) -> int:
        cancelled = 0
        for each in ids:
            try:
                await self.client.delayed.cancel(each)
                cancelled += 1
            except (TooLate, MessageNotFound):
                continue
        return cancelled

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the remaining verdicts, and end the thread."""
        if not self.is_usable:
            return
        try:
            self._thread.close(self.client.close if hasattr(self, "client") else None)
        finally:
            signal, self.signal = self.signal, -1
            os.close(signal)
            os.close(self._wake_end)
            _OPEN.discard(self)

    def abandon(self) -> None:
        """Close without waiting. The collector of garbage calls it, in any thread, also in the
        link's own.
        """
        if self.is_usable:
            threading.Thread(target=self.close, name="qmq-abandoned", daemon=True).start()
