"""What those who answer consumers have of the broker. They are made when it begins to serve from a store, and hold for as long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from qmq.broker.broker_config import BrokerConfig
from qmq.broker.broker_counters import BrokerCounters
from qmq.broker.group_rules import GroupRules
from qmq.broker.pending_responses import PendingResponses
from qmq.broker.produce_checks import Destination
from qmq.broker.sessions import Peer
from qmq.clock import Clock
from qmq.errors import LogDamaged, QmqError
from qmq.log.store import Store
from qmq.model import SubjectConfig


class Turns(Protocol):
    """The broker's turns: what comes in during one round of the event loop is written, and answered, together."""

    @property
    def is_paused(self) -> bool:
        """The mastership is being handed over: nobody is handed messages."""
        ...

    def schedule(self) -> None:
        """Have a turn at the end of this round of the event loop."""
        ...

    def answer_error(self, peer: Peer, request_id: int, failure: QmqError) -> None:
        """Tell the asker what went wrong."""
        ...


class Queues(Protocol):
    """The queues that are here, and the settings of their subjects."""

    def find_queue(self, subject: bytes, partition: int) -> Destination:
        """The queue. Raises InvalidArgument, InvalidName, UnknownSubject, OrderMismatch, RouteChanged."""
        ...

    def subject(self, name: str) -> SubjectConfig:
        """The subject's settings. Raises UnknownSubject."""
        ...


@dataclass(frozen=True, slots=True)
class ServingParts:
    """Of one broker, on one store."""

    store: Store
    clock: Clock
    config: BrokerConfig
    loop: asyncio.AbstractEventLoop
    counters: BrokerCounters
    responses: PendingResponses
    rules: GroupRules
    mends: Callable[[LogDamaged], bool]
    """Told of damage; True if it is being repaired, and who waits will be woken."""
    turns: Turns
    queues: Queues
