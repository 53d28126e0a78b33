"""`Client.outbox` and `Client.outbox_watchdog`: messages in the application's own database transactions (docs/OUTBOX.md). `qmq.sql` is
imported at first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from qmq.client.producing.batch import texts
from qmq.client.producing.client import SendingClient

if TYPE_CHECKING:
    from qmq.sql.debezium_outbox import DebeziumTable
    from qmq.sql.outbox import Outbox, Outboxes
    from qmq.sql.outbox_watchdog import Watchdogs

GRACE: Final = timedelta(seconds=5)
LEASE: Final = timedelta(seconds=10)


class OutboxClient(SendingClient):
    """The part of `qmq.Client` that sends messages in database transactions."""

    _own_outboxes: Outboxes | None = None

    @property
    def _outboxes(self) -> Outboxes:
        self._links.check_usable()
        if self._own_outboxes is None:
            from qmq.sql.dialects import check_installed

            check_installed()
            from qmq.sql.outbox import Outboxes
            from qmq.sql.outbox_sender import OutboxProducers, Sender

            patience = self._timing.outbox_delivery_s
            producers = OutboxProducers(
                partial(self.producer, delivery_timeout_s=patience),
                partial(self.ordered_producer, delivery_timeout_s=patience),
                partial(self.delayed_producer, delivery_timeout_s=patience),
                self._ordering,
            )
            self._own_outboxes = Outboxes(Sender(producers, patience), self._producer_ids(), self.interceptors, self._now_ns)
        return self._own_outboxes

    def outbox(self, connection: Any, *, table: str = "qmq_outbox", grace: timedelta = GRACE) -> Outbox:
        """Send messages if, and only if, a database transaction commits: `async with mq.outbox(connection) as box: box.send(...)`.

        `connection` is the application's own, in its own transaction: of SQLAlchemy 2 (Connection, AsyncConnection, Session, AsyncSession),
        or of a driver (see `Outbox.committed`). With an Engine or AsyncEngine the outbox makes the transaction: see `box.connection`. A
        watchdog sends messages that are still unsent `grace` after the block's end. Raises InvalidArgument, also where SQLAlchemy is not
        installed (`qmq[sql]`), InvalidName, ClientClosed.
        """
        return self._outboxes.outbox(connection, table=table, grace=grace)

    def outbox_watchdog(
        self,
        engine: Any,
        *,
        tables: Iterable[str] = ("qmq_outbox",),
        lease: timedelta = LEASE,
        debezium: DebeziumTable | None = None,
    ) -> Watchdogs:
        """Send the messages that committed transactions left in outbox tables: `async with mq.outbox_watchdog(engine): ...`, or `await
        watchdog.run()`.

        `engine` is SQLAlchemy's, sync or async, or several in a list. Any number of watchdogs may run: one works on each table, and another
        takes over within `lease` after that one has died. With `debezium` it also sends the rows of a table in Debezium's layout, through
        the outbox table. Raises InvalidArgument, InvalidName, ClientClosed.
        """
        outboxes = self._outboxes
        from qmq.sql.outbox_watchdog import Watchdogs

        engines = list(engine) if isinstance(engine, list | tuple) else [engine]
        return Watchdogs(
            engines, list(texts("tables", tables)), outboxes.sender, outboxes.holder, lease, self._timing.outbox_look_s, debezium
        )

    async def _close_outboxes(self) -> None:
        if self._own_outboxes is not None:
            await self._own_outboxes.close()
