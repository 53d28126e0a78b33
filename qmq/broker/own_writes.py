"""What a broker writes to its message log besides the batches of producers: dead letters, and command messages of queues."""

from __future__ import annotations

import logging
from collections.abc import Callable

from qmq.broker.serving_parts import ServingParts
from qmq.errors import RouteConflict
from qmq.log.queue import Queue
from qmq.log.queue_deletion import purge
from qmq.log.store import Intake
from qmq.wire.frame_payloads import Produced

log = logging.getLogger("qmq.broker")


class OwnWrites:
    """Made when the broker begins to serve from a store. Await `Broker.committed` before answering."""

    def __init__(self, parts: ServingParts, tell_written: Callable[[list[Queue]], None]) -> None:
        """`tell_written` is called after each write, with the queues that got messages."""
        self._store = parts.store
        self._turns = parts.turns
        self._tell_written = tell_written

    def append(self, batches: list[Intake]) -> list[Produced]:
        """Store batches that the broker itself makes; stored ones are recognised by their numbers. Raises DiskFull."""
        produced = self._store.append(batches)
        self._written([batch.queue for batch in batches])
        return produced

    def seal(self, queue: Queue, change_id: str, to_version: int) -> int:
        """Close a partition, once, and return the sequence of its command message. Raises RouteConflict if another change closed it,
        DiskFull.
        """
        sealed = queue.sealed
        if sealed is None:
            self._store.append_command(queue, change_id, to_version)
            log.info("%s is sealed at %d by change %s", queue.id, queue.next_sequence - 1, change_id)
            self._written([queue])
            sealed = queue.sealed
        assert sealed is not None
        if sealed.change_id != change_id:
            raise RouteConflict(f"{queue.id} is already closed by change {sealed.change_id}, which leads to version {sealed.to_version}")
        return sealed.sequence

    def purge(self, queue: Queue) -> None:
        """Forget the messages of a queue. Raises DiskFull."""
        purge(self._store, queue)
        self._written([])

    def _written(self, queues: list[Queue]) -> None:
        self._tell_written(queues)
        self._turns.schedule()
