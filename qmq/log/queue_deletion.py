"""Drops a queue because its subject was deleted: its messages and groups are deleted.

A drop needs an entry in each log, because segments of one log may be deleted while the other still has older ones.

    a drop command, in the message log     everything up to it no longer belongs to the queue; producers and seal are forgotten
    DROP_QUEUE, in the action log          every group's share and lanes are forgotten

Earlier actions of groups are written first, so that replay never finds one after the drop. A crash between the two entries leaves groups on
an empty queue: dropping it again finishes. Sequences continue, so that a sequence never means two messages.
"""

from __future__ import annotations

from qmq.log import command_messages
from qmq.log.actions import DropQueue
from qmq.log.queue import Queue
from qmq.log.store import Store


def purge(store: Store, queue: Queue) -> None:
    """Forget the messages of a queue; done when it is committed. Producers, seal and groups stay. Raises DiskFull.

    Move the groups behind it: a crash before that leaves them before the queue's start, where they would miss expired messages.
    """
    store.write_actions()
    store.append_region(queue, command_messages.build_purge(queue.id))
    queue.purge()


def drop(store: Store, queue: Queue) -> None:
    """Drop a queue; the drop is effective when it is committed. Raises DiskFull: call it again."""
    store.write_actions()
    store.append_region(queue, command_messages.build_drop(queue.id))
    store.droppable += queue.drop()
    store.act(DropQueue(queue.id.subject, queue.id.partition, "", ""))
