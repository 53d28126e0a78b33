"""Decides when an entry is committed: on a single node, the node itself; on a replica, the driver (qmq_replication/driver.py)."""

from __future__ import annotations

from typing import Protocol

from qmq.log.log_config import Flush
from qmq.log.store import Store


class Commits(Protocol):
    """The broker's interface for the committer."""

    @property
    def store(self) -> Store:
        """The store that is served from now on."""
        ...

    def commit(self, index: int) -> None:
        """Everything up to `index` is committed."""
        ...

    def flushed(self, index: int) -> None:
        """Everything up to `index` is committed, and flushed on a majority."""
        ...


class Committer(Protocol):
    """Decides when an entry is committed, and calls `Broker.commit`."""

    def written(self, index: int) -> None:
        """Everything up to `index` is written on this replica."""
        ...

    def stored(self, index: int) -> None:
        """Everything up to `index` survives a power cut of this replica."""
        ...

    def flush_wanted(self, index: int) -> None:
        """A request will wait for `Broker.flushed(index)`; called before `written`."""
        ...


class Alone:
    """The committer of a single node."""

    def __init__(self, broker: Commits) -> None:
        self._broker = broker

    def written(self, index: int) -> None:
        """With `Flush.ASYNC` a written entry is committed."""
        if self._broker.store.config.flush is Flush.ASYNC:
            self._broker.commit(index)

    def stored(self, index: int) -> None:
        """A flushed entry is committed in any case."""
        self._broker.commit(index)
        self._broker.flushed(index)

    def flush_wanted(self, index: int) -> None:
        """Does nothing on a single node."""
