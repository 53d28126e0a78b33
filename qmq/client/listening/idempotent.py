"""What a listener asks of a store of finished messages, so that an effect happens exactly once. `qmq.sql.SqlDedup` is one.

The listener handles each message inside `once`, a transaction that holds the handler's writes and the record that this message is done:

    async with idempotent.once(message, group) as once:      an `async def` handler
        if once.is_new:
            await handler(..., context)                      context.connection is once.connection
    await message.ack()                                      after the commit, never before

    with idempotent.once_sync(message, group) as once:       a plain `def` handler: the whole block in one worker thread
        if once.is_new:
            handler(..., context)

* Leaving normally commits the record and the writes together; an exception rolls both back, and goes on to the listener, which hands the
  message back (nack). So does what is raised on the way in and on the way out.
* `is_new` is False if the message's effect is there already: the handler is not run, the message is acknowledged. That is what a crash
  between commit and acknowledgement leads to.
* What is raised on the way in is `Unavailable` if nothing is known of the message yet, since the store is away or another transaction has
  the message in hand: try again later. It is never to be taken for "already done".
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from qmq.model import MessageId


class Named(Protocol):
    """A message, as far as its name goes: `Message` and `OrderedMessage` are."""

    @property
    def subject(self) -> str:
        """What it was sent to."""
        ...

    @property
    def id(self) -> MessageId:
        """Its name, for ever: the same whenever it is handed out."""
        ...


class IdempotentRun(Protocol):
    """One message inside its transaction."""

    @property
    def is_new(self) -> bool:
        """False: this message's effect is there already; do not run the handler, acknowledge the message."""
        ...

    @property
    def connection(self) -> Any:
        """The transaction's connection or session: the handler does its writes through it."""
        ...


class Idempotent(Protocol):
    """Remembers which messages are done, in the transaction of their effects."""

    def check_handler(self, *, is_async: bool) -> None:
        """To be asked once, when a handler is registered. Raises InvalidArgument if such handlers do not go with this store: an `async def`
        handler needs one that does not block the event loop, a plain `def` one needs one that works in a thread.
        """
        ...

    def once(self, message: Named, group: str) -> AbstractAsyncContextManager[IdempotentRun]:
        """A message's transaction, for an `async def` handler. See the module."""
        ...

    def once_sync(self, message: Named, group: str) -> AbstractContextManager[IdempotentRun]:
        """The same for a plain `def` handler: entered, used and left in one thread."""
        ...
