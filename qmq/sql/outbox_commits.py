"""Notices commits: SQLAlchemy's events report, for each engine, when a connection's outermost transaction is about to be committed or
rolled back.

    when(connection, committing, rolled_back)      one of the two is called, once, in whatever thread ends the transaction

Savepoints are not told of here, and need not be: the outbox looks into its table for what is there in the end. `committing` comes just
*before* the commit; it is given a way to ask whether the transaction is over.

One listener for each engine stays for the engine's life; removing one while its event is told is not allowed.
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
    """Call one of the two when the connection's transaction ends."""
    engine = connection.engine
    with _LOCK:
        commits = _LISTENING.get(engine)
        if commits is None:
            commits = _LISTENING[engine] = _Commits(engine)
    commits.add(connection, _Waiting(committing, rolled_back))
