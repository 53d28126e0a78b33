"""Finds the current master of a broker group and keeps connections to it: thin I/O around `qmq.client.route_book.RouteBook`.

Rules:
* One user at a time has a connection, and returns it if no request is in flight.
* If a master redirects or cannot be reached, metaservers are asked repeatedly for the master until one serves the group or `retry_ms` has
  passed.
* A broker that does not know a subject known to a metaserver is treated as unreachable, because its view is behind.
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
"""Idle connections kept per broker group."""

_R = TypeVar("_R")


class MasterConnections:
    """The masters of the broker groups; with `delayed`, of the delay groups. Not thread-safe."""

    def __init__(self, metadata: Metadata, *, delayed: bool = False, timing: ConnectionTiming = TIMING) -> None:
        self._timing = timing
        self.retry_ms = metadata.retry_ms
        self._metadata = metadata
        self._is_delayed = delayed
        self._book = RouteBook()
        self._idle: dict[str, list[BlockingConnection]] = {}

    # --- masters ---------------------------------------------------------------------------------------------------------

    def locate(self, subject: str, *, retry_ms: int | None = None) -> Located:
        """Look up a subject at a metaserver and remember the masters. Raises UnknownSubject, InvalidName, NotConnected."""
        ask = self._book.ask()
        found = self._metadata.locate(subject, delayed=self._is_delayed, retry_ms=retry_ms)
        target = delayed_target(subject) if self._is_delayed else subject
        self._book.learn(ask, target, *found.placement)
        return found

    def doubt(self, group: str) -> None:
        """Forget the group's known master, so that the next use asks a metaserver."""
        self._book.doubt(group)
        for each in self._idle.pop(group, []):
            each.close()

    # --- connections ---------------------------------------------------------------------------------------------------

    def take(self, subject: str, group: str, *, retry_ms: int | None = None) -> BlockingConnection:
        """Take a connection to the master of a group that has the subject. Return it with `give` or `lose`.

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
            if channel.is_open and (channel.address, channel.server) == (master.address, master.server):
                return channel
            channel.close()
        try:
            return BlockingConnection.connect(master.address, self._timing, server=master.server)
        except NotConnected as failure:
            self._book.doubt(group, master)
            raise NotConnected(f"the master of broker group {group!r} does not answer: {failure.message}") from failure

    def give(self, group: str, channel: BlockingConnection) -> None:
        """Return a connection without requests in flight."""
        idle = self._idle.setdefault(group, [])
        if channel.is_open and len(idle) < IDLE_MAX:
            idle.append(channel)
        else:
            channel.close()

    def lose(self, group: str, channel: BlockingConnection, failure: QmqError | None = None) -> None:
        """Close a connection that failed or has requests in flight. Depending on the failure, look for the master again."""
        channel.close()
        if failure is not None and is_about_master(failure):
            self.doubt(group)

    def ask(self, subject: str, group: str, act: Callable[[BlockingConnection], _R]) -> _R:
        """Run an idempotent action on a connection to the group's master until it succeeds.

        Raises what `act` raises; NotConnected after `retry_ms` of retries.
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
        """Send an idempotent request and return the answer. Raises what `ask` raises."""
        return self.ask(subject, group, lambda channel: channel.call(kind, *buffers))

    def close(self) -> None:
        """Close idle connections."""
        for group in list(self._idle):
            for each in self._idle.pop(group):
                each.close()


def is_about_master(failure: QmqError) -> bool:
    """Whether the failure suggests that the master has changed."""
    return isinstance(failure, NotMaster | NotConnected) or (isinstance(failure, Unavailable) and not isinstance(failure, Overloaded))


def may_pass(failure: QmqError) -> bool:
    """Whether a retry may help."""
    return isinstance(failure, Unavailable | UnknownSubject)
