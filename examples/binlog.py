"""A database's binary log, made up: inserts, updates and deletes of one table, and a second table
that follows it change by change.

    source = Source(seed=1, keys=10_000)
    for change in source.changes(1_000_000): ...    # send change.encode() under change.key
    replica.apply(Change.decode(body))              # in the order of each key
    assert replica.dump() == source.dump()          # then

A few keys change all the time and most hardly ever, as in real tables (Zipf: the n-th key changes n
times more seldom than the first).

Rules that the replica keeps, as every follower of a table must:

* **A change's image from before is what the row must be now.** If it is not, order was broken or a
  change is missing: OutOfOrder.
* **Changes that come again change nothing**: they are known by their serial, which counts the
  changes of one key from 1. Messages are delivered at least once.
* The serial of a key outlives its row; otherwise an insert that comes again would bring a deleted
  row back.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

Row = list[Any]
"""The columns: owner, amount, note."""

CHUNK = 10_000
DELETES = 0.05
OWNERS = ("Ada", "Bohr", "Curie", "Darwin", "Euler", "Faraday", "Gauss", "Hopper")


class OutOfOrder(Exception):
    """A change does not fit the replica's row: another change of its key is missing,
    or came too early.
    """


class Change(NamedTuple):
    """One change of one row. `before` is None for an insert, `after` for a delete."""

    key: str
    serial: int
    before: Row | None
    after: Row | None

    def encode(self) -> bytes:
        """The change as a message body."""
        return json.dumps(self, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, body: bytes) -> Change:
        return cls(*json.loads(body))


class Source:
    """The source table. The same seed gives the same changes."""

    def __init__(self, seed: int = 1, keys: int = 10_000) -> None:
        self._coin = Random(seed)  # noqa: S311 - a made-up table, not a secret
        self._keys = [f"account-{number:06d}" for number in range(keys)]
        self._weights = list(accumulate(1 / rank for rank in range(1, keys + 1)))
        self._coin.shuffle(self._keys)
        self._serials: Counter[str] = Counter()
        self._rows: dict[str, Row] = {}

    def changes(self, count: int) -> Iterator[Change]:
        """The next changes, in the order in which they happen."""
        for begin in range(0, count, CHUNK):
            for key in self._coin.choices(
                self._keys, cum_weights=self._weights, k=min(CHUNK, count - begin)
            ):
                yield self._change(key)

    def _change(self, key: str) -> Change:
        before = self._rows.get(key)
        after: Row | None
        if before is None:
            after = [self._coin.choice(OWNERS), 0, "opened"]
        elif self._coin.random() < DELETES:
            after = None
        else:
            after = [
                before[0],
                before[1] + self._coin.randint(-500, 500),
                f"change {self._serials[key]}",
            ]
        self._serials[key] += 1
        if after is None:
            del self._rows[key]
        else:
            self._rows[key] = after
        return Change(key, self._serials[key], before, after)

    def dump(self) -> bytes:
        """The whole table, a line a row, by key."""
        return dump(self._rows.items())


class Replica(Protocol):
    """A table that follows the source."""

    def apply(self, change: Change) -> bool:
        """Apply a change. Returns whether it was new. Raises OutOfOrder."""
        ...

    def dump(self) -> bytes:
        """The whole table, a line a row, by key."""
        ...


class MemoryReplica:
    """A replica in a dictionary."""

    def __init__(self) -> None:
        self._serials: dict[str, int] = {}
        self._rows: dict[str, Row] = {}

    def apply(self, change: Change) -> bool:
        """Apply a change. Returns whether it was new. Raises OutOfOrder."""
        serial = self._serials.get(change.key, 0)
        if change.serial <= serial:
            return False
        check(change, serial, self._rows.get(change.key))
        self._serials[change.key] = change.serial
        if change.after is None:
            del self._rows[change.key]
        else:
            self._rows[change.key] = change.after
        return True

    def dump(self) -> bytes:
        """The whole table, a line a row, by key."""
        return dump(self._rows.items())


class SqliteReplica:
    """A replica in a SQLite file. A change and its serial belong to one transaction, which ends at
    `commit`: acknowledge after that. Several processes may share the file: each change is checked
    against the changes of all of them.
    """

    def __init__(self, path: Path | str) -> None:
        self._connection = sqlite3.connect(path, timeout=60.0, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS accounts (key TEXT PRIMARY KEY, serial INTEGER NOT "
            "NULL, row TEXT)"
        )

    def apply(self, change: Change) -> bool:
        """Apply a change. Returns whether it was new. Raises OutOfOrder."""
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        found = self._connection.execute(
            "SELECT serial, row FROM accounts WHERE key = ?", (change.key,)
        ).fetchone()
        serial, row = found or (0, None)
        if change.serial <= serial:
            return False
        check(change, serial, json.loads(row) if row is not None else None)
        after = json.dumps(change.after) if change.after is not None else None
        self._connection.execute(
            (
                "INSERT INTO accounts VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET serial = "
                "excluded.serial, row = excluded.row"
            ),
            (change.key, change.serial, after),
        )
        return True

    def commit(self) -> None:
        """Commit the applied changes, and let other processes continue."""
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")

    def dump(self) -> bytes:
        """The whole table, a line a row, by key."""
        found = self._connection.execute("SELECT key, row FROM accounts WHERE row IS NOT NULL")
        return dump((key, json.loads(row)) for key, row in found)

    def close(self) -> None:
        """Close the file; uncommitted changes are lost."""
        self._connection.close()


def check(change: Change, serial: int, row: Row | None) -> None:
    """Raises OutOfOrder unless the change is the next one of its key,
    and begins where the row is.
    """
    if change.serial != serial + 1:
        raise OutOfOrder(
            f"change {change.serial} of {change.key} came when change {serial + 1} was to come"
        )
    if change.before != row:
        raise OutOfOrder(
            f"change {change.serial} of {change.key} begins at {change.before}, but the row "
            f"is {row}"
        )


def dump(rows: Iterable[tuple[str, Row]]) -> bytes:
    """The rows as lines, by key: two tables are equal if and only if these bytes are."""
    return "".join(f"{key} {json.dumps(row)}\n" for key, row in sorted(rows)).encode()
