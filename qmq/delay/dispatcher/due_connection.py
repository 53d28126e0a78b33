"""The connection of a `DueWindow` to the master of its broker group.

It never gives up: while the window needs it, it tries again, with the locator's pauses, and with growing pauses for errors that only a
change in the cluster can fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import Links
from qmq.client.producing.master_connection import MasterConnection
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delivery.retries import pause_s
from qmq.errors import ClientClosed, InvalidArgument, Overloaded, QmqError
from qmq.wire.frame_payloads import Produced

Encode = Callable[[DueBatch], tuple[bytes, bytes]]
"""Returns the encoded batch. Raises QmqError."""
Changed = Callable[["DueConnection"], None]
"""Batches were decided, or the window's state changed: do what is needed, and `pump`."""
Wants = Callable[["DueConnection"], bool]
"""Whether messages wait that could be planned for the connection's window."""


class DueConnection(MasterConnection[DueBatch]):
    def __init__(self, links: Links, subject: str, window: DueWindow, encode: Encode, changed: Changed, wants: Wants) -> None:
        super().__init__(links, subject, window.group, window, lambda: changed(self))
        self.window = window
        self._encode_batch = encode
        self._wants = wants

    def _transmit(self, connection: Connection, batch: DueBatch) -> None:
        if batch.is_uncertain > batch.says_again:
            batch.encoded = None
        super()._transmit(connection, batch)

    def _encode(self, batch: DueBatch) -> tuple[bytes, ...]:
        batch.says_again = batch.is_uncertain
        try:
            return self._encode_batch(batch)
        except QmqError:
            raise
        except Exception as cause:
            raise _unencodable(cause) from cause

    def _stored(self, batch: DueBatch, produced: Produced, now: float) -> None:
        self.window.stored(batch, produced, now)

    @property
    def _is_needed(self) -> bool:
        window = self.window
        return not self.is_closed and not window.is_settled and (bool(window.flight) or self._wants(self))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        if isinstance(failure, ClientClosed):
            return True
        self._unreached(failure)
        await asyncio.sleep(pause_s(failures, failure))
        return False


def _unencodable(cause: Exception) -> QmqError:
    """The error for a batch that cannot be encoded: its messages are at fault, for any error of the library."""
    if isinstance(cause, MemoryError):
        return Overloaded("no memory to make the batch")
    return InvalidArgument(f"the stored messages cannot be made into a batch: {type(cause).__name__}: {cause}")
