"""Dropping a queue, because its subject was deleted: what it holds does not count any more, and its groups are gone.

It takes an entry in each log, because each log must tell it by itself: segments of either may be gone while the other has older ones.

    a drop command, in the message log     everything up to it is not of the queue; producers and seal are forgotten
    DROP_QUEUE, in the action log          every group's share and lanes are forgotten

What groups did before is written before, so that replay never finds it behind the drop. A crash between the two leaves groups on a queue
that has nothing: dropping it again finishes. Sequences go on from where they were, so that no position ever means two messages.
"""

from __future__ import annotations

from qmq.log import command_messages
from qmq.log.actions import DropQueue
from qmq.log.queue import Queue
from qmq.log.store import Store


def drop(store: Store, queue: Queue) -> None:
    """Drop a queue; done when it is committed. Raises DiskFull: it can be done again."""
    store.write_actions()
    store.append_region(queue, command_messages.build_drop(queue.id))
    store.droppable += queue.drop()
    store.act(DropQueue(queue.id.subject, queue.id.partition, "", ""))
