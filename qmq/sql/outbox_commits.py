"""Notices commits: SQLAlchemy's events report, for each engine, when a connection's outermost transaction is about to be committed or
rolled back.

    when(connection, committing, rolled_back)   one of the two is called, once, in the thread that ends the transaction

Savepoints are not reported, and need not be: the outbox reads in its table which messages were committed. `committing` is called just
*before* the commit, with a function that says whether the transaction has ended. Each engine keeps one listener for its life, since a
listener must not be removed while its event is being handled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event

_LISTENING: Final[WeakKeyDictionary[Engine, _Commits]] = WeakKeyDictionary()
_LOCK: Final = threading.Lock()


class _Waiting(NamedTuple):
    committing: Callable[[Callable[[], bool]], None]
    rolled_back: Callable[[], None]


class _Commits:
    """The callbacks for the transactions of one engine's connections."""

    def __init__(self, engine: Engine) -> None:
        self._waiting: WeakKeyDictionary[Connection, list[_Waiting]] = WeakKeyDictionary()
        for name, told in (
            ("commit", self._committing),
            ("commit_twophase", self._committing),
            ("rollback", self._rolled_back),
            ("rollback_twophase", self._rolled_back),
        ):
            event.listen(engine, name, told)

    def add(self, connection: Connection, waiting: _Waiting) -> None:
        self._waiting.setdefault(connection, []).append(waiting)

    def _committing(self, connection: Connection, *_: Any) -> None:
        transaction = connection.get_transaction()
        for each in self._waiting.pop(connection, ()):
            each.committing(lambda: transaction is None or not transaction.is_active)

    def _rolled_back(self, connection: Connection, *_: Any) -> None:
        for each in self._waiting.pop(connection, ()):
            each.rolled_back()


def when(connection: Connection, committing: Callable[[Callable[[], bool]], None], rolled_back: Callable[[], None]) -> None:
    """Call one of the two functions when the connection's transaction ends."""
    engine = connection.engine
    with _LOCK:
        commits = _LISTENING.get(engine)
        if commits is None:
            commits = _LISTENING[engine] = _Commits(engine)
    commits.add(connection, _Waiting(committing, rolled_back))
