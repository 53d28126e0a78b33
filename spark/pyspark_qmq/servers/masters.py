"""Which address serves a broker group now, and connections to it: thin I/O around the book, `qmq.client.route_book.RouteBook`.

Rules:
* A connection is taken by one user at a time, and given back if nothing is under way on it.
* A master that sends us away, or cannot be reached, is doubted: a metaserver is asked, and asked again, until somebody serves the group or
  `retry_ms` is over.
* A subject that a metaserver knows and a broker does not (yet) is as good as a broker that does not answer: its view is behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from pyspark_qmq.servers.blocking_connection import TIMING, BlockingConnection, ConnectionTiming
from pyspark_qmq.servers.metaservers import Located, Metadata
from pyspark_qmq.servers.retry_deadline import patiently
from qmq.client.route_book import RouteBook, delayed_target
from qmq.errors import NotConnected, NotMaster, Overloaded, QmqError, Unavailable, UnknownSubject

IDLE_MAX: Final = 4
"""Connections to one broker group that are kept for the next user."""

_R = TypeVar("_R")


class MasterConnections:
    """The masters of the broker groups; with `delayed` of the delay groups. Used by one thread."""

    def __init__(self, metadata: Metadata, *, delayed: bool = False, timing: ConnectionTiming = TIMING) -> None:
        self._timing = timing
        self.retry_ms = metadata.retry_ms
        self._metadata = metadata
        self._is_delayed = delayed
        self._book = RouteBook()
        self._idle: dict[str, list[BlockingConnection]] = {}

    # --- where ---------------------------------------------------------------------------------------------------------

    def locate(self, subject: str, *, retry_ms: int | None = None) -> Located:
        """Ask a metaserver where a subject is, and remember who are the masters. Raises UnknownSubject, InvalidName, NotConnected."""
        ask = self._book.ask()
        found = self._metadata.locate(subject, delayed=self._is_delayed, retry_ms=retry_ms)
        target = delayed_target(subject) if self._is_delayed else subject
        self._book.learn(ask, target, *found.placement)
        return found

    def doubt(self, group: str) -> None:
        """Whoever is known as the group's master is not, or cannot be reached: ask before the next use."""
        self._book.doubt(group)
        for each in self._idle.pop(group, []):
            each.close()

    # --- connections ---------------------------------------------------------------------------------------------------

    def take(self, subject: str, group: str, *, retry_ms: int | None = None) -> BlockingConnection:
        """A connection to the group's master, for the caller alone: to be ended with `give` or `lose`. The subject lives on the group.

        Raises UnknownSubject, and NotConnected after `retry_ms` (default: the metadata's).
        """
        return patiently(lambda: self._take(subject, group), self.retry_ms if retry_ms is None else retry_ms)

    def _take(self, subject: str, group: str) -> BlockingConnection:
        master = self._book.master(group)
        if master is None:
            self.locate(subject, retry_ms=0)
            master = self._book.master(group)
        if master is None:
            raise NotConnected(f"broker group {group!r} has no master at the moment")
        idle = self._idle.get(group, [])
        while idle:
            channel = idle.pop()
            if channel.is_open and channel.address == master.address:
                return channel
            channel.close()
        try:
            return BlockingConnection.connect(master.address, self._timing)
        except NotConnected as failure:
            self._book.doubt(group, master)
            raise NotConnected(f"the master of broker group {group!r} does not answer: {failure.message}") from failure

    def give(self, group: str, channel: BlockingConnection) -> None:
        """Nothing is under way on it: somebody else may have it."""
        idle = self._idle.setdefault(group, [])
        if channel.is_open and len(idle) < IDLE_MAX:
            idle.append(channel)
        else:
            channel.close()

    def lose(self, group: str, channel: BlockingConnection, failure: QmqError | None = None) -> None:
        """It failed, or answers are still to come on it: end it. If the failure says so, look for the master again."""
        channel.close()
        if failure is not None and is_about_master(failure):
            self.doubt(group)

    def ask(self, subject: str, group: str, act: Callable[[BlockingConnection], _R]) -> _R:
        """Do something that may be done again, on a connection to the group's master, until it works.

        Raises what `act` raises, but for NotConnected after `retry_ms` where trying again might have helped.
        """
        return patiently(lambda: self._ask_once(subject, group, act), self.retry_ms)

    def _ask_once(self, subject: str, group: str, act: Callable[[BlockingConnection], _R]) -> _R:
        channel = self._take(subject, group)
        try:
            found = act(channel)
        except QmqError as failure:
            self.lose(group, channel, failure)
            if isinstance(failure, UnknownSubject):
                raise NotConnected(f"broker group {group!r} does not know subject {subject!r} (yet): {failure.message}") from failure
            raise
        except BaseException:
            channel.close()
            raise
        self.give(group, channel)
        return found

    def call(self, subject: str, group: str, kind: int, *buffers: bytes) -> memoryview:
        """One request that may be repeated, and its answer. Raises as `ask`."""
        return self.ask(subject, group, lambda channel: channel.call(kind, *buffers))

    def close(self) -> None:
        """End what is idle."""
        for group in list(self._idle):
            for each in self._idle.pop(group):
                each.close()


def is_about_master(failure: QmqError) -> bool:
    """Whether another broker may serve the group by now: it is worth asking who."""
    return isinstance(failure, NotMaster | NotConnected) or (isinstance(failure, Unavailable) and not isinstance(failure, Overloaded))


def may_pass(failure: QmqError) -> bool:
    """Whether trying again may help."""
    return isinstance(failure, Unavailable | UnknownSubject)
