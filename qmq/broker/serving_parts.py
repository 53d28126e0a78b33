"""The parts of the broker that serve consumers use. They are made when the broker begins to serve from a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from qmq.broker.broker_config import BrokerConfig
from qmq.broker.broker_counters import BrokerCounters
from qmq.broker.destinations import BrokerSubjects
from qmq.broker.group_rules import GroupRules
from qmq.broker.pending_responses import PendingResponses
from qmq.broker.sessions import Peer
from qmq.clock import Clock
from qmq.errors import LogDamaged, QmqError
from qmq.log.store import Store


class Turns(Protocol):
    """The broker's turns: requests of one round of the event loop are written and answered together."""

    @property
    def is_paused(self) -> bool:
        """The mastership is being handed over: no message is handed out."""
        ...

    def schedule(self) -> None:
        """Schedule a turn for the end of this round of the event loop."""
        ...

    def answer_error(self, peer: Peer, request_id: int, failure: QmqError) -> None:
        """Answer a request with an error."""
        ...


@dataclass(frozen=True, slots=True)
class ServingParts:
    """The parts of one broker, on one store."""

    store: Store
    clock: Clock
    config: BrokerConfig
    loop: asyncio.AbstractEventLoop
    counters: BrokerCounters
    responses: PendingResponses
    rules: GroupRules
    report_damage: Callable[[LogDamaged], bool]
    """Reports damage. Returns True if it is being repaired, and waiting pulls will be woken."""
    turns: Turns
    subjects: BrokerSubjects
