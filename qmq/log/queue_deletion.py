"""Drops a queue, with its messages and groups, because its subject was deleted.

A drop needs an entry in each log, because segments of one log may be deleted while the other still has older ones.

    a drop command, in the message log     everything up to it no longer belongs to the queue; producers and seal are forgotten
    DROP_QUEUE, in the action log          every group's share and lanes are forgotten

Earlier actions of groups are written first, so that replay never finds one after the drop. A crash between the two entries leaves groups on
an empty queue: a second drop completes the work. Sequences continue, so that a sequence never means two messages.
"""

from __future__ import annotations

from qmq.log import command_messages
from qmq.log.actions import DropQueue
from qmq.log.queue import Queue
from qmq.log.store import Store


def purge(store: Store, queue: Queue) -> None:
    """Drop the messages of a queue; effective when the purge is committed. Producers, seal and groups stay. Raises DiskFull.

    The caller must then move the groups behind the purge: otherwise, as after a crash, they are before the queue's start and count the
    purged messages as expired.
    """
    store.write_actions()
    store.append_region(queue, command_messages.build_purge(queue.id))


def drop(store: Store, queue: Queue) -> None:
    """Drop a queue; the drop is effective when it is committed. Raises DiskFull: call it again."""
    store.write_actions()
    store.append_region(queue, command_messages.build_drop(queue.id))
    store.act(DropQueue(queue.id.subject, queue.id.partition, "", ""))
