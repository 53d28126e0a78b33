"""The common parts of a consumer's attachments: its terms, the session with a master, and the calls to the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qmq.client.connection import Connection
from qmq.client.prefetch_limits import PrefetchLimit
from qmq.client.ready_form import ReadyMessages
from qmq.client.route_book import Master
from qmq.errors import QmqError

if TYPE_CHECKING:
    from qmq.client.long_retries import LongRetry

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
    condition: str = ""


class ConsumerSession(NamedTuple):
    """A consumer on one connection. Compared by identity, since two brokers may give the same number."""

    connection: Connection
    number: int
    master: Master


@dataclass(frozen=True, slots=True)
class ConsumerCalls:
    """What an attachment tells its consumer, and asks it."""

    ready: ReadyMessages[Any]
    """Ended before anybody takes or drops messages of an attachment."""
    limit: PrefetchLimit
    """How many messages the consumer may hold."""
    answered: Callable[[int, int], None]
    """A pull for so many messages brought so many."""
    notify: Callable[[], None]
    """Something changed: wake all waiters."""
    pull_more: Callable[[], None]
    """There may be room for more messages."""
    failed: Callable[[str, QmqError], None]
    """The attachment to this broker group cannot continue: report to the application."""
    postpone: Callable[[Iterable[LongRetry]], None]
    """Send messages to a delay group, to be retried later."""
    lost: Callable[[int], None]
    """So many messages were lost before they were settled."""
