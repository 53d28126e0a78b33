"""Messages and consumers of a subject of either kind, ordered or not."""

from __future__ import annotations

from datetime import timedelta

from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message
from qmq.client.consuming.ordered.consumer import OrderedConsumer
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.errors import OrderMismatch

AnyMessage = Message | OrderedMessage
AnyConsumer = Consumer | OrderedConsumer


def fail(message: AnyMessage, delay: timedelta | None = None, error: str | BaseException = "") -> None:
    """Count a failed attempt: the message is handed out again, after the group's own delay if none is given."""
    if isinstance(message, Message):
        message.nack(delay, error)
    else:
        message.fail(delay, error)


async def joined(consumer: AnyConsumer) -> None:
    """Join the group. Raises as `join`; then the consumer is closed."""
    try:
        await consumer.join()
    except BaseException:
        await consumer.close()
        raise


async def joined_unordered(consumer: Consumer) -> bool:
    """Join the group. Returns False, with the consumer closed, if the subject is ordered: use an ordered consumer. Raises UnknownSubject,
    AccessDenied, ClientClosed; then the consumer is closed, too.
    """
    try:
        await joined(consumer)
    except OrderMismatch:
        return False
    return True
