"""The common parts of a consumer's attachments: its terms, the session with a master, and the consumer's interface."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from qmq.client.connection import Connection
from qmq.client.route_book import Master
from qmq.errors import QmqError

if TYPE_CHECKING:
    from qmq.client.long_retries import LongRetry
import asyncio

ANSWER_S: Final = 10.0
"""How long a broker may take to answer anything but a pull that waits."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The consumer's terms: group, subject and options, the same for all its attachments."""

    subject: str
    group: str
    name: str
    incarnation: str
    start: str
    lease_ms: int
    tags_any: list[str]
    tags_all: list[str]
    pull_bytes: int
    most_once: bool = False


class ConsumerSession(NamedTuple):
    """A consumer on one connection. Compared by identity, since two brokers may give the same number."""

    connection: Connection
    number: int
    master: Master


class SessionOwner(Protocol):
    """The interface of the consumer that an attachment uses."""

    prefetch: int

    def notify(self) -> None:
        """Something changed: wake all waiters."""
        ...

    def pull_more(self) -> None:
        """There may be room for more messages."""
        ...

    def failed(self, broker_group: str, failure: QmqError) -> None:
        """Report to the application that an attachment cannot continue."""
        ...

    def postpone(self, retries: Iterable[LongRetry]) -> None:
        """Send messages to a delay group, to be retried later."""
        ...

    def lost(self, messages: int) -> None:
        """Messages were lost before they were settled."""
        ...


def set_result(waiting: asyncio.Future[bool], is_changed: bool) -> bool:
    """Wake the waiter; False if it has stopped waiting."""
    if waiting.done():
        return False
    waiting.set_result(is_changed)
    return True
