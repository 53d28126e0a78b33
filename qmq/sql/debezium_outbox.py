"""An outbox in Debezium's table layout: the application writes rows as Debezium's EventRouter reads
them, and a watchdog moves them.

    application ── write_event ──▶ outboxevent (id, aggregatetype, aggregateid, type, payload)
    outboxevent ──▶ Debezium, which reads the database's log
            or  ── DebeziumIntake.move ──▶ qmq_outbox ──▶ watchdog ──▶ broker

Rules:
* One transaction deletes rows here and inserts them into the outbox. So a row is moved once, even
  if two watchdogs try, and then has all guarantees of the outbox.
* As with EventRouter, the subject is `outbox.event.AGGREGATETYPE`, the key is `aggregateid`, and
  the header `id` is the row's id.
* Applications that delete the row right after its insertion need Debezium: a reader of the table
  never sees it.
* The message's id is the row's id, so a row that another process sends as well is recognised.
* A row that cannot become a message stays in the table, an error is logged, and other rows are not
  delayed.
* A row whose message is in the outbox already, as when an id is used twice, waits until that
  message was sent; other rows are not delayed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from sqlalchemy import bindparam, delete, insert, select

from qmq.errors import InvalidArgument, QmqError
from qmq.model import MessageId, utf8
from qmq.sql.connection import (
    DatabaseConnection,
    Statement,
    finish,
    listed,
    named_table,
    places,
    places_for,
)
from qmq.sql.dialects import check_dialect
from qmq.sql.outbox import target_of
from qmq.sql.outbox_message import new_message
from qmq.sql.outbox_runner import Runner
from qmq.sql.outbox_statements import OutboxStatements
from qmq.sql.outbox_tables import check_table

log = logging.getLogger("qmq.outbox")

TABLE: Final = "outboxevent"
COLUMNS: Final = ("id", "aggregatetype", "aggregateid", "type", "payload")
SUBJECT: Final = "outbox.event.{aggregatetype}"
ROWS: Final = 50
"""The rows of one transaction."""
_TYPES: Final = {
    "sqlite": ("TEXT", "TEXT", "TEXT"),
    "postgresql": ("UUID", "VARCHAR(255)", "JSONB"),
}
_TYPES_MYSQL: Final = ("CHAR(36)", "VARCHAR(255)", "JSON")


def migration(dialect: str, table: str = TABLE) -> str:
    """The statement that creates the table as Debezium's documentation has it. Raises
    InvalidArgument, InvalidName.
    """
    key, text, payload = _TYPES.get(check_dialect(dialect), _TYPES_MYSQL)
    columns = (
        f"id {key} NOT NULL PRIMARY KEY",
        *[f"{name} {text} NOT NULL" for name in COLUMNS[1:4]],
        f"payload {payload}",
    )
    return (
        f"CREATE TABLE IF NOT EXISTS {check_table(table)} (\n    "
        + ",\n    ".join(columns)
        + "\n);\n"
    )


def time_ordered_id(now_ns: Callable[[], int] = time.time_ns) -> UUID:
    """A UUID of version 7: ids made later sort later, to about a microsecond."""
    now = now_ns()
    millis, part = now // 1_000_000, (now % 1_000_000) * 4096 // 1_000_000
    return UUID(
        int=(millis << 80)
        | (7 << 76)
        | (part << 64)
        | (2 << 62)
        | (int.from_bytes(os.urandom(8)) >> 2)
    )


@dataclass(frozen=True, slots=True)
class DebeziumEvent:
    """One row. `payload` is JSON text, or a value that can be encoded as JSON;
    None is a tombstone.
    """

    aggregatetype: str
    aggregateid: str
    type: str
    payload: Any = None
    id: UUID = field(default_factory=time_ordered_id)

    def row(self) -> dict[str, Any]:
        """The row to insert."""
        payload = (
            self.payload
            if self.payload is None or isinstance(self.payload, str | bytes)
            else json.dumps(self.payload)
        )
        return {
            "id": str(self.id),
            "aggregatetype": self.aggregatetype,
            "aggregateid": self.aggregateid,
            "type": self.type,
            "payload": payload,
        }


async def write_event(connection: Any, event: DebeziumEvent, *, table: str = TABLE) -> None:
    """Insert a row in the transaction of the application's own connection (as in `Client.outbox`).
    Raises InvalidArgument, InvalidName, what the driver raises.
    """
    statement = insert(named_table(check_table(table), *COLUMNS)).values(
        {each: bindparam(f"new_{each}") for each in COLUMNS}
    )
    database = await target_of(connection).database()
    await database.execute(
        Statement(statement, {f"new_{name}": value for name, value in event.row().items()})
    )


def write_event_blocking(connection: Any, event: DebeziumEvent, *, table: str = TABLE) -> None:
    """`write_event` on a sync connection."""
    finish(write_event(connection, event, table=table))


@dataclass(frozen=True, slots=True)
class DebeziumTable:
    """A table in Debezium's layout, from which a watchdog sends: `mq.outbox_watchdog(engine,
    debezium=DebeziumTable())`.

    Rows are sent in the order of the column `order_by`. Ids of version 4 have no order: then name a
    column that grows, if the order of an aggregate's events matters. Raises InvalidName,
    InvalidArgument.
    """

    name: str = TABLE
    subject: str = SUBJECT
    """The subject's name, with the row's `{aggregatetype}`."""
    order_by: str = "id"

    def __post_init__(self) -> None:
        check_table(self.name)
        if not self.order_by.isidentifier() or not self.order_by.isascii():
            raise InvalidArgument(f"order_by is a column's name, not {self.order_by!r}")
        try:
            self.subject.format(aggregatetype="a")
        except (LookupError, ValueError):
            raise InvalidArgument(
                "subject may contain the field {aggregatetype} and no other, not "
                f"{self.subject!r}"
            ) from None


class DebeziumIntake:
    """Moves rows of a table in Debezium's layout into an outbox."""

    def __init__(
        self,
        runner: Runner,
        source: DebeziumTable,
        outbox_table: str,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._runner, self._source, self._now_ns = runner, source, now_ns
        self._outbox = OutboxStatements(runner.dialect, outbox_table)
        self._rows = named_table(source.name, *dict.fromkeys((*COLUMNS, source.order_by)))
        self._refused: set[Any] = set()
        """The ids of rows that cannot be messages."""
        self._repeated: set[Any] = set()
        """The ids of rows whose messages are in the outbox already, of the present `move`."""

    async def move(self) -> int:
        """Move all committed rows, without those whose messages the outbox has already. Returns
        their number. Raises what the driver raises.
        """
        before, self._repeated = self._repeated, set()
        moved = 0
        while True:
            besides = len(self._refused) + len(self._repeated)
            found, taken = await self._runner.run(self._move)
            moved += taken
            if found < ROWS + besides:
                break
        for each in self._repeated - before:
            log.warning(
                "row %s of %s waits: the outbox has a message of its id, which is not sent yet",
                each,
                self._source.name,
            )
        return moved

    async def _move(self, connection: DatabaseConnection) -> tuple[int, int]:
        rows = self._rows.c
        look = (
            select(*[rows[name] for name in COLUMNS])
            .order_by(rows[self._source.order_by])
            .limit(bindparam("most"))
        )
        passed = self._refused | self._repeated
        found = (await connection.execute(Statement(look, {"most": ROWS + len(passed)}))).rows
        converted = [
            (row[0], made)
            for row in found
            if row[0] not in passed and (made := self._converted(row)) is not None
        ]
        stored = await self._stored(connection, [made["message_id"] for _, made in converted])
        taken = []
        for identifier, made in converted:
            if made["message_id"] in stored:
                self._repeated.add(identifier)
                continue
            stored.add(made["message_id"])
            await connection.execute(self._outbox.insert([made], "", 0))
            taken.append(identifier)
        if taken:
            gone = delete(self._rows).where(rows.id.in_(places("row", places_for(len(taken)))))
            if (await connection.execute(Statement(gone, listed("row", taken)))).changed != len(
                taken
            ):
                raise RuntimeError(
                    f"another process took rows of {self._source.name} at the same time: "
                    "they are read again"
                )
        return len(found), len(taken)

    async def _stored(self, connection: DatabaseConnection, message_ids: list[bytes]) -> set[bytes]:
        if not message_ids:
            return set()
        return {
            bytes(message_id)
            for (message_id,) in (await connection.execute(self._outbox.stored(message_ids))).rows
        }

    def _converted(self, row: Sequence[Any]) -> dict[str, Any] | None:
        identifier, aggregate, key, kind, payload = row
        try:
            number, shown = message_id(identifier)
            headers = {"id": shown} | ({"eventType": str(kind)} if kind else {})
            subject = self._source.subject.format(aggregatetype=aggregate)
            return new_message(
                number,
                self._now_ns(),
                subject,
                body_of(payload),
                key=str(key) if key else None,
                headers=headers,
            ).row()
        except QmqError as failure:
            self._refused.add(identifier)
            log.error(
                "row %s of %s is no message, and stays there: %s",
                identifier,
                self._source.name,
                failure,
            )
            return None


def message_id(identifier: Any) -> tuple[MessageId, str]:
    """The id of the message that a row becomes, and the row's id as a text. An id that is no UUID
    is hashed. Raises InvalidArgument.
    """
    if isinstance(identifier, bytes | bytearray | memoryview) and len(identifier) == 16:
        identifier = UUID(bytes=bytes(identifier))
    shown = str(identifier)
    try:
        return MessageId.parse(UUID(shown).hex), shown
    except ValueError:
        return MessageId.parse(
            hashlib.blake2b(utf8("a row's id", shown), digest_size=16).hexdigest()
        ), shown


def body_of(payload: Any) -> bytes:
    """The body for a payload from the database: bytes and text unchanged, parsed values as JSON
    text; empty for a tombstone. Raises InvalidArgument.
    """
    if payload is None:
        return b""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    return utf8(
        "a payload",
        payload
        if isinstance(payload, str)
        else json.dumps(payload, ensure_ascii=False, separators=(",", ":")),
    )
