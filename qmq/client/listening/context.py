"""The context of a handler: the message it works on, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from qmq.client.any_message import AnyMessage
from qmq.client.listening.outcomes import DONE, Act, HandlerDecision
from qmq.client.message import error_text, retry_ms
from qmq.clock import time_of
from qmq.errors import InvalidArgument

VERDICT_OF_TRANSACTION: Final = (
    "with `idempotent` the verdict belongs to the transaction: return to commit and acknowledge, raise qmq.Retry or qmq.Reject to roll back"
)
Say = Callable[[Sequence[AnyMessage], HandlerDecision], None]
"""Gives this verdict to the messages without a verdict."""


class Context:
    """The context of a handler. A handler gets it in the parameter that is annotated with `qmq.Context`.

    `mq` is the client, for sending messages; a plain `def` handler, which has no event loop, gets the client of `qmq.blocking`.
    `connection` belongs to the transaction that `idempotent` began; None without `idempotent`. `messages` has all messages of a batch;
    `message` and the properties of this class are about the first.
    """

    __slots__ = ("_deadline_ms", "_say", "connection", "group", "messages", "mq")

    def __init__(self, mq: Any, group: str, messages: Sequence[AnyMessage], say: Say | None, deadline_ms: int | None) -> None:
        self.mq = mq
        self.group = group
        self.messages = messages
        self.connection: Any = None
        self._say = say
        self._deadline_ms = deadline_ms

    @property
    def message(self) -> AnyMessage:
        """The message: its id, key, tags, sequence, times."""
        return self.messages[0]

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        return self.message.subject

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.message.attempt

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The message's headers, by name."""
        return self.message.headers

    @property
    def deadline(self) -> datetime | None:
        """When the listener's `timeout` ends this handler; None without a timeout."""
        return None if self._deadline_ms is None else time_of(self._deadline_ms)

    def ack(self) -> None:
        """Acknowledge now; a later exception of the handler is only logged. For a batch: all messages without a verdict. Raises
        InvalidArgument with `idempotent`.
        """
        self._decide(DONE)

    def nack(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """The message failed: it is handed out again, even if the handler returns. Raises InvalidArgument (with `idempotent`),
        DelayTooLong.
        """
        if delay is not None:
            retry_ms(delay)
        self._decide(HandlerDecision(Act.NACK, delay, error_text(error)))

    def reject(self, error: str | BaseException = "") -> None:
        """The message failed, and no other attempt will help: it goes to the dead-letter queue. Raises
        InvalidArgument with `idempotent`.
        """
        self._decide(HandlerDecision(Act.REJECT, None, error_text(error)))

    def _decide(self, decision: HandlerDecision) -> None:
        if self._say is None:
            raise InvalidArgument(VERDICT_OF_TRANSACTION)
        self._say(self.messages, decision)
