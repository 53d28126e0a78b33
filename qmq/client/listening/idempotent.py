"""The interface of a store of finished messages, for effects that happen exactly once. `qmq.sql.SqlDedup` implements it.

The listener handles each message inside `once`, a transaction that holds the handler's writes and the record that this message is done:

    async with idempotent.once(message, group) as once:      an `async def` handler
        if once.is_new:
            await handler(..., context)                      context.connection is once.connection
    await message.ack()                                      after the commit, never before

    with idempotent.once_sync(message, group) as once:       a plain `def` handler: the whole block in one worker thread
        if once.is_new:
            handler(..., context)

* Leaving the block normally commits the record and the writes together. An exception rolls both back and reaches the listener, which nacks
  the message; so do exceptions on entering and leaving.
* `is_new` is False if the message's effect is committed already, as after a crash between commit and acknowledgement: the handler is not
  called, and the message is acknowledged.
* Entering raises `Unavailable` if the store cannot be reached, or another transaction is handling the message: try again later. It never
  means "already done".
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from qmq.model import MessageId


class Named(Protocol):
    """The name of a message: its subject and id, and when it was stored. `Message` and `OrderedMessage` have all of it."""

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        ...

    @property
    def id(self) -> MessageId:
        """The message's id, which is the same at every delivery."""
        ...

    @property
    def append_time_ms(self) -> int:
        """When the broker stored it, milliseconds since 1970. The present is not earlier, also if another clock says so."""
        ...


class IdempotentRun(Protocol):
    """One message inside its transaction."""

    @property
    def is_new(self) -> bool:
        """False if the message's effect is committed already: do not call the handler, acknowledge the message."""
        ...

    @property
    def connection(self) -> Any:
        """The transaction's connection or session, for the handler's writes."""
        ...


class Idempotent(Protocol):
    """Records finished messages in the transaction of their effects."""

    def check_handler(self, *, is_async: bool) -> None:
        """Called once, when a handler is registered. Raises InvalidArgument if the store does not suit it: an `async def` handler needs a
        store that does not block the event loop, a plain `def` handler one that works in a thread.
        """
        ...

    def once(self, message: Named, group: str) -> AbstractAsyncContextManager[IdempotentRun]:
        """A message's transaction, for an `async def` handler. The module describes it."""
        ...

    def once_sync(self, message: Named, group: str) -> AbstractContextManager[IdempotentRun]:
        """A message's transaction, for a plain `def` handler: entered, used and left in one thread."""
        ...
