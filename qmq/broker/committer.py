"""Who says when an entry is safe: a node alone for itself; of a replica, the driver (qmq_replication/driver.py)."""

from __future__ import annotations

from typing import Protocol

from qmq.log.log_config import Flush
from qmq.log.store import Store


class Commits(Protocol):
    """Who is told what is safe: the broker."""

    @property
    def store(self) -> Store:
        """The store that it serves from now."""
        ...

    def commit(self, index: int) -> None:
        """Everything up to `index` is committed."""
        ...

    def flushed(self, index: int) -> None:
        """Everything up to `index` is committed, and flushed on a majority."""
        ...


class Committer(Protocol):
    """Decides when an entry is safe, and says so by `Broker.commit`."""

    def written(self, index: int) -> None:
        """Everything up to `index` is written here."""
        ...

    def stored(self, index: int) -> None:
        """Everything up to `index` survives a power cut here."""
        ...

    def flush_wanted(self, index: int) -> None:
        """Somebody will wait for `Broker.flushed(index)`; said before `written`."""
        ...


class Alone:
    """The committer of a node without replicas."""

    def __init__(self, broker: Commits) -> None:
        self._broker = broker

    def written(self, index: int) -> None:
        """With `Flush.ASYNC` that is enough."""
        if self._broker.store.config.flush is Flush.ASYNC:
            self._broker.commit(index)

    def stored(self, index: int) -> None:
        """Safe in any case."""
        self._broker.commit(index)
        self._broker.flushed(index)

    def flush_wanted(self, index: int) -> None:
        """Nobody else has to know."""
